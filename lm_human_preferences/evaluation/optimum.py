"""Highest reward that a policy can have at a given KL, and best of n.

The optimal policies are pi*(y|x) = rho(y|x) exp(r(x, y) / beta) / Z(x), one for each beta. They are
the frontier of the paper's figure 3 (section 3.1.1): no policy with the same mean KL has a higher
mean reward. The frontier is exact if all responses to a query can be enumerated, else estimated.

Tensors are (queries, responses): log-probabilities under the reference rho, and the rewards of the
same responses. Samples are passed in the same form, see mixture. Results are float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch.nn.functional import softplus

from lm_human_preferences.policy import Policy
from lm_human_preferences.rewards import Scorer
from lm_human_preferences.utils.core import MIN_TEMPERATURE

Scored = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]  # see rewards.make_score_fn

ROUNDING = 1e-6  # a gain below this fraction of the largest score is a rounding error of fp32
CHUNK = 8192  # most token sequences in one forward pass
CACHED = 2**16  # numbers in a chunk; a processor's cache holds several such chunks


def expected(logprobs: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the mean of `values (queries, responses)` under a policy: (queries,)."""
    return (logprobs.double().exp() * values.double()).sum(-1)


def kl(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Return KL(policy || reference) in nats: (queries,)."""
    logprobs, ref_logprobs = logprobs.double(), ref_logprobs.double()
    terms = logprobs.exp() * (logprobs - ref_logprobs)
    return torch.where(logprobs == -torch.inf, 0.0, terms).sum(-1)


def moments(ref_logprobs: torch.Tensor, rewards: torch.Tensor, beta: float) -> torch.Tensor:
    """Return log Z, reward mean, reward variance of pi*: (3, queries). KL = mean / beta - log Z."""
    results = []
    rows = max(1, CACHED // rewards.shape[1])
    for log_rho, reward in zip(ref_logprobs.split(rows), rewards.split(rows), strict=True):
        reward = reward.double()
        energy = log_rho.double() + reward / beta
        top = energy.max(1).values
        weights = energy.sub_(top[:, None]).exp_()
        total = weights.sum(1)
        mean = (weights * reward).sum(1) / total
        variance = (weights * (reward - mean[:, None]).square_()).sum(1) / total
        results.append(torch.stack([total.log() + top, mean, variance]))
    return torch.cat(results, dim=1)


def frontier(
    ref_logprobs: torch.Tensor, rewards: torch.Tensor, betas: torch.Tensor | Iterable[float]
) -> torch.Tensor:
    """Return mean KL and mean reward of pi* at each of `betas`: (2, len(betas))."""
    points = []
    for beta in map(float, betas):
        log_z, mean, _ = moments(ref_logprobs, rewards, beta).mean(1)
        points.append(torch.stack([mean / beta - log_z, mean]))
    return torch.stack(points, dim=1)


def beta_grid(rewards: torch.Tensor) -> torch.Tensor:
    """Return 50 decreasing betas, from almost no KL to almost only best responses."""
    return rewards.double().std(-1).mean() / torch.logspace(-1.5, 1.5, 50, dtype=torch.float64)


def frontier_at(
    kl: float | torch.Tensor, ref_logprobs: torch.Tensor, rewards: torch.Tensor
) -> tuple[float, float]:
    """Return the highest mean reward at a mean KL of `kl` nats, and the beta that gives it.

    Uses Newton's method in 1 / beta, with bisection where a step would leave the bounds. If `kl`
    is large enough for a policy that gives only best responses, return their reward and beta 0.
    """
    kl, best = float(kl), rewards.max(-1, keepdim=True).values
    log_best = torch.where(rewards == best, ref_logprobs.double(), -torch.inf).logsumexp(-1)
    if kl >= -log_best.mean():
        return best.double().mean().item(), 0.0
    _, mean, variance = moments(ref_logprobs, rewards, math.inf).mean(1).tolist()
    if kl <= 0 or variance == 0:
        return mean, math.inf
    low, high, inverse = 0.0, math.inf, math.sqrt(2 * kl / variance)
    for _ in range(200):
        log_z, mean, variance = moments(ref_logprobs, rewards, 1 / inverse).mean(1).tolist()
        missing = kl - (mean * inverse - log_z)
        if abs(missing) < 1e-9 * kl or high - low < 1e-14 * high:
            break
        if missing > 0:
            low = inverse
        else:
            high = inverse
        newton = inverse + missing / (inverse * variance) if variance > 0 else math.nan
        if low < newton < min(high, 4 * inverse):
            inverse = newton
        else:  # bisection, or doubling until an upper bound is known
            inverse = min((low + high) / 2, 2 * inverse)
    return mean + missing / inverse, 1 / inverse  # the slope of the frontier is beta


def best_of_n(
    ref_logprobs: torch.Tensor, rewards: torch.Tensor, *ns: int, judged: torch.Tensor | None = None
) -> torch.Tensor:
    """Return expected rewards and KLs of the best of n samples: (2, len(ns), queries).

    The best sample has the highest of `rewards`; if several have it, the first is chosen. judged
    (queries, responses): rewards by which the chosen sample is scored; by default `rewards`.

    Let F(r) be the probability under rho of a reward of at most r. The best of n has reward r with
    probability F(r)^n - F(below r)^n, and among the responses with reward r it is distributed as
    under rho. The well-known KL of log n - (n - 1) / n is exact where all responses have different
    rewards and tiny probabilities; elsewhere it is an upper bound.
    """
    results = []
    for query, (log_rho, reward) in enumerate(zip(ref_logprobs, rewards, strict=True)):
        rho = log_rho.double().exp()
        values, which = reward.double().unique(return_inverse=True)
        probability = torch.zeros_like(values).index_add_(0, which, rho)
        up_to = probability.cumsum(0)
        possible = probability > 0
        log_rest = torch.log1p(-probability / up_to)  # log of F(below r) / F(r)
        if judged is not None:
            total = torch.zeros_like(values).index_add_(0, which, rho * judged[query].double())
            values = torch.where(possible, total / probability, 0)  # mean over equally good ones
        for n in ns:
            chosen = torch.where(possible, up_to**n * -torch.expm1(n * log_rest), 0)
            terms = torch.xlogy(chosen, torch.where(possible, chosen / probability, 1))
            kl = terms.sum().clamp(min=0)  # else rounding could show -0.000
            results.append(torch.stack([chosen @ values, kl]))
    return torch.stack(results).reshape(len(rewards), len(ns), 2).permute(2, 1, 0)


def standard_error(values: torch.Tensor) -> torch.Tensor:
    """Return the standard error of the mean of independent `values (queries, ...)`: (...)."""
    if len(values) < 2:
        return values.new_full(values.shape[1:], math.nan, dtype=torch.float64)
    return values.double().std(0) / math.sqrt(len(values))


def mixture(log_ratios: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities of samples under reference and policy: (queries, samples) each.

    log_ratios (queries, samples): log pi / rho of samples, half from the reference rho and half
    from the policy pi. So all samples come from (rho + pi) / 2, and a sample's weight under rho is
    rho / (rho / 2 + pi / 2), at most 2 (the balance heuristic: Veach and Guibas 1995; Owen and Zhou
    2000); under pi likewise. The weights are normalised, so that both models are distributions on
    the same samples: then no policy is above the frontier, and errors of the gain and of the
    possible gain cancel.
    """
    log_ratios = log_ratios.double()
    reference, policy = -softplus(log_ratios), -softplus(-log_ratios)
    return reference.log_softmax(-1), policy.log_softmax(-1)


def effective_samples(ref_logprobs: torch.Tensor, rewards: torch.Tensor, beta: float) -> float:
    """Return how many independent samples of pi* per query would say as much as these samples.

    For one query this is n = 1 / sum(w^2), where w are the weights of its samples under pi* at
    `beta` > 0. Since the error of log Z is about 1 / (2 n), the result is the harmonic mean over
    queries, weighted by their gains: the worst query that has a gain decides.
    """
    rewards = rewards.double()
    weights = (ref_logprobs.double() + rewards / beta).softmax(-1)
    gains = (weights * rewards).sum(-1) - expected(ref_logprobs, rewards)
    if gains.max() <= ROUNDING * rewards.abs().max():
        return float(rewards.shape[-1])  # without gains, there is nothing to estimate
    gains = gains.clamp(min=0)
    return (gains.sum() / (gains * weights.square().sum(-1)).sum()).item()


def sampled_frontier(
    ref_logprobs: torch.Tensor, rewards: torch.Tensor, betas: torch.Tensor | Iterable[float]
) -> tuple[torch.Tensor, ...]:
    """Estimate the frontier at each of `betas` from samples, see mixture.

    Returns KLs, rewards, standard errors of the reward at a given KL, and effective samples,
    each (len(betas),). Errors are over queries, by the delta method: the highest reward at a KL is
    the minimum over beta of beta (KL + mean log Z), so near the minimum its error is that of beta
    log Z.
    """
    betas = list(map(float, betas))
    errors, effective = [], []
    for beta in betas:
        errors.append(standard_error(beta * moments(ref_logprobs, rewards, beta)[0]))
        effective.append(effective_samples(ref_logprobs, rewards, beta))
    kls, means = frontier(ref_logprobs, rewards, betas)
    return kls, means, torch.stack(errors), torch.tensor(effective, dtype=torch.float64)


def sampled_best_of_n(
    ref_logprobs: torch.Tensor, rewards: torch.Tensor, n: int, judged: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Estimate rewards and KLs of the best of `n` samples of the reference: (queries,) each.

    ref_logprobs: for at least n samples, see mixture. rewards, judged: see best_of_n.
    """
    values = rewards if judged is None else judged
    results = []
    for log_rho, reward, value in zip(ref_logprobs, rewards, values, strict=True):
        weight = log_rho.double().exp()
        _, which, counts = reward.unique(return_inverse=True, return_counts=True)
        empty = torch.zeros(len(counts), dtype=torch.float64)
        probability = empty.index_add(0, which, weight)
        means = empty.index_add(0, which, weight * value.double()) / probability
        at_most = _best_at_most(probability, empty.index_add(0, which, weight.square()), n)
        of_best = at_most.diff(prepend=at_most.new_zeros(1))
        kl = _kl_of_best_of_n(probability, of_best, counts > 1, n)
        results.append(torch.stack([of_best @ torch.where(probability > 0, means, 0), kl]))
    reward, kl = torch.stack(results, dim=1)
    return reward, kl


def _best_at_most(probability: torch.Tensor, squares: torch.Tensor, n: int) -> torch.Tensor:
    """Estimate P(reward of the best of `n` <= value) for all values, in ascending order: (values,).

    probability, squares (values,): sums of the weights, and of the squared weights, of the samples
    with each value. If a fraction F of N equal samples is below, C(N F, n) / C(N, n) has no bias.
    With weights, N is the number at which a binomial fraction has the variance of F.
    """
    up_to = probability.cumsum(0).clamp(max=1)
    below, total = squares.cumsum(0), squares.sum()
    variance = below * (1 - up_to) ** 2 + (total - below) * up_to**2
    inverse_size = (variance / (up_to * (1 - up_to))).nan_to_num(0, 0, 0).unsqueeze(1)
    taken = inverse_size * torch.arange(n)  # fraction that the samples chosen before take away
    left = (up_to.unsqueeze(1) - taken).clamp(min=0)
    chances = (left / (1 - taken).clamp(min=ROUNDING)).prod(1)
    chances[-1] = 1
    return chances.cummax(0).values


def _kl_of_best_of_n(
    probability: torch.Tensor, of_best: torch.Tensor, is_tied: torch.Tensor, n: int
) -> torch.Tensor:
    """Return the KL of the best of n, from the probability of each reward value, ascending.

    of_best (values,): probability that the best sample has each value, see _best_at_most.

    A value that several samples have is a tie, handled as in best_of_n. A value that a single
    sample has stands for an interval, over which the density n F^(n - 1) is integrated: without
    ties the KL is log n - (n - 1) / n, whatever the number of samples.
    """
    up_to = probability.cumsum(0).clamp(max=1)
    below = (up_to - probability).clamp(min=0)

    def integral(share: torch.Tensor) -> torch.Tensor:
        powers = share**n
        return powers * (math.log(n) - (n - 1) / n) + (n - 1) / n * torch.xlogy(powers, powers)

    of_tied = torch.xlogy(of_best, torch.where(probability > 0, of_best / probability, 1))
    return torch.where(is_tied, of_tied, integral(up_to) - integral(below)).sum().clamp(min=0)


def all_responses(n_vocab: int, length: int) -> torch.Tensor:
    """Return all n_vocab ** length responses in counting order: int64 (responses, length)."""
    place_values = n_vocab ** torch.arange(length - 1, -1, -1)
    return torch.arange(n_vocab**length).unsqueeze(1) // place_values % n_vocab


@torch.no_grad()
def all_logprobs(policy: Policy, queries: torch.Tensor, length: int) -> torch.Tensor:
    """Return log-probabilities of all responses: float64 (queries, n_vocab ** length), CPU."""
    return torch.stack(
        [_logprobs(policy, context, length) for context in policy.embed_queries(queries)]
    )


def _logprobs(policy: Policy, context: torch.Tensor, length: int) -> torch.Tensor:
    """Return log-probabilities of all responses after `context (n,)`: (n_vocab ** length,)."""
    logprobs = torch.zeros(1, dtype=torch.float64)
    for done in range(length):
        parts = []
        for prefixes in _extended(context, policy.model.sizes.n_vocab, done).split(CHUNK):
            tokens, mask = policy.model.mask_padding(
                prefixes.to(policy.device), policy.padding_token
            )
            h = policy.model.hidden(
                tokens, mask, output_positions=torch.tensor([-1], device=tokens.device)
            ).squeeze(1)
            logits = policy.model.logits(h).double() / max(policy.temperature, MIN_TEMPERATURE)
            parts.append(logits.log_softmax(-1).cpu())
            if policy.is_end is not None:
                _only_zeros_after_the_end(parts[-1], prefixes[:, len(context) :], policy.is_end)
        logprobs = (logprobs.unsqueeze(1) + torch.cat(parts)).flatten()
    return logprobs


def _only_zeros_after_the_end(
    logprobs: torch.Tensor,
    responses: torch.Tensor,
    is_end: Callable[[torch.Tensor, int], torch.Tensor],
) -> None:
    """Make token 0 certain in `logprobs (batch, n_vocab)` where `responses (batch, n)` ended."""
    ended = torch.zeros(len(responses), dtype=torch.bool)
    for position, tokens in enumerate(responses.unbind(1)):
        ended |= is_end(tokens, position)
    logprobs[ended] = -torch.inf
    logprobs[ended, 0] = 0


def _extended(context: torch.Tensor, n_vocab: int, length: int) -> torch.Tensor:
    """Return `context (n,)` with all responses after it: (n_vocab ** length, n + length)."""
    responses = all_responses(n_vocab, length)
    return torch.cat([context.cpu().expand(len(responses), -1), responses], dim=1)


def all_rewards(reward_model: Scorer, queries: torch.Tensor, length: int) -> torch.Tensor:
    """Return float64 rewards (queries, n_vocab ** length) of all responses, without truncation."""
    n_vocab = reward_model.model.sizes.n_vocab
    last = torch.arange(n_vocab).unsqueeze(1)
    chunk_size = max(1, CHUNK // n_vocab)
    rewards = []
    for query in queries:
        parts = []
        for prefixes in _extended(query, n_vocab, length - 1).split(chunk_size):
            part = reward_model.get_rewards(prefixes, last.expand(len(prefixes), -1, -1))
            parts.append(part.double().flatten().cpu())
        rewards.append(torch.cat(parts))
    return torch.stack(rewards)


def all_scores(
    score_fn: Callable[[torch.Tensor, torch.Tensor], Scored],
    queries: torch.Tensor,
    n_vocab: int,
    length: int,
) -> torch.Tensor:
    """Return scores of all responses: float64 (queries, n_vocab ** length), on the CPU."""
    chunks = all_responses(n_vocab, length).split(CHUNK)
    scores = []
    for query in queries:
        parts = []
        for chunk in chunks:
            part, _, _ = score_fn(query.expand(len(chunk), -1), chunk)
            parts.append(part.double().cpu())
        scores.append(torch.cat(parts))
    return torch.stack(scores)
