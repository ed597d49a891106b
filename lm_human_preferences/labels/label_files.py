"""Readers of label files and folders of labels; all labels are checked before training."""

import collections
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from lm_human_preferences import label_types
from lm_human_preferences.datasets import books
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import UserError, about_option
from lm_human_preferences.hparams.reward_options import HParams
from lm_human_preferences.label_types import TIE, TIED, LabelType
from lm_human_preferences.labels.answers import Answer
from lm_human_preferences.labels.folder import LabelFolder, is_folder, parse_names
from lm_human_preferences.labels.task_file import LENGTHS, check_same_task
from lm_human_preferences.labels.texts import records, token_ids, tokenise
from lm_human_preferences.language.encodings import Encoding


def read(
    settings: HParams, encoding: Encoding, comm: Comm, lines: Mapping[str, int] | None
) -> tuple[dict[str, torch.Tensor], list[str], dict[str, Any]]:
    """Read, and check, a file or folder of labels; return the fields of training_data.LoadedLabels.

    lines: see training_data.load_labels.
    """
    source, num_train = settings.labels.setting('source'), settings.labels.num_train
    about: dict[str, Any] = {}
    if is_folder(settings.labels.source):
        folder = _open_folder(settings, encoding, comm, lines)
        answers = folder.counted(without=parse_names(settings.labels.without))
        objects, notes = list(folder.as_labels(answers)), []
        about = {**about_answers(answers[:num_train]), 'answers': folder.lines_read()}
    else:
        objects, notes = _read_file(settings, encoding)
    if not objects:
        raise UserError(f'{source} has no labels')
    if num_train is not None and len(objects) < num_train:
        wanted = settings.labels.setting('num_train')
        raise UserError(f'{source} has {len(objects)} labels, too few for {wanted}')
    label_type = label_types.get(settings.labels.type).allow_ties()
    lengths = settings.task.lengths()
    tensors = _as_tensors(source, objects[:num_train], label_type, lengths, encoding)
    notes = [f'Num labels found in source: {len(objects)}', *notes]
    return tensors, notes, {'found': len(objects), **about}


def about_answers(answers: Iterable[Answer]) -> dict[str, Any]:
    """Return counts of answers: {'labellers': {name: count}, 'simulated': count}."""
    found = {'labellers': collections.Counter(), 'simulated': 0}
    for answer in answers:
        found['labellers'][answer.labeller] += 1
        found['simulated'] += answer.is_simulated
    return found


def _open_folder(
    settings: HParams, encoding: Encoding, comm: Comm, lines: Mapping[str, int] | None
) -> LabelFolder:
    """Open a folder of labels so that every rank reads the same lines of each labeller's file.

    lines: how many to read; None: those that rank 0 sees. UserError if the folder has another task.
    """
    path = settings.labels.source
    seen = comm.on_rank_0(lambda: LabelFolder(path, lines).lines_read())
    folder = LabelFolder(path, seen)
    here = {'label_type': settings.labels.type, 'encoding': encoding.name}
    here |= {'task': settings.task.lengths()}
    check_same_task(settings.labels.setting('source'), folder.task, here)
    return folder


def tensors_of(folder: LabelFolder, answers: Sequence[Answer]) -> dict[str, torch.Tensor]:
    """Return `answers` to questions of a folder as labels {field: (answers, *schema.shape)}."""
    lengths = {name: folder.task['task'][name] for name in LENGTHS}
    objects = list(folder.as_labels(answers))
    return _as_tensors(folder.path, objects, folder.label_type, lengths, folder.encoding())


def _read_file(settings: HParams, encoding: Encoding) -> tuple[Sequence[dict[str, Any]], list[str]]:
    """Read a file; return unchecked labels {field: token ids, or answer} and notes to print."""
    path, label_type = settings.labels.source, label_types.get(settings.labels.type)
    notes = []
    with about_option(settings.labels.option_name('source')):
        with books.mirror_named_on_failure(path):
            found = records.read(path)
        objects = [record for _, record in found]
        if objects and not records.is_text(objects[0]):
            theirs = token_ids.encoding_of(objects, encoding, path)
            if theirs.name == encoding.name:
                return objects, []
            notes = [
                f'Token ids of encoding {theirs.name!r} were read as texts, in {encoding.name!r}'
            ]
            found = [
                (where, token_ids.as_texts(label, label_type, theirs, where))
                for where, label in found
            ]
        labels, of_texts = tokenise.tokenise(found, settings, encoding)
    answer = label_type.field
    return [{**label.tokens, answer: label.answer} for label in labels], [*notes, *of_texts]


def _as_tensors(
    source: str,
    objects: Sequence[dict[str, Any]],
    label_type: LabelType,
    lengths: Mapping[str, int],
    encoding: Encoding,
) -> dict[str, torch.Tensor]:
    """Check labels, and return them as tensors {field: (labels, *schema.shape)}."""
    schemas = label_type.schemas(**lengths)
    padding = encoding.get_encoder().padding_token
    columns: dict[str, list[Any]] = {field: [] for field in schemas}
    for index, label in enumerate(objects):
        for field, schema in schemas.items():
            where = f'{source}: label {index}, field {field!r}'
            value: Any = label.get(field)
            if field == label_type.field:
                value = label_type.read(value)
                if value is None:
                    given = json.dumps(label.get(field))[:80]
                    raise UserError(f'{where} must be {label_type.expected}, not {given}')
            else:
                token_ids.check_ids(value, encoding, where)
                if len(value) != schema.shape[0]:
                    raise UserError(f'{where} must be {schema.shape[0]} tokens, not {len(value)}')
                if field == 'query' and set(value) == {padding}:
                    raise UserError(f'{where} is padding only')
            columns[field].append(TIED if value == TIE else value)
    labels = {}
    for field, schema in schemas.items():
        values = torch.tensor(columns[field], dtype=schema.dtype)
        labels[field] = values.reshape(len(objects), *schema.shape)
    return labels
