"""Fitting of a head to labels, with cross-validation of its accuracy on unseen labels."""

import dataclasses
import math
from typing import NamedTuple

import torch

from lm_human_preferences.label_types import LabelType
from lm_human_preferences.labels.held_out import Prediction, prediction_of
from lm_human_preferences.reward_sources.frozen_head.head import Head, unfitted
from lm_human_preferences.reward_sources.frozen_head.posterior import (
    Labels,
    Problem,
    fit,
    posterior,
    standardized,
)
from lm_human_preferences.utils import student

FOLDS = 10
# Precisions of the prior, the strongest first: each fit starts from the previous result.
STRENGTHS = (30.0, 10.0, 3.0, 1.0, 0.3, 0.1, 0.03)
SEED = 0


class Fitted(NamedTuple):
    """Fitted head, and the results of its cross-validation.

    Cross-validation predicts each label by a head that was fitted to labels about other queries.
    prediction: accuracy of these heads on labels without ties. gain: their advantage over guessing,
    in nats per label. Both are None if all labels are connected, see held_out.subjects_of.
    least_gain: gain that mere guessing exceeds with a probability of 2.5 %; None for few queries.
    loss: mean loss of these heads, or of guessing if all labels are connected.
    """

    head: Head
    strength: float
    prediction: Prediction | None
    gain: float | None
    least_gain: float | None
    loss: float

    def __str__(self) -> str:
        if self.gain is None:
            return (
                'nothing is known, as all labels are connected: each shares a query or a response'
                ' with another'
            )
        found = f'{self.gain:.2f} nats better than guessing'
        return found if self.prediction is None else f'{self.prediction}; {found}'

    def warning(self) -> str | None:
        """Return a warning if labels may have taught the head nothing, or else None."""
        more = 'what they prefer may not be in the hidden states at all'
        if self.gain is None or self.least_gain is None:
            more = f'labels about at least {student.FEWEST} queries are needed to know it'
        elif self.gain > self.least_gain:
            return None
        return (
            'WARNING: the reward model may have learned nothing: its prediction of labels that it'
            f' has not seen is not significantly better than guessing; {more}'
        )


def fit_head(
    features: torch.Tensor,
    labels: Labels,
    label_type: LabelType,
    others: torch.Tensor,
    subjects: torch.Tensor,
) -> Fitted:
    """Fit a head to `labels` and the `features (labels, n, features)` of their responses.

    others (responses, features): features of responses without labels, which also set the scale of
    each feature. subjects (labels,): see held_out.subjects_of.
    """
    every = torch.cat([features.flatten(0, 1), others])
    head = unfitted(every)
    standard, unit, origin = standardized(labels, label_type)
    problem = Problem(head.standardized(features.double()), standard, label_type)
    scores = problem.features.new_full(features.shape[:2], problem.guess())
    gain = least = prediction = None
    strength = STRENGTHS[0]
    if subjects.max() > 0:  # cross-validation needs two groups of related labels
        strength, scores, guesses = cross_validated(problem, subjects)
        gains = _gains(problem, scores, guesses)
        gain, least = gains.mean().item(), least_gain(_by_subject(gains, subjects))
        prediction = _prediction(problem, scores, guesses)
    loss = label_type.loss_of(unit * scores + origin, labels)['loss'].item()
    head = dataclasses.replace(head, **posterior(problem, strength)).rescaled(unit, origin)
    head = dataclasses.replace(head, usual=head(every.double())[1].mean())
    return Fitted(head, strength, prediction, gain, least, loss)


def folds_of(subjects: torch.Tensor, folds: int = FOLDS) -> torch.Tensor:
    """Return the fold number of each label: (labels,). All labels of a subject share a fold."""
    count = int(subjects.max()) + 1
    order = torch.randperm(count, generator=torch.Generator().manual_seed(SEED))
    return order[subjects] % min(folds, count)


def cross_validated(
    problem: Problem, subjects: torch.Tensor
) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Choose the prior's strength by cross-validation that leaves out whole groups of labels.

    Return the strength, scores (labels, n) by heads that were not fitted to those labels, and
    guesses of the same shape: the best constant score for the labels that each head was fitted to.
    """
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
    return STRENGTHS[best], scores[best], guesses


def _gains(problem: Problem, scores: torch.Tensor, guesses: torch.Tensor) -> torch.Tensor:
    """Return the nats by which `scores` predict each label better than `guesses`: (labels,).

    Numeric labels have normal noise, with a variance fitted separately to scores and guesses.
    """
    guessed, found = problem.surprises(guesses), problem.surprises(scores)
    if not problem.label_type.is_numeric:
        return guessed - found
    of_guesses, left = 2 * guessed.mean(), 2 * found.mean()
    if of_guesses == 0 or left == 0:
        return torch.zeros_like(found)
    return guessed / of_guesses - found / left + (of_guesses / left).log() / 2


def _prediction(problem: Problem, scores: torch.Tensor, guesses: torch.Tensor) -> Prediction | None:
    """Return the accuracy of cross-validated scores on labels without ties; None if all are ties.

    The guess for each fold is subtracted. It is made from the other folds, so it is low where the
    left-out labels are high: without subtraction, scores and labels would correlate negatively.
    """
    label_type, labels = problem.label_type, dict(problem.labels)
    if label_type.is_numeric:
        labels[label_type.field] = labels[label_type.field] - guesses[:, 0]
    labels['scores'] = scores - guesses
    labels = label_type.without_ties(labels)
    scores = labels.pop('scores')
    if len(scores) == 0:
        return None
    prediction = prediction_of(scores, labels, label_type)
    return dataclasses.replace(prediction, is_cross_validated=True)


def least_gain(gains: torch.Tensor) -> float | None:
    """Return the mean gain over guessing, in nats, that a useless head exceeds in 2.5 % of cases.

    gains: (subjects,); None if they are few. Folds learn from each other's labels, so their gains
    are not independent. Nadeau and Bengio, Inference for the generalization error (2003), correct
    the variance for this by the ratio of left-out labels to learned labels.
    """
    count = len(gains)
    if count < student.FEWEST:
        return None
    error = gains.std().item() * math.sqrt((1 + FOLDS / (FOLDS - 1)) / count)
    return student.quantile(count - 1) * error


def _by_subject(gains: torch.Tensor, subjects: torch.Tensor) -> torch.Tensor:
    """Return the sums of `gains` over related labels, scaled to have the same mean as `gains`."""
    sums = torch.zeros(int(subjects.max()) + 1, dtype=gains.dtype).index_add(0, subjects, gains)
    return sums * len(sums) / len(gains)
