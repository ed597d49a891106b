"""Fit of a head to labels, and an estimate of how well it predicts labels that it has not seen."""

import dataclasses
import math
from typing import NamedTuple

import torch

from lm_human_preferences.frozen_head.head import Head, unfitted
from lm_human_preferences.frozen_head.posterior import Labels, Problem, posterior, standardized
from lm_human_preferences.frozen_head.validation import FOLDS, STRENGTHS, Validated, cross_validated
from lm_human_preferences.label_types import LabelType
from lm_human_preferences.labels.held_out import Prediction, prediction_of
from lm_human_preferences.utils import student

MOST_WANTED = 10_000  # a warning does not suggest more labels than this


class Fitted(NamedTuple):
    """Head, and the results of its cross-validation.

    In it, each label is predicted by a head that was fitted to labels about other queries only.
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

    @property
    def knows(self) -> bool:
        """Return whether the head predicts labels significantly better than guessing."""
        return self.gain is not None and self.least_gain is not None and self.gain > self.least_gain

    def __str__(self) -> str:
        if self.gain is None:
            return (
                'nothing is known, as all labels are connected: each shares a query or a response'
                ' with another'
            )
        found = f'{self.gain:.2f} nats better than guessing'
        return found if self.prediction is None else f'{self.prediction}; {found}'

    def warning(self) -> str | None:
        """Return a warning where labels may have taught the head nothing; None otherwise."""
        if self.knows:
            return None
        more = 'what they prefer may not be in the hidden states at all'
        if self.gain is None or self.least_gain is None:
            more = f'labels about at least {student.FEWEST} queries are needed to know it'
        elif self.gain > 0 and self.prediction is not None:
            # The least gain falls with the square root of the number of labels.
            wanted = self.prediction.labels * (self.least_gain / self.gain) ** 2
            if wanted < MOST_WANTED:
                more = f'about {math.ceil(wanted / 10) * 10} labels would probably show more'
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
    """Fit a head to `features (labels, n, features)`.

    others (responses, features): features of responses without labels, which also set the scale of
    each feature. subjects (labels,): see held_out.subjects_of.
    """
    every = torch.cat([features.flatten(0, 1), others])
    head = unfitted(every)
    standard, unit, origin = standardized(labels, label_type)
    problem = Problem(head.standardized(features.double()), standard, label_type)
    is_one = subjects.max() == 0  # a single subject, which cannot be left out
    found = None if is_one else cross_validated(problem, subjects)
    strength = STRENGTHS[0] if found is None else found.strength
    weight, bias, known, doubt = posterior(problem, strength)
    head = dataclasses.replace(head, weight=weight, bias=bias, known=known, doubt=doubt)
    head = head.rescaled(unit, origin)
    head = dataclasses.replace(head, usual=head(every.double())[1].mean())
    if found is None:
        return Fitted(head, strength, None, None, None, label_type.guessing_loss(labels))
    return Fitted(
        head,
        strength,
        _prediction(problem, found),
        found.gains.mean().item(),
        least_gain(_by_subject(found.gains, subjects)),
        label_type.loss_of(unit * found.scores + origin, labels)['loss'].item(),
    )


def _prediction(problem: Problem, found: Validated) -> Prediction | None:
    """Return the accuracy on labels without ties, after subtracting each fold's guess from scores.

    A fold's guess is made from the other folds, so it is low where the left-out labels are high;
    without subtracting it, scores and labels would correlate negatively.
    """
    label_type, labels = problem.label_type, dict(problem.labels)
    if label_type.is_numeric:
        labels[label_type.field] = labels[label_type.field] - found.guesses[:, 0]
    labels['scores'] = found.scores - found.guesses
    labels = label_type.without_ties(labels)
    scores = labels.pop('scores')
    if len(scores) == 0:
        return None
    prediction = prediction_of(scores, labels, label_type)
    return dataclasses.replace(prediction, is_cross_validated=True)


def least_gain(gains: torch.Tensor) -> float | None:
    """Return the mean gain that mere guessing would exceed with a probability of 2.5 %.

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
    """Return a gain per subject (subjects,), scaled so that their mean is that of `gains`."""
    sums = torch.zeros(int(subjects.max()) + 1, dtype=gains.dtype).index_add(0, subjects, gains)
    return sums * len(sums) / len(gains)
