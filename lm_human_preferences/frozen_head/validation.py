"""Cross-validation of a head over queries: its prior's strength, and whether it knows anything."""

from typing import NamedTuple

import torch

from lm_human_preferences.frozen_head.posterior import Problem, fit

FOLDS = 10
# Of the prior, strongest first: each fit begins where the one before has ended.
STRENGTHS = (30.0, 10.0, 3.0, 1.0, 0.3, 0.1, 0.03)
SEED = 0


class Validated(NamedTuple):
    """Scores (labels, n) of labels by heads that have not seen them, at the best strength."""

    strength: float
    scores: torch.Tensor
    gains: torch.Tensor  # (labels,), in nats over guessing


def folds_of(subjects: torch.Tensor, folds: int = FOLDS) -> torch.Tensor:
    """Return the fold (labels,) of labels about `subjects (labels,)`, numbered from 0."""
    count = int(subjects.max()) + 1
    order = torch.randperm(count, generator=torch.Generator().manual_seed(SEED))
    return order[subjects] % min(folds, count)


def cross_validated(problem: Problem, subjects: torch.Tensor) -> Validated:
    """Choose the strength whose heads find labels about others of `subjects` least surprising."""
    fold = folds_of(subjects)
    features = problem.features
    scores = features.new_zeros(len(STRENGTHS), *features.shape[:2])
    for number in range(int(fold.max()) + 1):
        is_left_out = fold == number
        others, found = problem.rows(~is_left_out), None
        for row, strength in enumerate(STRENGTHS):
            found = fit(others, strength, found)
            weight, bias = found
            scores[row, is_left_out] = features[is_left_out] @ weight + bias
    surprises = torch.stack([problem.surprise(each) for each in scores])
    best = int(surprises.argmin())
    # Without features there is only the bias: this is guessing.
    blind = problem._replace(features=torch.zeros_like(features[..., :1]))
    guess = fit(blind, STRENGTHS[0])[1].expand(features.shape[:2])
    gains = _surprises(problem, guess) - _surprises(problem, scores[best])
    return Validated(STRENGTHS[best], scores[best], gains)


def _surprises(problem: Problem, scores: torch.Tensor) -> torch.Tensor:
    """Return the surprise (labels,) of each label under `scores (labels, n)`."""
    rows = torch.arange(len(scores)).split(1)
    return torch.stack([problem.rows(row).surprise(scores[row]) for row in rows])
