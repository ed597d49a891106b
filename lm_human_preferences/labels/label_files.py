"""Labels to train on, from label files and folders of labels, all checked before training."""

import collections
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from lm_human_preferences import label_types
from lm_human_preferences.datasets import books
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import UserError, about_option
from lm_human_preferences.hparams.reward_options import HParams
from lm_human_preferences.label_types import TIE, TIED, LabelType
from lm_human_preferences.labels import simulated
from lm_human_preferences.labels.answers import Answer
from lm_human_preferences.labels.folder import LabelFolder, is_folder, parse_names
from lm_human_preferences.labels.task_file import check_same_task
from lm_human_preferences.labels.texts import records, token_ids, tokenise
from lm_human_preferences.language.encodings import Encoding
from lm_human_preferences.utils.core import Schema


class LoadedLabels(NamedTuple):
    """Labels to train a reward model on, in the same order as in their source.

    tensors: {field: (labels, *schema.shape)}. notes: lines for the user. about: facts for run.json.
    """

    tensors: dict[str, torch.Tensor]
    notes: list[str]
    about: dict[str, Any]

    @property
    def digest(self) -> str:
        """Return the SHA-256 of all tensors, in hexadecimal."""
        found = hashlib.sha256()
        for field in sorted(self.tensors):
            values = self.tensors[field].cpu().contiguous()
            found.update(f'{field} {values.dtype} {tuple(values.shape)}'.encode())
            found.update(values.numpy().tobytes())
        return found.hexdigest()


def made_up(tensors: dict[str, torch.Tensor]) -> LoadedLabels:
    """Return simulated labels, `tensors {field: (labels, ...)}`, as LoadedLabels."""
    count = len(tensors['query'])
    return LoadedLabels(tensors, [], {'found': count, 'simulated': count})


def load_labels(
    settings: HParams,
    encoding: Encoding,
    comm: Comm | None = None,
    lines: Mapping[str, int] | None = None,
) -> LoadedLabels:
    """Load, and check, the labels of --labels.source (the original's download_labels).

    lines: for a folder, {labeller: number of lines to read}; None: all lines that rank 0 sees.
    """
    if settings.labels.source == 'test':
        return made_up(simulated.generate_labels(settings, encoding))
    source = settings.labels.setting('source')
    about: dict[str, Any] = {}
    if is_folder(settings.labels.source):
        folder = _open_folder(settings, encoding, comm or Comm(), lines)
        answers = folder.counted(without=parse_names(settings.labels.without))
        objects, notes = list(folder.as_labels(answers)), []
        about = about_answers(answers[: settings.labels.num_train])
        about['answers'] = folder.lines_read()
    else:
        objects, notes = _read_file(settings, encoding)
    if not objects:
        raise UserError(f'{source} has no labels')
    num_train = settings.labels.num_train
    if num_train is not None and len(objects) < num_train:
        wanted = settings.labels.setting('num_train')
        raise UserError(f'{source} has {len(objects)} labels, too few for {wanted}')
    label_type = label_types.get(settings.labels.type).allow_ties()
    schemas = label_type.schemas(**settings.task.lengths())
    tensors = _as_tensors(source, objects[:num_train], label_type, schemas, encoding)
    notes = [f'Num labels found in source: {len(objects)}', *notes]
    return LoadedLabels(tensors, notes, {'found': len(objects), **about})


def about_answers(answers: Iterable[Answer]) -> dict[str, Any]:
    """Count answers: {'labellers': {name: count}, 'simulated': count}."""
    found = {'labellers': collections.Counter(), 'simulated': 0}
    for answer in answers:
        found['labellers'][answer.labeller] += 1
        found['simulated'] += answer.is_simulated
    return found


def check_order(order: list[int], num_train: int) -> None:
    """Raise UserError unless `order`, indices of labels in all epochs, has `num_train` labels."""
    begun = max(order) + 1
    if begun != num_train:
        raise UserError(
            f'the run was begun with {begun} labels, not {num_train}: restore them, or begin again'
            ' with --overwrite'
        )


def _open_folder(
    settings: HParams, encoding: Encoding, comm: Comm, lines: Mapping[str, int] | None
) -> LabelFolder:
    """Open a folder of labels on each rank, up to `lines`; None: up to the lines that rank 0 sees.

    UserError if the folder has fewer lines, or another task.
    """
    path = settings.labels.source
    folder, seen = None, None
    if comm.rank == 0:
        folder = LabelFolder(path, lines)
        seen = folder.lines_read()
    if lines is None:
        lines = comm.all_gather_object(seen)[0]
    folder = folder or LabelFolder(path, lines)
    source = f'{settings.labels.option_name("source")} {path}'
    there_are = folder.lines_read()
    for name, count in (folder.lines or {}).items():
        if there_are.get(name, 0) < count:
            raise UserError(
                f'{source} has fewer answers of {name} than when the run was begun:'
                ' restore them, or begin again with --overwrite'
            )
    here = {'label_type': settings.labels.type, 'encoding': encoding.name}
    check_same_task(source, folder.task, {**here, 'task': settings.task.lengths()})
    return folder


def tensors_of(folder: LabelFolder, answers: Sequence[Answer]) -> dict[str, torch.Tensor]:
    """Return `answers` to questions of a folder as labels {field: (answers, *schema.shape)}."""
    lengths = {name: folder.task['task'][name] for name in ('query_length', 'response_length')}
    objects = list(folder.as_labels(answers))
    schemas = folder.label_type.schemas(**lengths)
    return _as_tensors(folder.path, objects, folder.label_type, schemas, folder.encoding())


def _read_file(settings: HParams, encoding: Encoding) -> tuple[list[Any], list[str]]:
    """Read a file; return unchecked labels {field: token ids, or answer} and notes to print."""
    path, option = settings.labels.source, settings.labels.option_name('source')
    with about_option(option), books.mirror_named_on_failure(path):
        found: Iterable[tuple[str, Any]] = records.read_file(path)
    objects = [record for _, record in found]
    if not objects:
        return [], []
    with about_option(option):
        note = []
        if not records.is_text(objects[0]):
            theirs = token_ids.encoding_of(objects, encoding, path)
            if theirs.name == encoding.name:
                return objects, []
            found = token_ids.as_texts(objects, label_types.get(settings.labels.type), theirs, path)
            note = [
                f'Token ids of encoding {theirs.name!r} were read as texts, in {encoding.name!r}'
            ]
        labels, notes = tokenise.tokenise(found, settings, encoding)
    answer = label_types.get(settings.labels.type).field
    return [{**label.tokens, answer: label.answer} for label in labels], [*note, *notes]


def _as_tensors(
    source: str,
    objects: Sequence[Any],
    label_type: LabelType,
    schemas: Mapping[str, Schema],
    encoding: Encoding,
) -> dict[str, torch.Tensor]:
    """Check labels, and return them as tensors {field: (labels, *schema.shape)}."""
    columns: dict[str, list[Any]] = {field: [] for field in schemas}
    for index, label in enumerate(objects):
        if not isinstance(label, dict):
            raise UserError(f'{source}: label {index} is a {type(label).__name__}, not an object')
        for field, schema in schemas.items():
            if field not in label:
                raise UserError(f'{source}: label {index} has no field {field!r}')
            is_answer = field == label_type.field
            value = label_type.read(label[field]) if is_answer else label[field]
            if value is None or not (is_answer or _are_tokens(value, schema.shape[0])):
                expected = label_type.expected if is_answer else f'{schema.shape[0]} tokens'
                given = json.dumps(label[field])[:80]
                raise UserError(
                    f'{source}: label {index}, field {field!r} must be {expected}, not {given}'
                )
            columns[field].append(TIED if value == TIE else value)
    labels = {}
    for field, schema in schemas.items():
        dtype = np.float64 if schema.dtype.is_floating_point else np.int64
        try:
            array = np.array(columns[field], dtype).reshape(len(objects), *schema.shape)
        except OverflowError:
            raise UserError(f'{source}: field {field!r} holds numbers out of range') from None
        if field != label_type.field:
            _check_tokens(f'{source}: label', field, array, encoding)
        labels[field] = torch.from_numpy(array).to(schema.dtype)
    return labels


def _are_tokens(value: Any, length: int) -> bool:
    """Return whether a JSON value is a list of `length` integers."""
    return isinstance(value, list) and len(value) == length and set(map(type, value)) <= {int}


def _check_tokens(label: str, field: str, tokens: np.ndarray, encoding: Encoding) -> None:
    """Raise UserError if `tokens (labels, length)` has an unknown id, or a query is empty."""
    padding = encoding.get_encoder().padding_token
    unknown = ((tokens < 0) | (tokens >= encoding.n_vocab)) & (tokens != padding)
    if unknown.any():
        index = unknown.any(1).argmax()
        raise UserError(
            f'{label} {index}, field {field!r} must be token ids 0 to {encoding.n_vocab - 1}, or'
            f' {padding} for padding, not {tokens[unknown][0]}'
        )
    is_empty = (tokens == padding).all(1)
    if field == 'query' and is_empty.any():
        raise UserError(f'{label} {is_empty.argmax()}, field {field!r} is padding only')
