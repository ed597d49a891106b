"""Comparison of the best possible rewards with those of a policy, its reference and best-of-n."""

import itertools
import math
from typing import Any

import torch

from lm_human_preferences.evaluation import optimum, report
from lm_human_preferences.evaluation.optimum import ROUNDING

FEW_SAMPLES = 10  # fewest effective samples from which the best possible reward is estimated
FEWEST_FOR_SHARE = 30  # minimum number of queries for an estimate of `share`, see `compare`
MOST_REPEATS = 0.5  # largest fraction of samples that one response may make up in an estimate

Points = dict[str, dict[str, torch.Tensor]]  # {compared policy: {statistic: values (queries,)}}


def compare(
    ref_logprobs: torch.Tensor,
    logprobs: torch.Tensor,
    scores: torch.Tensor,
    kl_coef: float | None,
    chooser: torch.Tensor | None = None,
) -> Points:
    """Return rewards and KLs of reference, policy, best-of-n sampling and the best possible policy.

    ref_logprobs, logprobs, scores (queries, responses): log-probabilities by the reference and the
    policy, and rewards. kl_coef: coefficient that defines the optimum; None to leave it out.
    chooser (queries, responses): scores of the reward model, if `scores` are from another reward;
    best of n is then chosen by each of the two.
    """
    reward, kl = optimum.expected(logprobs, scores), optimum.kl(logprobs, ref_logprobs)
    base = optimum.expected(ref_logprobs, scores)
    points = {'base': {'kl': torch.zeros_like(base), 'reward': base}}
    points['policy'] = against_frontier(kl, reward, ref_logprobs, scores)
    choosers = {'': scores}
    if chooser is not None:
        choosers[report.BY_REWARD_MODEL] = chooser
    for suffix, by in choosers.items():
        for n in report.BEST_OF:
            best, best_kl = optimum.best_of_n(ref_logprobs, by, n, scores)
            point = against_frontier(best_kl, best, ref_logprobs, scores)
            points[f'{report.BEST_OF_N}{n}{suffix}'] = point
    if kl_coef:
        log_z, best, _ = optimum.moments(ref_logprobs, scores, kl_coef)
        points['optimum'] = {'kl': best / kl_coef - log_z, 'reward': best}
        points['policy']['kl_to_optimum'] = kl - reward / kl_coef + log_z
    return points


def against_frontier(
    kl: torch.Tensor, reward: torch.Tensor, ref_logprobs: torch.Tensor, scores: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return a policy's KLs and rewards by query, and the best possible rewards at its KL.

    names: kl, reward, frontier (best reward at that KL), share (fraction of the possible gain; NaN
    if no gain is possible: at a KL of 0, or if a query's responses all score the same). The best
    reward is the minimum over beta of beta (KL + log Z): linear in each query's KL and log Z, so
    its spread over queries gives its error, and that of the share, by the delta method.
    """
    base = optimum.expected(ref_logprobs, scores)
    _, beta = optimum.frontier_at(kl.mean(), ref_logprobs, scores)
    if beta == 0:
        frontier = scores.double().max(1).values
    elif math.isinf(beta):
        frontier = base
    else:
        frontier = beta * (kl + optimum.moments(ref_logprobs, scores, beta)[0])
    gain, possible = reward - base, frontier - base
    share = torch.full_like(base, math.nan)
    if possible.mean() > ROUNDING * scores.abs().max():
        mean = gain.mean() / possible.mean()
        share = mean + (gain - mean * possible) / possible.mean()
    return {'kl': kl, 'reward': reward, 'frontier': frontier, 'share': share}


def compare_samples(
    ref_logprobs: torch.Tensor,
    logprobs: torch.Tensor,
    scores: torch.Tensor,
    kl_coef: float | None,
    chooser: torch.Tensor | None = None,
    repeats: float = 0.0,
) -> Points:
    """Estimate the result of `compare` from samples of both models; NaN if samples are too few.

    ref_logprobs, logprobs (queries, samples): see optimum.mixture. repeats: see measure.repeats_of;
    if most samples are the same response, they say too little about rare, better responses. The
    bias from few samples is about inverse to their number, so it is estimated from two halves.
    """

    def of(samples: slice) -> Points:
        """Return the result of `compare` for a subset of the samples."""
        reference, policy = (each[:, samples].log_softmax(-1) for each in (ref_logprobs, logprobs))
        own = None if chooser is None else chooser[:, samples]
        return compare(reference, policy, scores[:, samples], kl_coef, own)

    points, first, second = of(slice(None)), of(slice(0, None, 2)), of(slice(1, None, 2))
    for point, values in points.items():
        for name, value in values.items():
            values[name] = 2 * value - (first[point][name] + second[point][name]) / 2
        values['kl'] -= values['kl'].mean().clamp(max=0)
        if point == 'base':
            continue
        size = 1.0
        if repeats <= MOST_REPEATS or point.startswith(report.BEST_OF_N):
            beta = kl_coef if point == 'optimum' else None
            if beta is None:
                beta = optimum.frontier_at(values['kl'].mean(), ref_logprobs, scores)[1]
            size = optimum.effective_samples(ref_logprobs, scores, beta or 1e-9)
        if size < FEW_SAMPLES:
            unknown = ('kl', 'reward') if point == 'optimum' else ('frontier', 'share')
            values |= dict.fromkeys(unknown, torch.full_like(values['kl'], math.nan))
        if 'share' in values:
            values['share'] -= (values['share'].mean() - 1).clamp(min=0)
            if len(scores) < FEWEST_FOR_SHARE:
                values['share'] = torch.full_like(values['kl'], math.nan)
        values['effective_samples'] = torch.full_like(values['kl'], size)
    if kl_coef and points['optimum']['kl'].isnan().any():
        points['policy']['kl_to_optimum'].fill_(math.nan)
    return points


def known_frontier(
    ref_logprobs: torch.Tensor, scores: torch.Tensor, *, exact: bool
) -> dict[str, list[float]]:
    """Return the best possible reward at increasing KLs, as far as samples can estimate it."""
    betas = optimum.beta_grid(scores)
    if not exact:
        sizes = [optimum.effective_samples(ref_logprobs, scores, beta) for beta in betas[1:]]
        known = itertools.takewhile(lambda size: size >= FEW_SAMPLES, sizes)
        betas = betas[: 1 + len(list(known))]
    kls, rewards = optimum.frontier(ref_logprobs, scores, betas).tolist()
    return {'kl': kls, 'reward': rewards}


def summarize(points: Points, *, with_errors: bool) -> dict[str, dict[str, Any]]:
    """Return the means over queries of all numbers in `points`, for JSON.

    with_errors: add 'standard_errors', but not of best of n's KL, which depends on n alone if there
    are no ties.
    """
    summary: dict[str, dict[str, Any]] = {}
    for point, values in points.items():
        summary[point] = {name: _number(of.mean()) for name, of in values.items()}
        if with_errors:
            errors = {name: _number(optimum.standard_error(of)) for name, of in values.items()}
            if point.startswith(report.BEST_OF_N):
                del errors['kl']
            summary[point]['standard_errors'] = errors
    return summary


def _number(scalar: torch.Tensor) -> float | None:
    """Return a scalar tensor as a float for JSON, or None if the number is not finite."""
    return scalar.item() if math.isfinite(scalar) else None
