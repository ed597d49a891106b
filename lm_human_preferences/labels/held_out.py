"""Held-out labels, and how well a reward model predicts them.

A digest of a query's text decides whether all labels about this query are held out, so the choice
is the same on every rank, in every run, and after labels were added. Labels without a query are
held out together if they share a response.
"""

import dataclasses
import hashlib
import unicodedata
from collections.abc import Callable, Sequence

import torch

from lm_human_preferences import label_types
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.reward_options import HParams
from lm_human_preferences.label_types import LabelType
from lm_human_preferences.label_types.base import check_finite
from lm_human_preferences.labels.report import agreement
from lm_human_preferences.language.encodings import Encoder
from lm_human_preferences.utils.core import pearson_r

Labels = dict[str, torch.Tensor]
# Rewards (batch, n) of n responses (batch, n, response_length) to queries (batch, query_length).
Rewards = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def is_held_out(
    labels: Labels, label_type: LabelType, share: float, encoder: Encoder
) -> torch.Tensor:
    """Return a mask, bool (labels,), of the labels {field: (labels, ...)} that are held out.

    share: fraction of the queries to hold out.
    """
    mask = []
    for subject in _subjects(labels, label_type, encoder):
        # A number from 0 to 1 that looks random, but depends only on the subject.
        digest = hashlib.sha256(b'held out' + subject.encode(errors='replace')).digest()
        mask.append(int.from_bytes(digest[:6], 'big') / 2**48 < share)
    return torch.tensor(mask, dtype=torch.bool)


def subjects_of(labels: Labels, label_type: LabelType, encoder: Encoder) -> torch.Tensor:
    """Return numbers, int64 (labels,), equal for labels that cross-validation leaves out together.

    These have the same query or, if all labels have one and the same query, share responses.
    """
    subjects = _subjects(labels, label_type, encoder)
    if len(set(subjects)) == 1:
        of_none = torch.full_like(labels['query'], encoder.padding_token)
        subjects = _subjects({**labels, 'query': of_none}, label_type, encoder)
    return torch.tensor(_numbered(subjects))


def _numbered(subjects: Sequence[str]) -> list[int]:
    numbers = {subject: number for number, subject in enumerate(dict.fromkeys(subjects))}
    return [numbers[subject] for subject in subjects]


def _subjects(labels: Labels, label_type: LabelType, encoder: Encoder) -> list[str]:
    """Return the subject of each label: its query or, for an empty query, what _connected gives."""
    found, without = [], []
    for row in range(len(labels['query'])):
        query = _text(labels['query'][row], encoder)
        found.append(query)
        if not query:
            without.append([_text(labels[sample][row], encoder) for sample in label_type.samples])
    connected = iter(_connected(without))
    return [query or f'\0{next(connected)}' for query in found]


def _connected(samples: Sequence[Sequence[str]]) -> list[str]:
    """Return the group of each label, named by its alphabetically first response.

    samples: responses of each label. Labels that share a response are in the same group: those of
    one ranking, for example, say something about each other.
    """
    roots: dict[str, str] = {}

    def root(response: str) -> str:
        while roots.setdefault(response, response) != response:
            response = roots[response]
        return response

    for of_label in samples:
        first, *others = sorted(map(root, of_label))
        roots.update(dict.fromkeys(others, first))
    return [root(of_label[0]) for of_label in samples]


def _text(tokens: torch.Tensor, encoder: Encoder) -> str:
    """Return the text of a query or sample, '' if it is empty.

    Texts that differ only in white space or in how accents are composed become equal.
    """
    real = tokens[tokens != encoder.padding_token].tolist()
    if real == [encoder.eot_token]:
        return ''
    return ' '.join(unicodedata.normalize('NFC', encoder.decode(real)).split())


def parted(
    labels: Labels, label_type: LabelType, share: float, encoder: Encoder
) -> tuple[Labels, Labels]:
    """Split labels into (held-out labels, other labels). share: fraction to hold out."""
    mask = is_held_out(labels, label_type, share, encoder)
    held_out = {field: values[mask] for field, values in labels.items()}
    return held_out, {field: values[~mask] for field, values in labels.items()}


def split(
    labels: Labels, settings: HParams, encoder: Encoder
) -> tuple[Labels, Labels | None, list[str]]:
    """Split `labels` as settings say: (labels to learn from, held-out labels or None, notes).

    UserError if none are left to learn from.
    """
    if settings.labels.held_out == 0:
        return labels, None, []
    label_type = label_types.get(settings.labels.type)
    held_out, train = parted(labels, label_type, settings.labels.held_out, encoder)
    count, left = len(held_out['query']), len(train['query'])
    if left == 0:
        raise UserError(
            f'{settings.labels.setting("held_out")} leaves none of {count} labels to train on:'
            ' collect more of them, about other queries, or hold fewer out'
        )
    queries = [len(part['query'].unique(dim=0)) for part in (held_out, labels)]
    note = (
        f'Held out: {count} of {count + left} labels; training on {left} ({queries[0]} of'
        f' {queries[1]} queries are held out)'
    )
    return train, held_out, [note]


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Measured agreement between a reward model's predictions and labels."""

    labels: int
    queries: int  # independent queries; for a single query, groups of connected labels
    accuracy: float | None  # fraction of labels predicted right; None for ratings
    effective: float  # independent labels that tell as much, see agreement.effective_answers
    chance: float | None  # accuracy of guessing
    agreement: float  # the accuracy, or the correlation of rewards with ratings
    is_undefined: bool = False  # no correlation, as all rewards or all ratings are equal
    is_cross_validated: bool = False  # by heads that were fitted to the other labels
    is_learned: bool = False  # whether the model may have learned from these labels

    def interval(self) -> tuple[float, float] | None:
        """Return the 95 % confidence interval of the accuracy; None if it would not be valid."""
        if self.accuracy is None or self.is_cross_validated or self.is_learned:
            return None
        return agreement.wilson_interval(self.accuracy * self.effective, self.effective)

    def statistics(self) -> dict[str, float]:
        """Return {name: number} for TensorBoard."""
        numbers = {'agreement': self.agreement}
        if self.accuracy is not None:
            numbers = {'accuracy': self.accuracy}
        if self.interval() is not None:
            numbers['effective_labels'] = self.effective
        return numbers

    def __str__(self) -> str:
        if self.is_undefined:
            return f'no correlation with {self.labels} labels: rewards or labels are all the same'
        found, chance = f'correlation {self.agreement:.3f} with {self.labels} labels', ''
        if self.accuracy is not None and self.chance is not None:
            found = f'as the labeller in {100 * self.accuracy:.1f} % of {self.labels} labels'
            chance = f'; chance is {100 * self.chance:.1f} %'
        interval = self.interval()
        if self.is_learned:
            found += ', which it may have learned'
        elif interval is not None:
            found += f' ({agreement.in_words(*interval)})'
        return found + chance


def predict(
    get_rewards: Rewards, labels: Labels, label_type: LabelType, batch_size: int, comm: Comm
) -> Prediction | None:
    """Measure how well rewards predict labels, ties left out, on all ranks; None without labels."""
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
    """Measure how well finite `rewards (labels, n samples)` predict labels, none of them ties."""
    check_finite(rewards.flatten().tolist())
    right = label_type.is_right(rewards, labels)
    query_of = torch.unique(labels['query'], dim=0, return_inverse=True)[1]
    if query_of.max() == 0:  # all labels have the same query, perhaps an empty one
        samples = zip(*(labels[sample].tolist() for sample in label_type.samples), strict=True)
        connected = _connected([list(map(str, each)) for each in samples])
        query_of = torch.tensor(_numbered(connected))
    accuracy, effective, is_undefined = None, 0.0, False
    if right is None:
        if len(label_type.samples) > 1:
            label_type.lacks('is_right')
        rated, values = rewards[:, 0], labels[label_type.field]
        measured = pearson_r(values, rated).nan_to_num(0.0).item()
        for each in (rated, values):
            is_undefined |= bool(each.max() - each.min() <= 1e-6 * each.abs().max())
    else:
        measured = accuracy = right.double().mean().item()
        of_queries = torch.bincount(query_of, weights=right.double())
        effective = agreement.effective_answers(
            of_queries.tolist(), torch.bincount(query_of).tolist()
        )
    return Prediction(
        labels=len(rewards),
        queries=int(query_of.max()) + 1,
        accuracy=accuracy,
        effective=effective,
        chance=label_type.chance,
        agreement=0.0 if is_undefined else measured,
        is_undefined=is_undefined,
    )


def rewards_of(
    get_rewards: Rewards, labels: Labels, label_type: LabelType, batch_size: int
) -> torch.Tensor:
    """Return rewards (labels, n samples) of all samples, on the CPU."""
    found = [torch.empty(0, len(label_type.samples))]
    for start in range(0, len(labels['query']), batch_size):
        rows = slice(start, start + batch_size)
        responses = torch.stack([labels[sample][rows] for sample in label_type.samples], dim=1)
        found.append(get_rewards(labels['query'][rows], responses).float().cpu())
    return torch.cat(found)
