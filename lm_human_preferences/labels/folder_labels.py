"""The labels of a folder as a label file has them, for training and for export."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.train_reward import HParams
from lm_human_preferences.labels.answers import answer_field
from lm_human_preferences.labels.folder import LabelFolder, is_folder
from lm_human_preferences.language.encodings import Encoding

__all__ = ['is_folder', 'labels_of', 'parse_names', 'training_labels']


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


def labels_of(source: str, hparams: HParams, encoding: Encoding) -> list[dict[str, Any]]:
    """The labels of a folder, token ids as arrays, for train_reward's hparams.

    UserError where they are of another task.
    """
    folder = LabelFolder(source)
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
