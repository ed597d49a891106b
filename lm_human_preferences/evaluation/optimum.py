"""Highest reward that a policy can have at a given KL, and best-of-n sampling.

The optimal policies are pi*(y|x) = rho(y|x) exp(r(x, y) / beta) / Z(x), one for each beta. They are
the frontier of the paper's figure 3 (section 3.1.1): no policy with the same mean KL has a higher
mean reward. The frontier is exact if all responses to a query can be enumerated, else estimated.

Tensors are (queries, responses): log-probabilities under the reference rho, and the rewards of the
same responses. Samples are passed in the same form, see mixture. Results are float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch.nn.functional import softplus

from lm_human_preferences.policy import Policy
from lm_human_preferences.ppo import ScoreFn
from lm_human_preferences.rewards import EnsembleReward, TrainedRewardModel
from lm_human_preferences.utils.core import MIN_TEMPERATURE

ROUNDING = 1e-6  # a gain up to this fraction of the largest score may be an fp32 rounding error
CHUNK = 8192  # maximum number of token sequences in one forward pass
CACHED = 2**16  # elements in a chunk of a tensor; a processor's cache holds several chunks


def expected(logprobs: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the mean of `values (queries, responses)` under a policy: (queries,)."""
    return (logprobs.double().exp() * values.double()).sum(-1)


def kl(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Return KL(policy || reference) in nats: (queries,)."""
    logprobs, ref_logprobs = logprobs.double(), ref_logprobs.double()
    terms = logprobs.exp() * (logprobs - ref_logprobs)
    return torch.where(logprobs == -torch.inf, 0.0, terms).sum(-1)


def moments(ref_logprobs: torch.Tensor, rewards: torch.Tensor, beta: float) -> torch.Tensor:
    """Return (3, queries): log Z of the optimal policy pi*, and its reward's mean and variance.

    The KL of pi* is mean / beta - log Z."""
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
    ref_logprobs: torch.Tensor, rewards: torch.Tensor, betas: Iterable[float]
) -> torch.Tensor:
    """Return mean KL and reward of the optimal policy at each of `betas`: (2, len(betas))."""
    points = []
    for beta in betas:
        log_z, mean, _ = moments(ref_logprobs, rewards, beta).mean(1)
        points.append(torch.stack([mean / beta - log_z, mean]))
    return torch.stack(points, dim=1)


def beta_grid(rewards: torch.Tensor) -> list[float]:
    """Return 50 decreasing betas: the first permits almost no KL, the last almost any KL."""
    spread = rewards.double().std(-1).mean().clamp(min=ROUNDING)
    return (spread / torch.logspace(-1.5, 1.5, 50, dtype=torch.float64)).tolist()


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
    return mean + missing / inverse, 1 / inverse  # beta is the derivative d(best reward) / d(KL)


def best_of_n(
    ref_logprobs: torch.Tensor, rewards: torch.Tensor, n: int, judged: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return expected rewards and KLs of best-of-n sampling, (queries,) each.

    The best sample has the highest of `rewards`; if several have it, the first is chosen. judged
    (queries, responses): rewards by which the chosen sample is scored.

    Let F(r) be the probability under rho of a reward of at most r. The best of n has reward r with
    probability F(r)^n - F(below r)^n, and among the responses with reward r it is distributed as
    under rho. The well-known KL of log n - (n - 1) / n is exact where all responses have different
    rewards and tiny probabilities; elsewhere it is an upper bound.
    """
    results = []
    for log_rho, reward, value in zip(ref_logprobs, rewards, judged, strict=True):
        rho = log_rho.double().exp()
        values, which = reward.double().unique(return_inverse=True)
        empty = torch.zeros_like(values)
        probability = empty.index_add(0, which, rho)
        possible = probability > 0
        # Each entry is the mean of `judged` over all responses with the same value in `rewards`.
        means = empty.index_add(0, which, rho * value.double()) / probability
        up_to = probability.cumsum(0)
        log_rest = torch.log1p(-probability / up_to)  # log of P(reward < r) / P(reward <= r)
        chosen = torch.where(possible, up_to**n * -torch.expm1(n * log_rest), 0)
        terms = torch.xlogy(chosen, torch.where(possible, chosen / probability, 1))
        kl = terms.sum().clamp(min=0)  # rounding could make the KL -0.000
        results.append(torch.stack([chosen @ torch.where(possible, means, 0), kl]))
    reward, kl = torch.stack(results, dim=1)
    return reward, kl


def standard_error(values: torch.Tensor) -> torch.Tensor:
    """Return the standard error of the mean of `values (queries, ...)` of independent queries."""
    if len(values) < 2:
        return values.new_full(values.shape[1:], math.nan, dtype=torch.float64)
    return values.double().std(0) / math.sqrt(len(values))


def mixture(log_ratios: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities of samples under reference and policy, (queries, samples) each.

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
    """Return the effective number of samples per query, as weighted by the optimal policy.

    For one query this is n = 1 / sum(w^2), where w are the weights of its samples under pi* at
    `beta` > 0. Since the error of log Z is about 1 / (2 n), the result is the harmonic mean over
    queries, weighted by their gains: the worst query that has a gain decides. If no policy can gain
    any reward, the result is the number of samples.
    """
    rewards = rewards.double()
    weights = (ref_logprobs.double() + rewards / beta).softmax(-1)
    gains = (weights * rewards).sum(-1) - expected(ref_logprobs, rewards)
    if gains.max() <= ROUNDING * rewards.abs().max():
        return float(rewards.shape[-1])
    gains = gains.clamp(min=0)
    return (gains.sum() / (gains * weights.square().sum(-1)).sum()).item()


def all_responses(n_vocab: int, length: int) -> torch.Tensor:
    """Return all n_vocab ** length responses in counting order: int64 (responses, length)."""
    place_values = n_vocab ** torch.arange(length - 1, -1, -1)
    return torch.arange(n_vocab**length).unsqueeze(1) // place_values % n_vocab


@torch.no_grad()
def all_logprobs(policy: Policy, queries: torch.Tensor, length: int) -> torch.Tensor:
    """Return log-probabilities of all responses: float64 (queries, n_vocab ** length), CPU.

    No response ends early: policy.is_end is ignored.
    """
    found = []
    for context in policy.embed_queries(queries):
        logprobs = torch.zeros(1, dtype=torch.float64)
        for done in range(length):
            parts = []
            for prefixes in _extended(context, policy.model.sizes.n_vocab, done).split(CHUNK):
                tokens, mask = policy.model.mask_padding(
                    prefixes.to(policy.device), policy.padding_token
                )
                last = torch.tensor([-1], device=tokens.device)
                h = policy.model.hidden(tokens, mask, output_positions=last).squeeze(1)
                logits = policy.model.logits(h).double() / max(policy.temperature, MIN_TEMPERATURE)
                parts.append(logits.log_softmax(-1).cpu())
            logprobs = (logprobs.unsqueeze(1) + torch.cat(parts)).flatten()
        found.append(logprobs)
    return torch.stack(found)


def _extended(context: torch.Tensor, n_vocab: int, length: int) -> torch.Tensor:
    """Return `context (n,)` followed by each response: (n_vocab ** length, n + length)."""
    responses = all_responses(n_vocab, length)
    return torch.cat([context.cpu().expand(len(responses), -1), responses], dim=1)


def all_rewards(
    reward_model: TrainedRewardModel | EnsembleReward,
    queries: torch.Tensor,
    n_vocab: int,
    length: int,
) -> torch.Tensor:
    """Return float64 rewards (queries, n_vocab ** length) of all responses, without truncation."""
    last = torch.arange(n_vocab).unsqueeze(1)
    rewards = []
    for query in queries:
        parts = []
        for prefixes in _extended(query, n_vocab, length - 1).split(max(1, CHUNK // n_vocab)):
            part = reward_model.get_rewards(prefixes, last.expand(len(prefixes), -1, -1))
            parts.append(part.double().flatten().cpu())
        rewards.append(torch.cat(parts))
    return torch.stack(rewards)


def all_scores(score_fn: ScoreFn, queries: torch.Tensor, n_vocab: int, length: int) -> torch.Tensor:
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
