"""Labels that are held out of training, and how well a reward model predicts them.

A question is held out or not by the digest of its tokens. So all answers to it are on one side, on
every rank and in every run, and it stays there when labels are added.
"""

from __future__ import annotations

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
    """Which questions are held out, bool (labels,); labels: {field: (labels, ...)}."""
    tokens = question_tokens(labels, label_type).numpy().astype('<i8')
    return torch.tensor([_fraction(row.tobytes()) < share for row in tokens], dtype=torch.bool)


def question_tokens(labels: Labels, label_type: LabelType) -> torch.Tensor:
    """Query and samples of each label, (labels, tokens); labels: {field: (labels, ...)}."""
    return torch.cat([labels[field] for field in ('query', *label_type.samples)], dim=1)


def _fraction(tokens: bytes) -> float:
    """A number from 0 to 1 that looks random and depends on `tokens` alone."""
    digest = hashlib.sha256(b'held out' + tokens).digest()
    return int.from_bytes(digest[:6], 'big') / 2**48


def split(labels: Labels, hparams: HParams) -> tuple[Labels, Labels | None, list[str]]:
    """(labels to train on, labels held out or None, lines that tell the user of them).

    hparams: train_reward's. Nothing changes where its --labels.held_out is 0. UserError where no
    label is left to train on.
    """
    share = hparams.labels.held_out
    if share == 0:
        return labels, None, []
    mask = is_held_out(labels, label_types.get(hparams.labels.type), share)
    if mask.all():
        raise UserError(
            f'{hparams.labels.setting("held_out")} leaves none of {len(mask)} labels to train on:'
            ' collect more of them, or hold fewer out'
        )
    train = {field: values[~mask] for field, values in labels.items()}
    held_out = {field: values[mask] for field, values in labels.items()}
    count = int(mask.sum())
    note = f'Held out: {count} of {len(mask)} labels; training on {len(mask) - count}'
    return train, held_out, [note]


@dataclasses.dataclass(frozen=True)
class Prediction:
    """How well a reward model predicts labels.

    labels: how many they are. questions: how many different ones they are about. effective: how
    many independent labels would tell as much of the accuracy, see agreement.clustered_interval.
    accuracy: the share that it answers as the labeller did, and `chance` what guessing gives; None
    for ratings. agreement: see label_types, 1 is perfect and 0 chance.
    """

    labels: int
    questions: int
    effective: float
    accuracy: float | None
    chance: float | None
    agreement: float

    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the accuracy; of the agreement where there is none.

        For that one each question counts once, as answers to it may be high or low together.
        """
        if self.accuracy is None:
            return correlation_interval(self.agreement, self.questions)
        return wilson_interval(self.accuracy * self.effective, self.effective)

    def statistics(self) -> dict[str, float]:
        """As TensorBoard has them."""
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
    """How well rewards predict `labels` {field: (labels, ...)}; None where there are none.

    Ties are left out: no choice is right there. batch_size: labels that a rank scores at a time.
    Each rank scores its share, and all ranks get the same result.
    """
    labels = label_type.without_ties(labels)
    own = {field: values[comm.rank :: comm.size] for field, values in labels.items()}
    shares = comm.all_gather_object(rewards_of(get_rewards, own, label_type, batch_size))
    count = len(labels['query'])
    if count == 0:
        return None
    rewards = torch.empty(count, len(label_type.samples))
    for rank, share in enumerate(shares):
        rewards[rank :: comm.size] = share
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
        labels=count,
        questions=len(questions),
        effective=effective,
        accuracy=None if right is None else right.double().mean().item(),
        chance=label_type.chance,
        agreement=label_type.agreement(rewards, labels).item(),
    )


def rewards_of(
    get_rewards: Rewards, labels: Labels, label_type: LabelType, batch_size: int
) -> torch.Tensor:
    """Rewards (labels, n) of all samples, on the CPU."""
    found = [torch.empty(0, len(label_type.samples))]
    for start in range(0, len(labels['query']), batch_size):
        rows = slice(start, start + batch_size)
        responses = torch.stack([labels[sample][rows] for sample in label_type.samples], dim=1)
        found.append(get_rewards(labels['query'][rows], responses).float().cpu())
    return torch.cat(found)
