"""Frequency with which the 95 % intervals of `./launch.py labels` hold the true share.

    pipenv run python benchmarks/interval_coverage.py [--trials 10000] [--seed 0]

A win rate or an accuracy is a share of answers, several of which may be to one question. Answers
are simulated whose share and whose correlation inside a question are known: a labeller gives the
question's common answer with probability sqrt(correlation), and one of their own otherwise. Both
are right, or for the second policy, with probability `share`: one half, as of two equal policies,
or in each trial another one from .55 to .9, as of reward models. (With one answer to each question
the interval is Wilson's, whose coverage for 20 answers jumps between 92 and 98 % from share to
share; this is the average.) The table shows in how many percent of the trials the interval holds
`share`; the last column, in how few if each answer counted as independent.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lm_human_preferences.labels.report.agreement import clustered_interval, wilson_interval

QUESTIONS = (20, 50, 200)
LABELLERS = ('1', '3', '5', '1 or 5')
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--trials', type=int, default=10_000, help='in each cell of the table')
    parser.add_argument('--seed', type=int, default=0)
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    error = 100 * math.sqrt(0.95 * 0.05 / args.trials)
    print(f'{args.trials} trials: a coverage of 95 has a standard error of {error:.2f}\n')
    cells = [f'{share}, {correlation:.1f}' for share in SHARES for correlation in CORRELATIONS]
    print(f'| questions | labellers | {" | ".join(cells)} | as if independent |')
    print('| --- ' * (len(cells) + 3) + '|')
    for questions in QUESTIONS:
        for labellers in LABELLERS:
            counts = answers_of(questions, labellers)
            found = [
                coverage(counts, rng.uniform(*ends, args.trials), correlation, rng)
                for ends in SHARES.values()
                for correlation in CORRELATIONS
            ]
            held = ' | '.join(f'{100 * clustered:.1f}' for clustered, _ in found)
            least = min(independent for _, independent in found)
            print(f'| {questions} | {labellers} | {held} | {100 * least:.1f} |', flush=True)


if __name__ == '__main__':
    main()
