"""Frequency with which the printed 95 % intervals hold the truth, and bias of shares.

    pipenv run python benchmarks/interval_coverage.py [SECTION ...] [--trials 10000] [--seed 0]

Each section simulates data whose truth is known, computes with the program's own functions, and
prints a table. To add one, write a function like `labels` and name it in SECTIONS.

labels: a win rate or an accuracy is a share of answers, several of which may be about one query.
Answers are simulated whose share and whose correlation inside a query are known: a labeller
gives the query's common answer with probability sqrt(correlation), and one of their own
otherwise. Both are right, or for the second policy, with probability `share`: one half, as of two
equal policies, or in each trial another one from .55 to .9, as of reward models. (With one answer
to each query the interval is Wilson's, whose coverage for 20 answers jumps between 92 and 98 %
from share to share; this is the average.) The table shows in how many percent of the trials the
interval holds `share`; the last column, in how few if each answer counted as independent.

evaluation: the table of `evaluate` from samples. Each response has a reward and another number that
the policy raises in vain, so that its true share of the gain is .9. Rewards are normal,
exponential, or 1 with probability .001 and else 0; or normal and spread over queries: with another
deviation for each, from .5 to 1.5, or one that is 0 for half of them. "Even": the policy has the
same KL on each query all the same, which is not the best use of it, so its share is less.
"Shown": percent of the trials with a share. Bias: of those, in points. Last come the coverages.

trust: percent of the trials that trust a reward by a judge that knows nothing of it, that see a
fall of one that never falls, and that find one that falls beyond a KL of .5.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lm_human_preferences.evaluation import comparison, optimum, report
from lm_human_preferences.labels.report.agreement import clustered_interval, wilson_interval

QUESTIONS = (20, 50, 200)
LABELLERS = ('1', '3', '5', '1 or 5')
FEW = ((3, '1'), (3, '10'), (10, '1'), (10, '10'), (30, '10'))  # queries, and answers to each
MANY, ASKED_OF_MANY = 5, 5  # '1 or 5': every fifth question is asked of five
SHARES = {'.5': (0.5, 0.5), '.55 to .9': (0.55, 0.9)}  # the least and the greatest
CORRELATIONS = (0.1, 0.5, 0.9)


def answers_of(questions: int, labellers: str) -> np.ndarray:
    """Return the number of answers to each question (questions,)."""
    if labellers.isdigit():
        return np.full(questions, int(labellers))
    counts = np.ones(questions, np.int64)
    counts[::ASKED_OF_MANY] = MANY
    return counts


def simulated(
    counts: np.ndarray, shares: np.ndarray, correlation: float, rng: np.random.Generator
) -> np.ndarray:
    """Return the number of right answers to each question (trials, questions); shares (trials,)."""
    shape = (len(shares), len(counts), counts.max())
    share = shares[:, None, None]
    common = rng.random((*shape[:2], 1)) < share
    own = rng.random(shape) < share
    is_common = rng.random(shape) < math.sqrt(correlation)
    is_given = np.arange(counts.max()) < counts[:, None]
    return (np.where(is_common, common, own) & is_given).sum(2)


def coverage(
    counts: np.ndarray, shares: np.ndarray, correlation: float, rng: np.random.Generator
) -> tuple[float, float]:
    """(how many of the intervals hold their share, how many if answers were independent)."""
    clustered = independent = 0
    for share, right in zip(shares, simulated(counts, shares, correlation, rng), strict=True):
        low, high = clustered_interval(right.tolist(), counts.tolist())
        clustered += low <= share <= high
        low, high = wilson_interval(float(right.sum()), float(counts.sum()))
        independent += low <= share <= high
    return clustered / len(shares), independent / len(shares)


def labels(trials: int, rng: np.random.Generator) -> None:
    error = 100 * math.sqrt(0.95 * 0.05 / trials)
    print(f'{trials} trials: a coverage of 95 has a standard error of {error:.2f}\n')
    cells = [f'{share}, {correlation:.1f}' for share in SHARES for correlation in CORRELATIONS]
    print(f'| queries | answers | {" | ".join(cells)} | as if independent |')
    print('| --- ' * (len(cells) + 3) + '|')
    for questions, labellers in (*itertools.product(QUESTIONS, LABELLERS), *FEW):
        counts = answers_of(questions, labellers)
        found = [
            coverage(counts, rng.uniform(*ends, trials), correlation, rng)
            for ends in SHARES.values()
            for correlation in CORRELATIONS
        ]
        held = ' | '.join(f'{100 * clustered:.1f}' for clustered, _ in found)
        least = min(independent for _, independent in found)
        print(f'| {questions} | {labellers} | {held} | {100 * least:.1f} |', flush=True)


KL, SHARE, RARE = 3.0, 0.9, 0.001  # of the policy, and of a reward of 1
QUERIES = (3, 10, 30, 200)
KINDS = ('normal', 'exponential', '0/1', 'spread', 'half 0', 'spread, even', 'half 0, even')


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


def evaluation(trials: int, rng: np.random.Generator) -> None:
    trials, samples = min(trials, 400), 512
    print(f'{trials} trials (of 200 queries a quarter), {samples} samples of each model\n')
    print('| rewards | queries | share shown | bias | share | KL | reward | best at that KL |')
    print('| --- ' * 8 + '|')
    for kind in KINDS:
        draw = skewed if kind in ('exponential', '0/1') else normal
        for queries in QUERIES:
            held: dict[str, list[bool]] = {
                name: [] for name in ('share', 'kl', 'reward', 'frontier')
            }
            errors = []
            count = max(1, trials // 4) if queries == QUERIES[-1] else trials
            for _ in range(count):
                rewards, log_ratios, truth = draw(kind, queries, samples, rng)
                scores = torch.from_numpy(rewards)
                reference, policy = optimum.of_mixture(torch.from_numpy(log_ratios))
                points = comparison.compare_samples(reference, policy, scores, kl_coef=None)
                found = comparison.summarize(points, with_errors=True)['policy']
                for name, value in truth.items():
                    width = report.margin(found, name, queries)
                    if found[name] is not None and width is not None:
                        held[name].append(abs(found[name] - value) <= width)
                if found['share'] is not None:
                    errors.append(found['share'] - truth['share'])
            cells = [f'{100 * np.mean(of):.1f}' if of else '-' for of in held.values()]
            bias = f'{100 * np.mean(errors):+.2f}' if errors else '-'
            shown = f'{100 * len(errors) / count:.0f}'
            print(f'| {kind} | {queries} | {shown} | {bias} | {" | ".join(cells)} |', flush=True)


def trust(trials: int, rng: np.random.Generator) -> None:
    trials, samples = min(trials, 200), 512
    print(f'{trials} trials, {samples} samples of the reference\n')
    print('| queries | knows nothing: trusted | never falls: fall seen | falls: seen |')
    print('| --- ' * 4 + '|')
    for queries in (3, 10, 30):
        counts = np.zeros(3)
        for _ in range(trials):
            rewards, noise = torch.from_numpy(rng.standard_normal((2, queries, samples)))
            uniform, _ = optimum.of_mixture(torch.zeros_like(rewards))
            bent = rewards - 4 * (rewards - 1).clamp(min=0)
            for kind, judge in enumerate((noise, rewards + noise, 2 * bent + noise)):
                curve = comparison.own_optimum(uniform, rewards, judge, exact=False)
                assert curve is not None
                fall = curve['trusted_up_to'] is not None
                counts[kind] += curve['rises'] if kind == 0 else fall
        cells = ' | '.join(f'{100 * count / trials:.1f}' for count in counts)
        print(f'| {queries} | {cells} |', flush=True)


SECTIONS = {'labels': labels, 'evaluation': evaluation, 'trust': trust}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('sections', nargs='*', choices=[*SECTIONS, []], help='default: all')
    parser.add_argument('--trials', type=int, default=10_000, help='at most, in each cell')
    parser.add_argument('--seed', type=int, default=0)
    args = parser.parse_args()
    for name in args.sections or SECTIONS:
        print(f'\n## {name}\n')
        with mock.patch.object(comparison, 'BEST_OF', ()):  # which take most of the time
            SECTIONS[name](args.trials, np.random.default_rng(args.seed))


if __name__ == '__main__':
    main()
