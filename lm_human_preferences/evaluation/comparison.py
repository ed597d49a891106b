"""Policy, reference and best of n beside a frontier; tensors are (queries,), float64."""

import math
from typing import Any

import torch

from lm_human_preferences.evaluation import optimum
from lm_human_preferences.evaluation.report import (
    BEST_OF,
    BY_REWARD_MODEL,
    FEW_SAMPLES,
    OWN_BEST,
)

# Scores have the precision of fp32: a gain below this share of the largest one is rounding.
ROUNDING = 1e-6

Points = dict[str, dict[str, torch.Tensor]]  # {point: {name: values (queries,)}}


def compare(
    ref_logprobs: torch.Tensor,
    kl: torch.Tensor,
    scores: torch.Tensor,
    score: torch.Tensor,
    *,
    kl_coef: float | None,
    exact: bool,
    chooser: torch.Tensor | None = None,
) -> Points:
    """Return the points of a policy, best of n and the optimum beside the frontier.

    ref_logprobs, scores (queries, responses): by the reference, and of the same responses. kl,
    score: of the policy. kl_coef: of the optimum, None to leave it out. exact: whether the
    responses are all that there are, or samples of the reference. chooser (queries, responses):
    scores of the reward model, if `scores` are another reward's: then best of n is chosen by
    either, and the reward model's own optimum at the policy's KL is judged.
    """

    def sample_sizes(beta: float) -> dict[str, torch.Tensor]:
        if exact:
            return {}
        return {'effective_samples': optimum.effective_samples(scores, beta or 1e-9)}

    def point(kl: torch.Tensor, reward: torch.Tensor) -> dict[str, torch.Tensor]:
        values, beta = against_frontier(kl, reward, ref_logprobs, scores)
        return values | sample_sizes(beta)

    base = optimum.expected(ref_logprobs, scores)
    points = {'base': {'kl': torch.zeros_like(base), 'reward': base}, 'policy': point(kl, score)}
    for name, best, best_kl in bests_of_n(ref_logprobs, scores, exact=exact):
        points[name] = point(best_kl, best)
    if chooser is not None:
        for name, best, best_kl in bests_of_n(ref_logprobs, chooser, exact=exact, judged=scores):
            points[f'{name}{BY_REWARD_MODEL}'] = point(best_kl, best)
        _, beta = optimum.frontier_at(kl.mean(), ref_logprobs, chooser)
        points[OWN_BEST] = point(*optimum.judged(ref_logprobs, chooser, scores, beta))
    if kl_coef:
        log_z, best, _ = optimum.moments(ref_logprobs, scores, kl_coef)
        points['optimum'] = {
            'kl': best / kl_coef - log_z,
            'reward': best,
            **sample_sizes(kl_coef),
        }
        points['policy']['kl_to_optimum'] = kl - score / kl_coef + log_z
    return points


def bests_of_n(
    ref_logprobs: torch.Tensor,
    scores: torch.Tensor,
    *,
    exact: bool,
    judged: torch.Tensor | None = None,
) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Return (name, reward, KL) of each best of n; the arguments are those of optimum.best_of_n."""
    names = [f'best_of_{n}' for n in BEST_OF]
    if exact:
        return list(zip(names, *optimum.best_of_n(ref_logprobs, scores, *BEST_OF, judged=judged)))
    bests = []
    for name, n in zip(names, BEST_OF):
        reward = optimum.sampled_best_of_n(scores, n, judged)
        kl = torch.full((len(scores),), math.log(n) - (n - 1) / n, dtype=torch.float64)
        bests.append((name, reward, kl))
    return bests


def against_frontier(
    kl: torch.Tensor, reward: torch.Tensor, ref_logprobs: torch.Tensor, scores: torch.Tensor
) -> tuple[dict[str, torch.Tensor], float]:
    """Return {'kl', 'reward', 'frontier', 'share' of the gain}, and the beta with the policy's KL.

    The share is NaN where there is no gain: at a KL of 0, or if all responses to a query score the
    same. Other quantities than means are linearised, so that their spread over queries gives their
    error: the frontier's reward is the minimum over beta of beta (KL + log Z).
    """
    base = optimum.expected(ref_logprobs, scores)
    _, beta = optimum.frontier_at(kl.mean(), ref_logprobs, scores)
    if beta == 0:
        frontier = scores.max(1).values
    elif math.isinf(beta):
        frontier = base
    else:
        frontier = beta * (kl + optimum.moments(ref_logprobs, scores, beta)[0])
    gain = reward - base
    possible = frontier - base
    share = gain.mean() / possible.mean()
    if possible.mean() <= ROUNDING * scores.abs().max():
        share = torch.full_like(share, math.nan)
    values = {
        'kl': kl,
        'reward': reward,
        'frontier': frontier,
        'share': share + (gain - share * possible) / possible.mean(),
    }
    return values, beta


def own_optimum(
    ref_logprobs: torch.Tensor, rewards: torch.Tensor, judge: torch.Tensor, *, exact: bool
) -> dict[str, Any] | None:
    """Return KLs and rewards by `judge` of the best policies for `rewards`, for JSON.

    ref_logprobs, rewards, judge: (queries, responses). Where these are samples, also standard
    errors and effective samples. 'trusted_up_to' is the KL with the highest reward by `judge`; None
    where it does not clearly fall beyond. No curve, but None, if all responses to a query are
    equally good.
    """
    betas = optimum.beta_grid(rewards).tolist()
    if betas[0] == 0:
        return None
    names = ['kl', 'reward'] if exact else ['kl', 'reward', 'standard_errors', 'effective_samples']
    curve: dict[str, Any] = {name: [] for name in names}
    of_queries = []  # where there are samples enough
    for beta in betas:
        kl, reward = optimum.judged(ref_logprobs, rewards, judge, beta)
        curve['kl'].append(kl.mean().item())
        curve['reward'].append(reward.mean().item())
        if not exact:
            effective = optimum.effective_samples(rewards, beta).mean().item()
            curve['standard_errors'].append(optimum.standard_error(reward).item())
            curve['effective_samples'].append(effective)
            if effective < FEW_SAMPLES:
                continue
        of_queries.append(reward)
    trusted = None
    best = _turns_after(of_queries, judge, exact=exact)
    if best is not None:
        high, low = betas[max(best - 1, 0)], betas[best + 1]
        trusted = optimum.trusted_kl(ref_logprobs, rewards, judge, low, high)
    curve['trusted_up_to'] = trusted
    return curve


def _turns_after(rewards: list[torch.Tensor], judge: torch.Tensor, *, exact: bool) -> int | None:
    """Return the index of the highest mean, if the last one is clearly lower."""
    if not rewards:
        return None
    means = [reward.mean().item() for reward in rewards]
    best = means.index(max(means))
    fall = rewards[best] - rewards[-1]
    least = ROUNDING * judge.abs().max().item()
    if not exact:
        least = max(least, 2 * optimum.standard_error(fall).item())
    return best if fall.mean() > least else None


def summarize(points: Points, *, with_errors: bool) -> dict[str, dict[str, Any]]:
    """Return {point: {name: mean}} for JSON, with standard errors if queries are a sample."""
    summary: dict[str, dict[str, Any]] = {}
    for point, values in points.items():
        summary[point] = {name: _number(of.mean()) for name, of in values.items()}
        if with_errors:
            summary[point]['standard_errors'] = {
                name: _number(optimum.standard_error(of)) for name, of in values.items()
            }
    return summary


def _number(scalar: torch.Tensor) -> float | None:
    """Return a number for JSON: None if it is not finite, as the share of a gain that is none."""
    return scalar.item() if math.isfinite(scalar) else None
