"""The labels of a folder as a label file has them, for training and for export."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.train_reward import HParams
from lm_human_preferences.labels.answers import answer_field
from lm_human_preferences.labels.folder import LabelFolder, are_line_counts, is_folder
from lm_human_preferences.language.encodings import Encoding

__all__ = [
    'answers_so_far',
    'is_folder',
    'labels_of',
    'parse_names',
    'recorded_answers',
    'training_labels',
]


def parse_names(names: str | None) -> tuple[str, ...]:
    """The labellers in a value of --without or --labels.without."""
    if not names:
        return ()
    return tuple(name.strip() for name in names.split(','))


def training_labels(folder: LabelFolder, without: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield the labels that count for training as objects of a label file, the oldest first."""
    field = answer_field(folder.label_type)
    for answer in folder.counted(without=without):
        tokens = folder.tokens(folder.questions[answer.question])
        yield {**tokens, field: answer.value}


def answers_so_far(source: str, comm: Comm) -> dict[str, int] | None:
    """How much of a folder rank 0 sees, {labeller: lines of answers}; None if it is no folder.

    All ranks get the same, even if people are answering now.
    """
    if not is_folder(source):
        return None
    lines = LabelFolder(source).lines_read() if comm.rank == 0 else None
    return comm.all_gather_object(lines)[0]


def recorded_answers(state: Mapping[str, Any]) -> dict[str, int] | None:
    """What `answers_so_far` was when the training began whose checkpoint has this `state`.

    None if the state does not have it.
    """
    answers = state.get('trainer', {}).get('answers')
    return answers if are_line_counts(answers) else None


def labels_of(
    source: str,
    hparams: HParams,
    encoding: Encoding,
    lines: Mapping[str, int] | None = None,
) -> list[dict[str, Any]]:
    """The labels of a folder, token ids as arrays, for train_reward's hparams.

    lines: {labeller: how many lines of the answers count}; None: all that there are. UserError
    where the labels are of another task, and where there are fewer lines.
    """
    folder = LabelFolder(source, lines)
    there_are = folder.lines_read()
    for name, count in (lines or {}).items():
        if there_are.get(name, 0) < count:
            raise UserError(
                f'--labels.source {source} has fewer answers of {name} than when the run was begun:'
                ' restore them, or begin again with --overwrite'
            )
    where = f'--labels.source {source} is a folder of another task: its'
    if folder.label_type != hparams.labels.type:
        raise UserError(f'{where} labels are {folder.label_type}, not {hparams.labels.type}')
    if folder.task['encoding'] != encoding.name:
        raise UserError(f'{where} encoding is {folder.task["encoding"]!r}, not {encoding.name!r}')
    for name in ('query_length', 'response_length'):
        there, here = folder.task['task'].get(name), getattr(hparams.task, name)
        if there != here:
            raise UserError(f'{where} --task.{name} is {there}, not {here}')
    try:
        labels = training_labels(folder, parse_names(hparams.labels.without))
        return [as_arrays(label) for label in labels]
    except OverflowError as e:  # of numbers that are no token ids
        raise UserError(f'--labels.source {source} holds numbers out of range') from e


def as_arrays(label: dict[str, Any]) -> dict[str, Any]:
    """A label with its token ids as arrays; OverflowError for numbers that are no token ids."""
    return {
        field: np.array(value) if isinstance(value, list) else value
        for field, value in label.items()
    }
