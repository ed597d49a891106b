"""Fitting a head to the features of labels, and how well it would predict other labels."""

import dataclasses
import math
from typing import NamedTuple

import torch

from lm_human_preferences.frozen_head.head import Head, unfitted
from lm_human_preferences.frozen_head.posterior import Labels, Problem, posterior, scale_of
from lm_human_preferences.frozen_head.validation import cross_validated
from lm_human_preferences.label_types import LabelType
from lm_human_preferences.labels.held_out import Prediction, prediction_of
from lm_human_preferences.utils import student

MOST_WANTED = 10_000  # labels, beyond which no number is named


class Fitted(NamedTuple):
    """A head, and what its cross-validation has found.

    prediction: of labels without ties by heads that have not learned from their queries; None
    without any. gain: mean number of nats by which these find a label less surprising than guessing
    does. margin: of its 95 % interval, over queries; None where all labels are about one.
    """

    head: Head
    strength: float
    prediction: Prediction | None
    gain: float
    margin: float | None
    loss: float = math.nan  # of the same heads, see label_types

    @property
    def knows(self) -> bool:
        """Return whether it predicts labels better than guessing, with 95 % confidence."""
        return self.margin is not None and self.gain > self.margin

    def __str__(self) -> str:
        width = '' if self.margin is None else f' ± {self.margin:.2f}'
        found = f'{self.gain:.2f}{width} nats better than guessing'
        return found if self.prediction is None else f'{self.prediction}; {found}'

    def warning(self) -> str | None:
        """Return a line for the user where labels may have taught nothing; None otherwise."""
        if self.knows:
            return None
        more = 'what they prefer may not be in the hidden states at all'
        if self.margin is None:
            more = 'labels about other queries would tell'
        elif self.gain > 0 and self.prediction is not None:
            # The margin falls with the square root of the number of labels.
            wanted = self.prediction.labels * (self.margin / self.gain) ** 2
            if wanted < MOST_WANTED:
                more = f'about {math.ceil(wanted / 10) * 10} labels would probably show more'
        return (
            'WARNING: the reward model may have learned nothing: its prediction of labels that it'
            f' has not seen is not surely better than guessing; {more}'
        )


def fit_head(
    features: torch.Tensor,
    labels: Labels,
    label_type: LabelType,
    others: torch.Tensor,
    subjects: torch.Tensor,
) -> Fitted:
    """Fit a head to `features (labels, n, features)`.

    others: (responses, features) of other responses; all set the scale of each feature. subjects:
    (labels,), see held_out.subjects_of.
    """
    every = torch.cat([features.flatten(0, 1), others])
    head = unfitted(every)
    z = head.standardized(features.double())
    problem = Problem(z, labels, label_type, scale_of(labels, label_type))
    found = cross_validated(problem, subjects)
    weight, bias, known = posterior(problem, found.strength)
    doubt = torch.tensor(found.strength**-0.5)
    head = dataclasses.replace(head, weight=weight, bias=bias, known=known, doubt=doubt)
    head = dataclasses.replace(head, usual=head(every.double())[1].mean())
    gains = _by_subject(found.gains, subjects)
    margin = None
    if len(gains) > 1:
        margin = student.quantile(len(gains) - 1) * (gains.std() / len(gains) ** 0.5).item()
    choices = label_type.without_ties({**labels, 'scores': found.scores})
    scores = choices.pop('scores')
    prediction = prediction_of(scores, choices, label_type) if len(scores) else None
    loss = label_type.loss_of(found.scores, labels)['loss'].item()
    return Fitted(head, found.strength, prediction, found.gains.mean().item(), margin, loss)


def _by_subject(gains: torch.Tensor, subjects: torch.Tensor) -> torch.Tensor:
    """Return values, one of each subject, whose mean is that of `gains (labels,)`."""
    sums = torch.zeros(int(subjects.max()) + 1, dtype=gains.dtype).index_add(0, subjects, gains)
    return sums * len(sums) / len(gains)
