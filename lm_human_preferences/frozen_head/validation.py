"""Cross-validation of a head over queries: its prior's strength, and its gain over guessing."""

from typing import NamedTuple

import torch

from lm_human_preferences.frozen_head.posterior import Problem, fit

FOLDS = 10
# Precisions of the prior, strongest first: each fit begins where the one before has ended.
STRENGTHS = (30.0, 10.0, 3.0, 1.0, 0.3, 0.1, 0.03)
SEED = 0


class Validated(NamedTuple):
    """Scores (labels, n) of labels by heads that were not fitted to them, at the best strength.

    guesses: (labels, n), the best constant for the labels that each head was fitted to. gains:
    (labels,), in nats, of scores over guesses.
    """

    strength: float
    scores: torch.Tensor
    guesses: torch.Tensor
    gains: torch.Tensor


def folds_of(subjects: torch.Tensor, folds: int = FOLDS) -> torch.Tensor:
    """Return the fold (labels,) of labels about `subjects (labels,)`, numbered from 0."""
    count = int(subjects.max()) + 1
    order = torch.randperm(count, generator=torch.Generator().manual_seed(SEED))
    return order[subjects] % min(folds, count)


def cross_validated(problem: Problem, subjects: torch.Tensor) -> Validated:
    """Choose the strength whose heads predict labels about left-out `subjects` best."""
    fold = folds_of(subjects)
    features = problem.features
    scores = features.new_zeros(len(STRENGTHS), *features.shape[:2])
    guesses = features.new_zeros(features.shape[:2])
    for number in range(int(fold.max()) + 1):
        is_left_out = fold == number
        others, found = problem.rows(~is_left_out), None
        guesses[is_left_out] = others.guess()
        for row, strength in enumerate(STRENGTHS):
            found = fit(others, strength, found)
            weight, bias = found
            scores[row, is_left_out] = features[is_left_out] @ weight + bias
    surprises = torch.stack([problem.surprise(each) for each in scores])
    best = int(surprises.argmin())
    gains = _gains(problem, scores[best], guesses)
    return Validated(STRENGTHS[best], scores[best], guesses, gains)


def _gains(problem: Problem, scores: torch.Tensor, guesses: torch.Tensor) -> torch.Tensor:
    """Return by how many nats scores predict each label (labels,) better than guesses do.

    Numbers have normal noise, with the variance of the errors of either.
    """
    guessed, found = problem.surprises(guesses), problem.surprises(scores)
    if not problem.label_type.is_numeric:
        return guessed - found
    of_guesses, left = 2 * guessed.mean(), 2 * found.mean()
    if of_guesses == 0 or left == 0:
        return torch.zeros_like(found)
    return guessed / of_guesses - found / left + (of_guesses / left).log() / 2
