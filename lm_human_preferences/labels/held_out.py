"""Held-out labels, and how well a reward model predicts them.

A digest of a query's text decides whether all labels about this query are held out, so the choice
is the same on every rank, in every run, and after labels were added. Labels without a query, or
with one that all labels have, are held out together if they share a response.
"""

import dataclasses
import functools
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
from lm_human_preferences.labels import agreement
from lm_human_preferences.language.encodings import Encoder
from lm_human_preferences.utils.core import pearson_r

Labels = dict[str, torch.Tensor]
# Function of queries (batch, query_length) and n responses (batch, n, length): rewards (batch, n)
Rewards = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def subjects_of(labels: Labels, label_type: LabelType, encoder: Encoder) -> torch.Tensor:
    """Return the group of each label, int64 (labels,): cross-validation leaves out whole groups.

    Labels of a group have the same query or, if it is empty or all labels have it, share responses.
    """
    return _numbered(_subjects(labels, label_type, functools.partial(_text, encoder=encoder)))


def _numbered(subjects: Sequence[str]) -> torch.Tensor:
    numbers = {subject: number for number, subject in enumerate(dict.fromkeys(subjects))}
    return torch.tensor([numbers[subject] for subject in subjects])


def _subjects(
    labels: Labels, label_type: LabelType, name_of: Callable[[torch.Tensor], str]
) -> list[str]:
    """Return the name of each label's group; labels with the same query form a group.

    If there is no query, or all labels have it, labels that share a response form a group, such as
    the pairs of one ranking. A group has the alphabetically first of its names. name_of: function
    from token ids to a name.
    """
    roots: dict[str, str] = {}

    def root(name: str) -> str:
        while roots.setdefault(name, name) != name:
            name = roots[name]
        return name

    queries = [name_of(query) for query in labels['query']]
    is_one = len(set(queries)) == 1
    subjects = []
    for row, query in enumerate(queries):
        names = [query]
        if is_one or not query:
            names = [name_of(labels[sample][row]) for sample in label_type.samples]
        first, *others = sorted(map(root, names))
        roots.update(dict.fromkeys(others, first))
        subjects.append(first)
    return [root(subject) for subject in subjects]


def _text(tokens: torch.Tensor, encoder: Encoder) -> str:
    """Return the text of a query or sample; a lone end-of-text token counts as no text.

    Texts that differ only in white space or in how accents are composed become equal.
    """
    real = tokens[tokens != encoder.padding_token].tolist()
    if real == [encoder.eot_token]:
        return ''
    return ' '.join(unicodedata.normalize('NFC', encoder.decode(real)).split())


def parted(
    labels: Labels, label_type: LabelType, share: float, encoder: Encoder
) -> tuple[Labels, Labels]:
    """Split labels into (held-out labels, others). share: fraction of the queries to hold out."""
    chosen = []
    for subject in _subjects(labels, label_type, functools.partial(_text, encoder=encoder)):
        # The digest of a query, or of a response without a query, becomes a number from 0 to 1.
        digest = hashlib.sha256(b'held out' + subject.encode(errors='replace')).digest()
        chosen.append(int.from_bytes(digest[:6], 'big') / 2**48 < share)
    mask = torch.tensor(chosen, dtype=torch.bool)
    held_out = {field: values[mask] for field, values in labels.items()}
    return held_out, {field: values[~mask] for field, values in labels.items()}


def split(labels: Labels, settings: HParams, encoder: Encoder) -> tuple[Labels, Labels, list[str]]:
    """Split labels by --labels.held_out into (labels to learn from, held-out labels, notes).

    UserError if no labels are left to learn from.
    """
    share = settings.labels.held_out
    held_out, train = parted(labels, label_types.get(settings.labels.type), share, encoder)
    count, left = len(held_out['query']), len(train['query'])
    if left == 0:
        raise UserError(
            f'{settings.labels.setting("held_out")} leaves none of {count} labels to train on:'
            ' collect labels about other queries, or hold fewer out'
        )
    queries = len(held_out['query'].unique(dim=0))
    note = f'Held out: {count} of {count + left} labels ({queries} queries); training on {left}'
    return train, held_out, [note]


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Measured agreement between a reward model's predictions and labels."""

    labels: int
    queries: int  # number of groups of labels with the same query, see _subjects
    accuracy: float | None  # fraction of labels predicted right; None for ratings
    effective: float  # equivalent number of independent labels, see agreement.effective_answers
    chance: float | None  # accuracy that guessing would have
    agreement: float | None  # how well rewards predict labels: accuracy, or correlation for ratings
    is_cross_validated: bool = False  # whether a head fitted without a label predicted that label
    is_learned: bool = False  # whether the model may have learned from these labels

    def interval(self) -> tuple[float, float] | None:
        """Return the 95 % confidence interval of the accuracy; None if it would not be valid."""
        if self.accuracy is None or self.is_cross_validated or self.is_learned:
            return None
        return agreement.wilson_interval(self.accuracy * self.effective, self.effective)

    def statistics(self) -> dict[str, float]:
        """Return the statistics {name: number} that are logged to TensorBoard."""
        numbers = {}
        if self.accuracy is not None:
            numbers['accuracy'] = self.accuracy
        elif self.agreement is not None:
            numbers['agreement'] = self.agreement
        if self.interval() is not None:
            numbers['effective_labels'] = self.effective
        return numbers

    def __str__(self) -> str:
        if self.agreement is None:
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
    """Measure on all ranks how well rewards predict labels except ties; None if all are ties."""
    labels = label_type.without_ties(labels)
    count, samples = len(labels['query']), label_type.samples
    own = [torch.empty(0, len(samples))]
    mine = torch.arange(count)[comm.rank :: comm.size]
    for rows in mine.split(batch_size) if len(mine) else ():
        responses = torch.stack([labels[sample][rows] for sample in samples], dim=1)
        own.append(get_rewards(labels['query'][rows], responses).float().cpu())
    shares = comm.all_gather_object(torch.cat(own))
    if count == 0:
        return None
    rewards = torch.empty(count, len(samples))
    for rank, share in enumerate(shares):
        rewards[rank :: comm.size] = share
    return prediction_of(rewards, labels, label_type)


def prediction_of(rewards: torch.Tensor, labels: Labels, label_type: LabelType) -> Prediction:
    """Measure how well finite `rewards (labels, n samples)` predict labels that are not ties."""
    check_finite(rewards.flatten().tolist())
    query_of = _numbered(_subjects(labels, label_type, lambda tokens: str(tokens.tolist())))
    right = label_type.is_right(rewards, labels)
    found, accuracy, effective = None, None, 0.0
    if right is None:
        if len(label_type.samples) > 1:
            label_type.lacks('is_right')
        rated, values = rewards[:, 0], labels[label_type.field]
        if all(each.max() - each.min() > 1e-6 * each.abs().max() for each in (rated, values)):
            found = pearson_r(values, rated).nan_to_num(0.0).item()
    else:
        found = accuracy = right.double().mean().item()
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
        agreement=found,
    )
