"""How much reward a KL can buy: the optimal policies pi*(y|x) = rho(y|x) exp(r(x, y) / beta) /
Z(x), and best of n.

Together they are the frontier of the paper's figure 3 (section 3.1.1): at its KL, no policy's mean
reward is higher. Exact where all responses to a query can be enumerated, else estimated from
samples. Results are float64. Tensors are (queries, responses): log-probabilities under the
reference rho, and the rewards of the same responses. A list of N samples from rho is such a thing
as well, with the log-probability -log N each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from lm_human_preferences.utils.core import MIN_TEMPERATURE

if TYPE_CHECKING:
    from lm_human_preferences.policy import Policy
    from lm_human_preferences.rewards import TrainedRewardModel

Scored = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]  # see rewards.make_score_fn

CHUNK = 8192  # token sequences in one forward pass


def expected(logprobs: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Mean of `values (queries, responses)` under a policy -> (queries,)."""
    return (logprobs.double().exp() * values.double()).sum(-1)


def kl(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """KL(policy || reference) in nats -> (queries,)."""
    logprobs, ref_logprobs = logprobs.double(), ref_logprobs.double()
    return torch.where(logprobs == -torch.inf, 0.0, logprobs.exp() * (logprobs - ref_logprobs)).sum(
        -1
    )


def moments(ref_logprobs: torch.Tensor, rewards: torch.Tensor, beta: float) -> torch.Tensor:
    """log Z, and mean and variance of the reward under pi*, each (queries,); its KL is mean / beta
    - log Z."""
    results = []
    for log_rho, reward in zip(
        ref_logprobs, rewards, strict=True
    ):  # one query at a time fits the processor's cache
        reward = reward.double()
        energy = log_rho.double() + reward / beta
        top = energy.max()
        weights = energy.sub_(top).exp_()
        total = weights.sum()
        mean = weights @ reward / total
        results.append(
            torch.stack([total.log() + top, mean, weights @ (reward - mean).square_() / total])
        )
    return torch.stack(results, dim=1)


def frontier(
    ref_logprobs: torch.Tensor, rewards: torch.Tensor, betas: torch.Tensor | Iterable[float]
) -> torch.Tensor:
    """KL and reward of pi* at each of `betas`: two tensors (len(betas),) of means over the
    queries."""
    points = []
    for beta in map(float, betas):
        log_z, mean, _ = moments(ref_logprobs, rewards, beta).mean(1)
        points.append(torch.stack([mean / beta - log_z, mean]))
    return torch.stack(points, dim=1)


def beta_grid(rewards: torch.Tensor, points: int = 50) -> torch.Tensor:
    """Values of beta, falling, whose frontier goes from next to no KL to nearly the best response
    only."""
    return rewards.double().std(-1).mean() / torch.logspace(-1.5, 1.5, points, dtype=torch.float64)


def frontier_at(
    kl: float | torch.Tensor, ref_logprobs: torch.Tensor, rewards: torch.Tensor
) -> tuple[float, float]:
    """The highest mean reward at a mean KL of `kl` nats, and the beta that gives it: two floats.

    Newton's method in 1 / beta, kept between bounds. From the KL on at which nothing but best
    responses is left, it is their reward, and beta is 0.
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
        low, high = (inverse, high) if missing > 0 else (low, inverse)
        step = inverse + missing / (inverse * variance) if variance > 0 else math.nan
        inverse = (
            step if low < step < min(high, 4 * inverse) else min((low + high) / 2, 2 * inverse)
        )
    return mean + missing / inverse, 1 / inverse  # the slope of the frontier is beta


def frontier_reward_at(
    kl: float | torch.Tensor, ref_logprobs: torch.Tensor, rewards: torch.Tensor
) -> float:
    """The highest mean reward that any policy with a mean KL of `kl` nats from the reference has: a
    float."""
    return frontier_at(kl, ref_logprobs, rewards)[0]


def best_of_n(
    ref_logprobs: torch.Tensor, rewards: torch.Tensor, *ns: int, judged: torch.Tensor | None = None
) -> torch.Tensor:
    """Expected rewards and KLs of answering with the best of n samples from the reference.

    ref_logprobs, rewards (queries, responses): the best is the one with the highest of `rewards`;
    of equally good ones, the first drawn. judged (queries, responses): the rewards that it gets,
    `rewards` unless given. Returns (2, len(ns), queries); the KL, in nats, is that of the choice.

    Of F(r), the probability under rho of a reward up to r: the best has r with probability
    F(r)^n - F(below r)^n, and among the responses with r it is distributed as under rho. The
    well-known KL of log n - (n - 1) / n holds where no two responses have the same reward, each
    with next to no probability; else it is an upper bound.
    """
    results = []
    for query, (log_rho, reward) in enumerate(zip(ref_logprobs, rewards, strict=True)):
        rho = log_rho.double().exp()
        values, which = reward.double().unique(return_inverse=True)
        probability = torch.zeros_like(values).index_add_(0, which, rho)
        upto, possible = probability.cumsum(0), probability > 0
        log_rest = torch.log1p(-probability / upto)  # F(below r) / F(r)
        if judged is not None:
            total = torch.zeros_like(values).index_add_(0, which, rho * judged[query].double())
            values = torch.where(possible, total / probability, 0)  # mean over equally good ones
        for n in ns:
            chosen = torch.where(possible, upto**n * -torch.expm1(n * log_rest), 0)
            kl = torch.xlogy(chosen, torch.where(possible, chosen / probability, 1)).sum()
            results.append(torch.stack([chosen @ values, kl]))
    return torch.stack(results).reshape(len(rewards), len(ns), 2).permute(2, 1, 0)


def as_distribution(samples: torch.Tensor) -> torch.Tensor:
    """Log-probabilities -log N of N samples each, shaped like `samples (queries, N)`."""
    return torch.full(samples.shape, -math.log(samples.shape[-1]), dtype=torch.float64)


def standard_error(values: torch.Tensor) -> torch.Tensor:
    """Of the mean of independent `values (queries, ...)` -> (...)."""
    return values.double().std(0) / math.sqrt(len(values))


def effective_samples(rewards: torch.Tensor, beta: float) -> torch.Tensor:
    """How many of the samples with `rewards (queries, N)` decide about pi*: 1 / sum(w^2), w their
    weights, (queries,).

    Where they are few, the estimated log Z, KL and reward are all too low, and lie near another
    point of the frontier.
    """
    return 1 / (rewards.double() / beta).softmax(-1).square().sum(-1)


def sampled_frontier(
    rewards: torch.Tensor, betas: torch.Tensor | Iterable[float]
) -> tuple[torch.Tensor, ...]:
    """The frontier estimated from `rewards (queries, N)` of samples from the reference, at each of
    `betas`.

    Returns KLs, rewards, standard errors of the reward at a KL that is given, and mean effective
    samples, each (len(betas),). The error is between queries, by the delta method: the highest
    reward at a KL is the minimum over beta of beta (KL + mean log Z), so that near the minimum it
    varies as beta log Z does.
    """
    alike, betas = as_distribution(rewards), list(map(float, betas))
    errors = [standard_error(beta * moments(alike, rewards, beta)[0]) for beta in betas]
    effective = [effective_samples(rewards, beta).mean() for beta in betas]
    return *frontier(alike, rewards, betas), torch.stack(errors), torch.stack(effective)


def sampled_best_of_n(
    rewards: torch.Tensor, n: int, judged: torch.Tensor | None = None
) -> torch.Tensor:
    """Unbiased estimate of the expected reward of the best of `n` -> (queries,).

    rewards (queries, N): of samples from the reference, N >= n; the best is the one with the
    highest. judged (queries, N): the rewards that it gets, `rewards` unless given.

    It is the mean over all choices of n of the N: the i-th smallest is the best of i - 1 over
    n - 1 of them. Equally good ones are chosen equally often.
    """
    total = rewards.shape[-1]
    i = torch.arange(n, total + 1, dtype=torch.float64)
    log_share = (
        torch.lgamma(i)
        - torch.lgamma(i - n + 1)
        - math.lgamma(n)
        - (math.lgamma(total + 1) - math.lgamma(n + 1) - math.lgamma(total - n + 1))
    )
    ordered = rewards.double().sort(-1)
    if judged is None:
        values = ordered.values
    else:
        values = _mean_among_equals(rewards, judged).gather(-1, ordered.indices)
    return values[:, n - 1 :] @ log_share.exp()


def _mean_among_equals(rewards: torch.Tensor, judged: torch.Tensor) -> torch.Tensor:
    """For each response, the mean of `judged` over those with its reward: both (queries, N)."""
    means = []
    for reward, values in zip(rewards, judged.double(), strict=True):
        _, which, counts = reward.unique(return_inverse=True, return_counts=True)
        total = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, which, values)
        means.append((total / counts)[which])
    return torch.stack(means)


def all_responses(n_vocab: int, length: int) -> torch.Tensor:
    """All n_vocab ** length responses, in the order of the numbers that they write: int64
    (responses, length)."""
    places = n_vocab ** torch.arange(length - 1, -1, -1)
    return torch.arange(n_vocab**length).unsqueeze(1) // places % n_vocab


@torch.no_grad()
def all_logprobs(policy: Policy, queries: torch.Tensor, length: int) -> torch.Tensor:
    """Log-probabilities of all responses of `length` tokens, see `all_responses`, at the policy's
    temperature.

    queries (queries, query_length) -> float64 (queries, n_vocab ** length), on the CPU. The network
    reads each beginning of a response once.
    """
    return torch.stack(
        [_logprobs(policy, context, length) for context in policy.embed_queries(queries)]
    )


def _logprobs(policy: Policy, context: torch.Tensor, length: int) -> torch.Tensor:
    """Of all responses after `context (n,)`: (n_vocab ** length,)."""
    logprobs = torch.zeros(1, dtype=torch.float64)
    for done in range(length):
        parts = []
        for stems in _extended(context, policy.model.hparams.n_vocab, done).split(CHUNK):
            tokens, mask = policy.model.mask_padding(stems.to(policy.device), policy.padding_token)
            h = policy.model.hidden(
                tokens, mask, output_positions=torch.tensor([-1], device=tokens.device)
            ).squeeze(1)
            logits = policy.model.logits(h).double() / max(policy.temperature, MIN_TEMPERATURE)
            parts.append(logits.log_softmax(-1).cpu())
        logprobs = (logprobs.unsqueeze(1) + torch.cat(parts)).flatten()
    return logprobs


def _extended(context: torch.Tensor, n_vocab: int, length: int) -> torch.Tensor:
    """`context (n,)` with all responses after it: (n_vocab ** length, n + length)."""
    responses = all_responses(n_vocab, length)
    return torch.cat([context.cpu().expand(len(responses), -1), responses], dim=1)


def all_rewards(
    reward_model: TrainedRewardModel, queries: torch.Tensor, length: int
) -> torch.Tensor:
    """What a reward model (see rewards.py) thinks of all responses, none truncated: float64
    (queries, responses)."""
    n_vocab = reward_model.model.hparams.n_vocab
    last = torch.arange(n_vocab).unsqueeze(1)
    return torch.stack(
        [
            torch.cat(
                [
                    reward_model.get_rewards(stems, last.expand(len(stems), -1, -1))
                    .double()
                    .flatten()
                    .cpu()
                    for stems in _extended(query, n_vocab, length - 1).split(
                        max(1, CHUNK // n_vocab)
                    )
                ]
            )
            for query in queries
        ]
    )


def all_scores(
    score_fn: Callable[[torch.Tensor, torch.Tensor], Scored],
    queries: torch.Tensor,
    n_vocab: int,
    length: int,
) -> torch.Tensor:
    """Scores (see rewards.make_score_fn) of all responses, one by one: float64 (queries, n_vocab **
    length)."""
    chunks = all_responses(n_vocab, length).split(CHUNK)
    return torch.stack(
        [
            torch.cat(
                [
                    score_fn(query.expand(len(chunk), -1), chunk)[0].double().cpu()
                    for chunk in chunks
                ]
            )
            for query in queries
        ]
    )
