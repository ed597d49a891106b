"""Held-out labels, and their prediction by a reward model.

A question is held out or not by the digest of its tokens: all answers to it are on one side, on
every rank and in every run, and stay there when labels are added.
"""

import dataclasses
import hashlib
from collections.abc import Callable

import torch

from lm_human_preferences import label_types
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.reward_options import HParams
from lm_human_preferences.label_types import LabelType
from lm_human_preferences.labels.report.agreement import (
    correlation_interval,
    effective_answers,
    wilson_interval,
)

Labels = dict[str, torch.Tensor]
# Rewards (batch, n) of n responses (batch, n, response_length) to queries (batch, query_length).
Rewards = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def is_held_out(labels: Labels, label_type: LabelType, share: float) -> torch.Tensor:
    """Return which questions are held out, bool (labels,); labels: {field: (labels, ...)}."""
    mask = []
    for row in question_tokens(labels, label_type).numpy().astype('<i8'):
        # A number from 0 to 1 that looks random and depends on the tokens alone.
        digest = hashlib.sha256(b'held out' + row.tobytes()).digest()
        mask.append(int.from_bytes(digest[:6], 'big') / 2**48 < share)
    return torch.tensor(mask, dtype=torch.bool)


def question_tokens(labels: Labels, label_type: LabelType) -> torch.Tensor:
    """Return query and samples of each label, (labels, tokens)."""
    return torch.cat([labels[field] for field in ('query', *label_type.samples)], dim=1)


def parted(labels: Labels, label_type: LabelType, share: float) -> tuple[Labels, Labels]:
    """Return (held-out labels of a training with this share, the others)."""
    mask = is_held_out(labels, label_type, share)
    held_out = {field: values[mask] for field, values in labels.items()}
    return held_out, {field: values[~mask] for field, values in labels.items()}


def split(labels: Labels, hparams: HParams) -> tuple[Labels, Labels | None, list[str]]:
    """Return (training labels, held-out labels or None, notes); UserError if none are left."""
    share = hparams.labels.held_out
    if share == 0:
        return labels, None, []
    held_out, train = parted(labels, label_types.get(hparams.labels.type), share)
    count, left = len(held_out['query']), len(train['query'])
    if left == 0:
        raise UserError(
            f'{hparams.labels.setting("held_out")} leaves none of {count} labels to train on:'
            ' collect more of them, or hold fewer out'
        )
    note = f'Held out: {count} of {count + left} labels; training on {left}'
    return train, held_out, [note]


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Quality of a reward model's prediction of labels."""

    labels: int
    questions: int
    effective: float  # independent labels, see agreement.clustered_interval
    accuracy: float | None  # share answered as by the labeller; None for ratings
    chance: float | None
    agreement: float  # see label_types

    def interval(self) -> tuple[float, float]:
        """Return the 95 % confidence interval of the accuracy; of the agreement for ratings."""
        if self.accuracy is None:
            return correlation_interval(self.agreement, self.questions)
        return wilson_interval(self.accuracy * self.effective, self.effective)

    def statistics(self) -> dict[str, float]:
        """Return the numbers for TensorBoard."""
        numbers = {'agreement': self.agreement, 'effective_labels': self.effective}
        if self.accuracy is not None:
            numbers['accuracy'] = self.accuracy
        return numbers

    def __str__(self) -> str:
        if self.accuracy is None or self.chance is None:
            return f'correlation {self.agreement:.3f} with {self.labels} labels'
        low, high = self.interval()
        return (
            f'as the labeller in {100 * self.accuracy:.1f} % of {self.labels} labels (95 % interval'
            f' {100 * low:.1f} to {100 * high:.1f}); chance is {100 * self.chance:.1f} %'
        )


def predict(
    get_rewards: Rewards, labels: Labels, label_type: LabelType, batch_size: int, comm: Comm
) -> Prediction | None:
    """Measure, over all ranks, the prediction of labels {field: (labels, ...)} without ties."""
    labels = label_type.without_ties(labels)
    own = {field: values[comm.rank :: comm.size] for field, values in labels.items()}
    shares = comm.all_gather_object(rewards_of(get_rewards, own, label_type, batch_size))
    count = len(labels['query'])
    if count == 0:
        return None
    rewards = torch.empty(count, len(label_type.samples))
    for rank, share in enumerate(shares):
        rewards[rank :: comm.size] = share
    return prediction_of(rewards, labels, label_type)


def prediction_of(rewards: torch.Tensor, labels: Labels, label_type: LabelType) -> Prediction:
    """Measure the prediction of labels without ties by rewards (labels, n samples)."""
    right = label_type.is_right(rewards, labels)
    tokens = question_tokens(labels, label_type)
    questions, question_of = torch.unique(tokens, dim=0, return_inverse=True)
    effective = float(len(questions))
    if right is not None:
        effective = effective_answers(
            torch.bincount(question_of, weights=right.double()).tolist(),
            torch.bincount(question_of).tolist(),
        )
    return Prediction(
        labels=len(rewards),
        questions=len(questions),
        effective=effective,
        accuracy=None if right is None else right.double().mean().item(),
        chance=label_type.chance,
        agreement=label_type.agreement(rewards, labels).item(),
    )


def rewards_of(
    get_rewards: Rewards, labels: Labels, label_type: LabelType, batch_size: int
) -> torch.Tensor:
    """Return rewards (labels, n) of all samples, on the CPU."""
    found = [torch.empty(0, len(label_type.samples))]
    for start in range(0, len(labels['query']), batch_size):
        rows = slice(start, start + batch_size)
        responses = torch.stack([labels[sample][rows] for sample in label_type.samples], dim=1)
        found.append(get_rewards(labels['query'][rows], responses).float().cpu())
    return torch.cat(found)
