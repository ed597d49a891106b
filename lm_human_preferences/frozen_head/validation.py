"""Cross-validation over queries: chooses a head's prior, and measures its gain over guessing."""

from typing import NamedTuple

import torch

from lm_human_preferences.frozen_head.posterior import Problem, fit

FOLDS = 10
# Precisions of the prior, strongest first: each fit starts from the result of the previous fit.
STRENGTHS = (30.0, 10.0, 3.0, 1.0, 0.3, 0.1, 0.03)
SEED = 0


class Validated(NamedTuple):
    """Best strength of the prior, and scores (labels, n) by heads not fitted to those labels.

    guesses (labels, n): best constant score for the labels that each head was fitted to. gains
    (labels,): advantage of the scores over the guesses, in nats.
    """

    strength: float
    scores: torch.Tensor
    guesses: torch.Tensor
    gains: torch.Tensor


def folds_of(subjects: torch.Tensor, folds: int = FOLDS) -> torch.Tensor:
    """Return each label's fold number, from 0: (labels,). A subject's labels share a fold."""
    count = int(subjects.max()) + 1
    order = torch.randperm(count, generator=torch.Generator().manual_seed(SEED))
    return order[subjects] % min(folds, count)


def cross_validated(problem: Problem, subjects: torch.Tensor) -> Validated:
    """Choose the prior strength whose heads best predict labels about left-out `subjects`."""
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
    """Return by how many nats `scores` predict each label better than `guesses`: (labels,).

    Numeric labels have normal noise, with a variance fitted separately to scores and guesses.
    """
    guessed, found = problem.surprises(guesses), problem.surprises(scores)
    if not problem.label_type.is_numeric:
        return guessed - found
    of_guesses, left = 2 * guessed.mean(), 2 * found.mean()
    if of_guesses == 0 or left == 0:
        return torch.zeros_like(found)
    return guessed / of_guesses - found / left + (of_guesses / left).log() / 2
