"""Sections of interval_coverage.py that measure the intervals of `evaluate`.

evaluation: the table of `evaluate` from samples. Each response has a reward and another number that
the policy raises in vain, so that its true share of the gain is .9. Rewards are normal,
exponential, or 1 with probability .001 and else 0; or normal and spread over queries: with another
deviation for each, from .5 to 1.5, or one that is 0 for half of them. "Even": the policy has the
same KL on each query all the same, which is not the best use of it, so its share is less.
"Shown": percent of the trials with a share. Bias: of those, in points. Last come the coverages;
"KL to the optimum" and "optimum": for normal rewards and a coefficient of 1 / 2.

best: best of 4 and 16, from samples of both models.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lm_human_preferences.evaluation import comparison, optimum, report

KL, SHARE, RARE = 3.0, 0.9, 0.001  # of the policy, and of a reward of 1
KL_COEF = 0.5
QUERIES = (3, 10, 16, 30, 200)
SAMPLES = (64, 512)
KINDS = ('normal', 'exponential', '0/1', 'spread', 'half 0', 'spread, even', 'half 0, even')


def print_row(*cells: object) -> None:
    print('| ' + ' | '.join(map(str, cells)) + ' |', flush=True)


def print_heads(*heads: str) -> None:
    print_row(*heads)
    print('| --- ' * len(heads) + '|')


def percent(held: list[bool]) -> str:
    """Format how many of the intervals that were shown hold the truth."""
    return f'{100 * np.mean(held):.1f}' if held else '-'


class Drawn(NamedTuple):
    """Samples of both models (queries, 2 * samples), and the truth."""

    rewards: np.ndarray
    log_ratios: np.ndarray
    truth: dict[str, float]


def root(function: Callable[[float], float], low: float, high: float) -> float:
    """Return where an increasing function is 0."""
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < 0 else (low, middle)
    return low


def normal(kind: str, queries: int, samples: int, rng: np.random.Generator) -> Drawn:
    """Draw normal rewards, with a deviation for each query."""
    scales = np.ones((queries, 1))
    mean, square = 1.0, 1.0
    if kind.startswith('spread'):
        scales, square = rng.uniform(0.5, 1.5, (queries, 1)), 13 / 12
    elif kind.startswith('half'):
        scales, mean, square = rng.integers(0, 2, (queries, 1)) * 1.0, 0.5, 0.5
    is_even = kind.endswith('even')
    shift = math.sqrt(2 * KL) * (np.ones_like(scales) if is_even else scales / math.sqrt(square))
    own, other = rng.standard_normal((2, queries, 2 * samples))
    aside = math.sqrt(1 - SHARE**2)
    own[:, samples:] += SHARE * shift
    other[:, samples:] += aside * shift
    best = math.sqrt(2 * KL * square)
    gain = SHARE * (math.sqrt(2 * KL) * mean if is_even else best)
    truth = {'kl': KL, 'reward': gain, 'frontier': best, 'share': gain / best}
    return Drawn(scales * own, shift * (SHARE * own + aside * other) - shift**2 / 2, truth)


def skewed(kind: str, queries: int, samples: int, rng: np.random.Generator) -> Drawn:
    """Draw exponential rewards, or of 0 and 1; the policy has an own parameter of the same kind."""
    shape = queries, 2 * samples
    is_policy = np.arange(2 * samples) >= samples
    base = RARE if kind == '0/1' else 1.0

    def kl(mean: float) -> float:
        if kind != '0/1':
            return mean - 1 - math.log(mean)
        return mean * math.log(mean / RARE) + (1 - mean) * math.log((1 - mean) / (1 - RARE))

    best = root(lambda mean: kl(mean) - KL, base, 1 - 1e-12 if kind == '0/1' else 1e3)
    mean = base + SHARE * (best - base)
    if kind == '0/1':
        rewards = (rng.random(shape) < np.where(is_policy, mean, RARE)) * 1.0
        ratios = np.where(rewards, math.log(mean / RARE), math.log((1 - mean) / (1 - RARE)))
    else:
        rewards = rng.exponential(np.where(is_policy, mean, 1.0), shape)
        ratios = rewards * (1 - 1 / mean) - math.log(mean)
    shift = math.sqrt(2 * (KL - kl(mean)))
    other = rng.standard_normal(shape) + is_policy * shift
    truth = {'kl': KL, 'reward': mean, 'frontier': best, 'share': SHARE}
    return Drawn(rewards, ratios + shift * other - shift**2 / 2, truth)


def cells_of(
    draws: list[tuple[comparison.Points, dict[str, dict[str, float]]]], queries: int
) -> dict[str, tuple[list[bool], list[float]]]:
    """Return {number: (whether its intervals hold the truth, errors of what is shown)}."""
    found: dict[str, tuple[list[bool], list[float]]] = {}
    for points, truth in draws:
        summary = comparison.summarize(points, with_errors=True)
        for point, numbers in truth.items():
            for name, value in numbers.items():
                held, errors = found.setdefault(f'{point} {name}', ([], []))
                shown, width = summary[point][name], report.margin(summary[point], name, queries)
                if shown is None:
                    continue
                errors.append(shown - value)
                if width is not None:
                    held.append(abs(shown - value) <= width + 1e-9)
    return found


def evaluation(trials: int, rng: np.random.Generator) -> None:
    print(f'{min(trials, 400)} trials, of 200 queries half\n')
    names = ('share', 'kl', 'reward', 'frontier')
    print_heads(
        *('rewards', 'samples', 'queries', 'shown', 'bias', 'share', 'KL', 'reward', 'frontier'),
        *('KL to the optimum', 'optimum KL', 'optimum reward'),
    )
    for kind, samples, queries in itertools.product(KINDS, SAMPLES, QUERIES):
        draw = skewed if kind in ('exponential', '0/1') else normal
        draws = []
        for _ in range(max(1, min(trials, 400) // (2 if queries == QUERIES[-1] else 1))):
            rewards, log_ratios, truth = draw(kind, queries, samples, rng)
            coefficient = KL_COEF if kind == 'normal' else None
            of_point = {'policy': truth}
            if coefficient is not None:
                distance = truth['kl'] - truth['reward'] / KL_COEF + 1 / (2 * KL_COEF**2)
                of_point['policy'] = {**truth, 'kl_to_optimum': distance}
                of_point['optimum'] = {'kl': 1 / (2 * KL_COEF**2), 'reward': 1 / KL_COEF}
            reference, policy = optimum.mixture(torch.from_numpy(log_ratios))
            scores = torch.from_numpy(rewards)
            points = comparison.compare_samples(reference, policy, scores, kl_coef=coefficient)
            draws.append((points, of_point))
        found = cells_of(draws, queries)
        _, errors = found['policy share']
        bias = f'{100 * np.mean(errors):+.2f}' if errors else '-'
        more = ('policy kl_to_optimum', 'optimum kl', 'optimum reward')
        columns = [*(f'policy {name}' for name in names), *more]
        held = [percent(found[name][0]) if name in found else '' for name in columns]
        print_row(kind, samples, queries, f'{100 * len(errors) / len(draws):.0f}', bias, *held)


def truth_of_best(kind: str, n: int) -> dict[str, float]:
    """Return reward, KL and share of the best of n."""
    kl, steps = math.log(n) - (n - 1) / n, np.linspace(-9, 9, 100_001)
    if kind == '0/1':
        reward = 1 - (1 - RARE) ** n
        kl = reward * math.log(reward / RARE) + (1 - reward) * math.log((1 - reward) / (1 - RARE))
        return {'reward': reward, 'kl': kl, 'share': 1.0}
    if kind == 'exponential':
        reward = sum(1 / k for k in range(1, n + 1))
        best = root(lambda mean: mean - 1 - math.log(mean) - kl, 1, 1e3)
        return {'reward': reward, 'kl': kl, 'share': (reward - 1) / (best - 1)}
    density = np.exp(-(steps**2) / 2) / np.exp(-(steps**2) / 2).sum()
    reward = float(steps @ np.diff(density.cumsum() ** n, prepend=0))
    return {'reward': reward, 'kl': kl, 'share': reward / math.sqrt(2 * kl)}


def best(trials: int, rng: np.random.Generator) -> None:
    trials, kinds = min(trials, 200), ('normal', 'exponential', '0/1')
    print(f'{trials} trials, of 200 queries half\n')
    heads = [f'{name} of {n}' for n in report.BEST_OF for name in ('reward', 'KL', 'share', 'bias')]
    print_heads('rewards', 'samples', 'queries', *heads)
    for kind, samples, queries in itertools.product(kinds, SAMPLES, QUERIES):
        truth = {f'best_of_{n}': truth_of_best(kind, n) for n in report.BEST_OF}
        draws = []
        for _ in range(max(1, trials // (2 if queries == QUERIES[-1] else 1))):
            drawn = (normal if kind == 'normal' else skewed)(kind, queries, samples, rng)
            reference, policy = optimum.mixture(torch.from_numpy(drawn.log_ratios))
            scores = torch.from_numpy(drawn.rewards)
            points = comparison.compare_samples(reference, policy, scores, kl_coef=None)
            draws.append((points, truth))
        row = []
        for number, (held, errors) in cells_of(draws, queries).items():
            row.append(percent(held))
            if number.endswith('share'):
                row.append(f'{100 * np.mean(errors):+.2f}' if errors else '-')
        print_row(kind, samples, queries, *row)
