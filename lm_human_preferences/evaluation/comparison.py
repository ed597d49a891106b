"""Comparison of policy, reference and best of n with the frontier: float64 values (queries,)."""

import math
from typing import Any

import torch

from lm_human_preferences.evaluation import optimum, report
from lm_human_preferences.evaluation.optimum import ROUNDING
from lm_human_preferences.utils import student

WIDEST_SHARE = 0.5  # a share whose 95 % interval has a larger half-width is not reported
MOST_REPEATS = 0.5  # with more repeats (measure.repeats_of), the best possible reward is unknown

Points = dict[str, dict[str, torch.Tensor]]  # {point: {name: values (queries,)}}


def compare(
    ref_logprobs: torch.Tensor,
    logprobs: torch.Tensor,
    scores: torch.Tensor,
    *,
    kl_coef: float | None,
    chooser: torch.Tensor | None = None,
    exact: bool = True,
) -> Points:
    """Return {point: {name: values}} of the reference, the policy, best of n and the optimum.

    ref_logprobs, logprobs, scores (queries, responses): log-probabilities by the reference and the
    policy, and rewards. kl_coef: coefficient that defines the optimum; None to leave it out.
    chooser (queries, responses): scores of the reward model, if `scores` are from another reward;
    best of n is then chosen by each of the two. exact: True if these are all possible responses,
    False for samples, whose bias compare_samples corrects.
    """

    def point(kl: torch.Tensor, reward: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return {name: values} of a point, with the best possible reward at its KL."""
        values, beta = against_frontier(kl, reward, ref_logprobs, scores)
        if not exact:
            return values | sample_sizes(ref_logprobs, beta, scores)
        possible = values['frontier'] - base
        share = (reward - base).mean() / possible.mean()
        if not values['share'].isnan().all():
            of_queries = _with_spread(values['share'], possible, share)
            values['share'] = of_queries.nan_to_num(share.item())
        return values

    base, score = optimum.expected(ref_logprobs, scores), optimum.expected(logprobs, scores)
    kl = optimum.kl(logprobs, ref_logprobs)
    points = {'base': {'kl': torch.zeros_like(base), 'reward': base}, 'policy': point(kl, score)}
    for name, best, best_kl in bests_of_n(ref_logprobs, scores, exact=exact):
        points[name] = point(best_kl, best)
    if chooser is not None:
        for name, best, best_kl in bests_of_n(ref_logprobs, chooser, exact=exact, judged=scores):
            points[f'{name}{report.BY_REWARD_MODEL}'] = point(best_kl, best)
    if kl_coef:
        log_z, best, _ = optimum.moments(ref_logprobs, scores, kl_coef)
        points['optimum'] = {'kl': best / kl_coef - log_z, 'reward': best}
        if not exact:
            points['optimum'] |= sample_sizes(ref_logprobs, kl_coef, scores)
        points['policy']['kl_to_optimum'] = kl - score / kl_coef + log_z
    return points


def compare_samples(
    ref_logprobs: torch.Tensor,
    logprobs: torch.Tensor,
    scores: torch.Tensor,
    *,
    kl_coef: float | None,
    chooser: torch.Tensor | None = None,
    repeats: float = 0.0,
) -> Points:
    """Estimate the points of `compare` from samples of both models; NaN if samples are too few.

    ref_logprobs, logprobs (queries, samples): see optimum.mixture. repeats: see measure.repeats_of;
    if most samples are the same response, they say too little about rare, better responses. The
    bias from few samples is about inverse to their number, so it is estimated from two halves.
    """

    def of(samples: slice) -> Points:
        """Return the points as estimated from a subset of the samples."""
        reference, policy = (each[:, samples].log_softmax(-1) for each in (ref_logprobs, logprobs))
        own = None if chooser is None else chooser[:, samples]
        score = scores[:, samples]
        return compare(reference, policy, score, kl_coef=kl_coef, chooser=own, exact=False)

    points, first, second = of(slice(None)), of(slice(0, None, 2)), of(slice(1, None, 2))
    rounding = ROUNDING * scores.abs().max().item()
    for name, values in points.items():
        if name in ('policy', 'optimum') and repeats > MOST_REPEATS:
            values['effective_samples'].fill_(1)
        halves = {key: (first[name][key] + second[name][key]) / 2 for key in values}
        points[name] = _told(values, halves, points['base']['reward'], rounding)
    if kl_coef:
        is_unknown = points['optimum']['kl'].isnan()
        points['policy']['kl_to_optimum'].masked_fill_(is_unknown, math.nan)
    return points


def _told(
    values: dict[str, torch.Tensor],
    halves: dict[str, torch.Tensor],
    base: torch.Tensor,
    rounding: float,
) -> dict[str, torch.Tensor]:
    """Return {name: values} of a point, corrected for the bias of few samples; NaN if unknown.

    values: from all samples. halves: mean of the values from either half of the samples. base:
    reward of the reference. rounding: rewards that differ by less count as equal.
    """
    told = {name: 2 * of - halves[name] for name, of in values.items()}
    told['kl'] -= told['kl'].mean().clamp(max=0)
    if 'effective_samples' not in values:
        return told
    told['effective_samples'] = values['effective_samples']
    names = ('frontier', 'share') if 'frontier' in values else ('kl', 'reward')
    is_above = 'frontier' in values and (values['reward'] - values['frontier']).mean() > rounding
    if is_above or values['effective_samples'].min() < report.FEW_SAMPLES:
        return told | dict.fromkeys(names, torch.full_like(base, math.nan))
    if 'share' in told:
        mean = told['share'].mean().clamp(max=1)
        share = _with_spread(told['share'], told['frontier'] - base, mean)
        told['share'] = share if _is_narrow(share) else torch.full_like(share, math.nan)
    return told


def _is_narrow(share: torch.Tensor) -> bool:
    """Return whether `share (queries,)` has enough queries and a narrow enough interval."""
    if len(share) < report.FEWEST_FOR_SHARE:
        return False
    width = student.quantile(len(share) - 1) * optimum.standard_error(share)
    return bool(width <= WIDEST_SHARE)


def sample_sizes(
    ref_logprobs: torch.Tensor, beta: float, scores: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return {'effective_samples': (queries,)} of pi* at `beta`, the same number for each query."""
    size = optimum.effective_samples(ref_logprobs, scores, beta or 1e-9)
    return {'effective_samples': torch.full((len(scores),), size, dtype=torch.float64)}


def bests_of_n(
    ref_logprobs: torch.Tensor,
    scores: torch.Tensor,
    *,
    exact: bool,
    judged: torch.Tensor | None = None,
) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Return (name, reward, KL) for each n of report.BEST_OF; arguments: see optimum.best_of_n."""
    names = map('best_of_{}'.format, report.BEST_OF)
    if exact:
        found = optimum.best_of_n(ref_logprobs, scores, *report.BEST_OF, judged=judged)
        return list(zip(names, *found, strict=True))
    bests = []
    for name, n in zip(names, report.BEST_OF, strict=True):
        bests.append((name, *optimum.sampled_best_of_n(ref_logprobs, scores, n, judged)))
    return bests


def against_frontier(
    kl: torch.Tensor, reward: torch.Tensor, ref_logprobs: torch.Tensor, scores: torch.Tensor
) -> tuple[dict[str, torch.Tensor], float]:
    """Return ({name: values (queries,)}, beta at which the optimal policy has the same mean KL).

    names: kl, reward, frontier (best reward at that KL), share (fraction of the possible gain; NaN
    if no gain is possible: at a KL of 0, or if a query's responses all score the same). The best
    reward is the minimum over beta of beta (KL + log Z): linear in each query's KL and log Z, so
    its spread over queries gives its error. For the values of share, see _share_of_queries.
    """
    base = optimum.expected(ref_logprobs, scores)
    _, beta = optimum.frontier_at(kl.mean(), ref_logprobs, scores)
    log_z, mean, variance = optimum.moments(ref_logprobs, scores, beta or math.inf)
    if beta == 0:
        frontier = scores.double().max(1).values
    elif math.isinf(beta):
        frontier = base
    else:
        frontier = beta * (kl + log_z)
    possible = frontier - base
    if possible.mean() <= ROUNDING * scores.abs().max():
        share = torch.full_like(base, math.nan)
    else:
        without = possible  # for each query, the mean possible gain of all other queries
        if len(kl) > 1:
            without = _of_others(frontier)
            if 0 < beta < math.inf:
                without = _frontier_of_others(kl, log_z, mean, variance, 1 / beta)
            without = without - _of_others(base)
        share = _share_of_queries(reward - base, possible, without)
    return {'kl': kl, 'reward': reward, 'frontier': frontier, 'share': share}, beta


def _of_others(values: torch.Tensor) -> torch.Tensor:
    """Return, for each query, the mean of `values (queries,)` over all other queries."""
    return (values.sum() - values) / (len(values) - 1)


def _frontier_of_others(
    kl: torch.Tensor,
    log_z: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
    inverse: float,
) -> torch.Tensor:
    """Return, for each query, the frontier of all other queries: (queries,).

    inverse: 1 / beta for all queries. Without one query, beta is slightly different: one Newton
    step finds it, and log Z there is expanded to second order in 1 / beta, in which its derivatives
    are mean and variance of the reward.
    """
    kl, log_z, mean, variance = map(_of_others, (kl, log_z, mean, variance))
    step = (kl - mean * inverse + log_z) / (inverse * variance)
    step = step.nan_to_num(0, 0, 0).clamp(min=-inverse / 2, max=inverse)
    return (kl + log_z + mean * step + variance * step**2 / 2) / (inverse + step)


def _share_of_queries(
    gain: torch.Tensor, possible: torch.Tensor, possible_of_others: torch.Tensor
) -> torch.Tensor:
    """Return the jackknife's pseudo-values (queries,) of sum(gain) / sum(possible).

    Their mean has little of the bias that few queries cause, and their spread gives its standard
    error (Efron 1982, "The Jackknife, the Bootstrap and Other Resampling Plans").
    """
    count = len(gain)
    share = gain.mean() / possible.mean()
    if count < 2:
        return share.expand(count)
    return count * share + (1 - count) * _of_others(gain) / possible_of_others


def _with_spread(
    pseudo_values: torch.Tensor, possible: torch.Tensor, share: torch.Tensor
) -> torch.Tensor:
    """Return values (queries,) whose mean is `share` and whose spread gives its 95 % interval.

    Queries with little to gain say little about the share, so the effective number of queries is
    only sum(possible)^2 / sum(possible^2). Student's t has one degree of freedom less, or fewer if
    tails are long. Callers compute intervals with t for all queries, so the spread is scaled to
    compensate. NaN if one query has nearly all of the possible gain.
    """
    count = len(pseudo_values)
    if count < 2:
        return share.expand(count)
    deviations = pseudo_values - pseudo_values.mean()
    positive = possible.clamp(min=0)
    alike = (positive.sum() ** 2 / positive.square().sum()).nan_to_num().item()
    dof = min(round(alike) - 1, student.dof_of(deviations.tolist()))
    factor = math.nan if dof < 1 else student.quantile(dof) / student.quantile(count - 1)
    return share + factor * deviations


def summarize(points: Points, *, with_errors: bool) -> dict[str, dict[str, Any]]:
    """Return {point: {name: mean over queries}} for JSON. with_errors: add 'standard_errors'."""
    summary: dict[str, dict[str, Any]] = {}
    for point, values in points.items():
        summary[point] = {name: _number(of.mean()) for name, of in values.items()}
        if with_errors:
            summary[point]['standard_errors'] = {name: _error(of) for name, of in values.items()}
    return summary


def _error(values: torch.Tensor) -> float | None:
    """Return the standard error of the mean of `values (queries,)` for JSON.

    None if it is only rounding: best of n, sampled without ties, has the same KL for each query.
    """
    error = optimum.standard_error(values)
    return None if error <= ROUNDING * values.abs().max() else _number(error)


def _number(scalar: torch.Tensor) -> float | None:
    """Return a float for JSON; None if it is not finite, such as a share where no gain exists."""
    return scalar.item() if math.isfinite(scalar) else None
