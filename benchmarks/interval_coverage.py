"""Frequency with which the printed 95 % intervals hold the truth, and bias of shares.

    pipenv run python benchmarks/interval_coverage.py [SECTION ...] [--trials 2000] [--quick]

Each section simulates data whose truth is known, computes with the program's own functions, and
prints a table. To add one, write a function like `labels` and name it in SECTIONS. A cell is the
percentage of intervals that hold the truth, or "-" where none is shown.

labels: a win rate or an accuracy is a share of answers, several of which may be about one query.
Answers are simulated whose share and whose correlation inside a query are known: a labeller
gives the query's common answer with probability sqrt(correlation), and one of their own
otherwise. Both are right, or for the second policy, with probability `share`: one half, as of two
equal policies, or in each trial another one from .55 to .9, as of reward models. (With one answer
to each query the interval is Wilson's, whose coverage for 20 answers jumps between 92 and 98 %
from share to share; this is the average.) "ties": of five answers to each query some prefer none
and are left out. The last column shows how few if each answer counted as independent.

agreement: of all pairs of answers to a question, how many are equal.

labellers: each of some labellers has a share of their own, around the share of all. An interval is
for these labellers; the last column shows how often it holds the share of all.

head: cross-validation of a head on hidden states, on labels at random: the mean accuracy (or
correlation), and in how many percent of the trials the warning is missing that it may have learned
nothing.

deviations: the standard deviation that a head gives for its scores over the exact one, of weights
that are drawn from the prior of the strength.

The sections of `evaluate` are in evaluation_coverage.py.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from evaluation_coverage import best, evaluation, percent, print_heads, print_row

from lm_human_preferences import label_types
from lm_human_preferences.evaluation import report
from lm_human_preferences.labels.agreement import (
    clustered_interval,
    wilson_interval,
)
from lm_human_preferences.reward_sources.frozen_head.fitting import fit_head
from lm_human_preferences.reward_sources.frozen_head.posterior import (
    Problem,
    posterior,
    standardized,
)

NONE = (0.0, 1.0)  # interval that is not shown
QUESTIONS = (3, 10, 30, 200)
LABELLERS = ('1', '3', '10', '1 or 5', 'ties')
MANY, ASKED_OF_MANY = 5, 5  # '1 or 5': every fifth question is asked of five
SHARES = {'.5': (0.5, 0.5), '.55 to .9': (0.55, 0.9)}  # the least and the greatest
CORRELATIONS = (0.1, 0.5, 0.9)


def answers_of(questions: int, labellers: str, rng: np.random.Generator) -> np.ndarray:
    """Return the number of answers to each question (questions,)."""
    if labellers.isdigit():
        return np.full(questions, int(labellers))
    if labellers == 'ties':
        return rng.binomial(5, 0.7, questions)
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
) -> tuple[list[bool], list[bool]]:
    """(whether intervals hold their share, whether they would if answers were independent)."""
    clustered, independent = [], []
    for share, right in zip(shares, simulated(counts, shares, correlation, rng), strict=True):
        low, high = clustered_interval(right.tolist(), counts.tolist())
        if (low, high) != NONE:
            clustered.append(low <= share <= high)
        low, high = wilson_interval(float(right.sum()), float(counts.sum()))
        independent.append(low <= share <= high)
    return clustered, independent


def labels(trials: int, rng: np.random.Generator) -> None:
    error = 100 * math.sqrt(0.95 * 0.05 / trials)
    print(f'{trials} trials: a coverage of 95 has a standard error of {error:.2f}\n')
    cells = [f'{share}, {correlation:.1f}' for share in SHARES for correlation in CORRELATIONS]
    print_heads('queries', 'answers', *cells, 'as if independent')
    for questions, labellers in itertools.product(QUESTIONS, LABELLERS):
        counts = answers_of(questions, labellers, rng)
        found = [
            coverage(counts, rng.uniform(*ends, trials), correlation, rng)
            for ends in SHARES.values()
            for correlation in CORRELATIONS
        ]
        least = min(np.mean(independent) for _, independent in found)
        held = [percent(clustered) for clustered, _ in found]
        print_row(questions, labellers, *held, f'{100 * least:.1f}')


def agreement(trials: int, rng: np.random.Generator) -> None:
    print(f'{trials} trials\n')
    cells = [f'{share:.1f}, {rho:.1f}' for share in (0.5, 0.8) for rho in CORRELATIONS]
    print_heads('questions', 'labellers', *cells)
    for questions, labellers in itertools.product(QUESTIONS, (2, 3, 5)):
        row = []
        for share, rho in itertools.product((0.5, 0.8), CORRELATIONS):
            truth = rho + (1 - rho) * (share**2 + (1 - share) ** 2)
            counts = np.full(questions, labellers)
            held = []
            for right in simulated(counts, np.full(trials, share), rho, rng):
                wrong = counts - right
                equal = (right * (right - 1) + wrong * (wrong - 1)) // 2
                pairs = counts * (counts - 1) // 2
                ends = clustered_interval(equal.tolist(), pairs.tolist())
                if ends != NONE:
                    held.append(ends[0] <= truth <= ends[1])
            row.append(percent(held))
        print_row(questions, labellers, *row)


def labellers(trials: int, rng: np.random.Generator) -> None:
    print(f'{trials} trials, 50 answers of each labeller\n')
    print_heads('labellers', 'correlation', 'for these labellers', 'for all')
    for count, rho in itertools.product((3, 10, 30), (0.05, 0.2)):
        of_these, of_all = [], []
        for _ in range(trials):
            spread = 1 / rho - 1
            shares = rng.beta(0.6 * spread, 0.4 * spread, count)
            wins = rng.binomial(50, shares).sum()
            right = (np.arange(50 * count) < wins).astype(int)
            low, high = clustered_interval(right.tolist(), [1] * len(right))
            of_these.append(low <= shares.mean() <= high)
            of_all.append(low <= 0.6 <= high)
        print_row(count, rho, percent(of_these), percent(of_all))


def head(trials: int, rng: np.random.Generator) -> None:
    trials = min(trials, 100)
    print(f'{trials} trials\n')
    print_heads('labels', 'number', 'mean accuracy or correlation', 'no warning')
    for name, count in itertools.product(('best_of_2', 'scalar_rating'), (4, 12, 40)):
        label_type = label_types.get(name)
        n = len(label_type.samples)
        numbers = torch.arange(count)
        means, silent = [], []
        for _ in range(trials):
            torch.manual_seed(int(rng.integers(2**31)))
            x = torch.randn(count, n, 24)
            labels = label_type.simulate(torch.randn(count, n))
            labels |= {field: numbers[:, None] for field in ('query', *label_type.samples)}
            fitted = fit_head(x, labels, label_type, torch.randn(50, 24), numbers)
            assert fitted.prediction is not None
            silent.append(fitted.warning() is None)
            found = fitted.prediction.accuracy
            means.append(fitted.prediction.agreement if found is None else found)
        print_row(name, count, f'{np.mean(means):.3f}', percent(silent))


def deviations(trials: int, rng: np.random.Generator) -> None:
    trials = min(trials, 100)
    print(f'{trials} trials, 24 features\n')
    print_heads('noise', 'labels', 'printed over exact deviation', 'least', 'most')
    for noise, count in itertools.product((0.3, 1.0, 3.0), (40, 300)):
        ratios = []
        for _ in range(trials):
            x = torch.from_numpy(rng.normal(size=(count, 1, 24)))
            score = x[:, 0] @ torch.from_numpy(rng.normal(size=24))
            score += noise * torch.from_numpy(rng.normal(size=count))
            label_type = label_types.get('scalar_rating')
            labels, unit, _ = standardized({'score': score}, label_type)
            found = posterior(Problem(x, labels, label_type), noise**2)
            left = 1 - found['known'].square().sum(0)
            precision = x[:, 0].T @ x[:, 0] / noise**2 + torch.eye(24)
            exact = torch.linalg.inv(precision).diagonal()
            ratios.append((unit * found['doubt'] * (left / exact).sqrt().mean()).item())
        print_row(noise, count, *(f'{of(ratios):.2f}' for of in (np.mean, np.min, np.max)))


SECTIONS = {
    'labels': labels,
    'agreement': agreement,
    'labellers': labellers,
    'head': head,
    'deviations': deviations,
    'evaluation': evaluation,
    'best': best,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('sections', nargs='*', choices=[*SECTIONS, []], help='default: all')
    parser.add_argument('--trials', type=int, default=2000, help='at most, in each cell')
    parser.add_argument('--quick', action='store_true', help='2 trials, to see that it runs')
    parser.add_argument('--seed', type=int, default=0)
    args = parser.parse_args()
    for name in args.sections or SECTIONS:
        print(f'\n## {name}\n')
        bests = report.BEST_OF if name == 'best' else ()  # which take most of the time
        with mock.patch.object(report, 'BEST_OF', bests):
            SECTIONS[name](2 if args.quick else args.trials, np.random.default_rng(args.seed))


if __name__ == '__main__':
    main()
