"""Reads label files and reports every mistake in them before training starts."""

import contextlib
import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lm_human_preferences import label_types, storage
from lm_human_preferences.datasets import mirrors
from lm_human_preferences.errors import UserError, about_option
from lm_human_preferences.hparams.reward_options import HParams
from lm_human_preferences.label_types import TIE, TIED, LabelType
from lm_human_preferences.labels import folder_labels, simulated
from lm_human_preferences.labels.answers import Answer
from lm_human_preferences.labels.folder import LabelFolder
from lm_human_preferences.labels.texts import records, token_ids, tokenise
from lm_human_preferences.language.encodings import Encoding
from lm_human_preferences.utils.core import Schema


def load_labels(
    hparams: HParams,
    encoding: Encoding,
    folder: LabelFolder | None = None,
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The labels to train on, all checked (the original's download_labels).

    hparams: train_reward's. folder: that of --labels.source, as far as it has been read; None: it
    is opened here, if it is one.

    Returns ({field: tensor (num_train, *schema.shape)}, lines that tell the user how many labels
    there are, and how texts were read). Raises UserError naming file, index and field.
    """
    if hparams.labels.source == 'test':
        return simulated.generate_labels(hparams, encoding), []
    source = hparams.labels.setting('source')
    objects, text_notes = _objects(hparams, encoding, folder)
    if not isinstance(objects, list):
        raise UserError(
            f'{source} must hold a JSON array of labels, not a {type(objects).__name__}'
        )
    num_train = _num_train(source, len(objects), hparams)
    label_type = label_types.get(hparams.labels.type).allow_ties()
    schemas = label_type.schemas(**hparams.task.lengths())
    labels = _as_tensors(source, objects[:num_train], label_type, schemas, encoding)
    return labels, [f'Num labels found in source: {len(objects)}', *text_notes]


def check_order(order: list[int], num_train: int, hparams: HParams) -> None:
    """Raise UserError unless a training that was begun in this `order` of its labels can go on with
    `num_train` labels. order: of one epoch after the other. hparams: train_reward's."""
    if sorted(order) == sorted(hparams.epochs * list(range(num_train))):
        return
    begun = max(order) + 1
    if begun == num_train:
        raise UserError(
            f'the run was begun with {hparams.option_name("epochs")} {len(order) // begun}: give'
            ' that number, or begin again with --overwrite'
        )
    fix = 'name them as before'
    is_accepted = begun % hparams.batch_size == 0  # by --labels.num_train
    if begun < num_train and hparams.labels.held_out == 0 and is_accepted:
        option = hparams.labels.option_name('num_train')
        fix += f' ({option} {begun}, if more were added at the end)'
    raise UserError(
        f'the run was begun with {begun} labels, not {num_train}: {fix}, or begin again with'
        ' --overwrite'
    )


def of_answers(folder: LabelFolder, answers: Sequence[Answer]) -> dict[str, torch.Tensor]:
    """`answers` to questions of a folder as labels, {field: (answers, *schema.shape)}, all checked.

    UserError where the folder is damaged.
    """
    encoding = folder.encoding()
    lengths = {name: folder.task['task'][name] for name in ('query_length', 'response_length')}
    objects = list(folder_labels.as_objects(folder, answers))
    schemas = folder.label_type.schemas(**lengths)
    return _as_tensors(folder.path, objects, folder.label_type, schemas, encoding)


def _as_tensors(
    source: str,
    objects: list[Any],
    label_type: LabelType,
    schemas: dict[str, Schema],
    encoding: Encoding,
) -> dict[str, torch.Tensor]:
    """Labels as objects of JSON, as tensors {field: (labels, *schema.shape)}, all checked.

    UserError naming source, index and field.
    """
    labels = {}
    is_tie = _ties(objects, label_type)
    if is_tie.any():  # each is checked as if it were a choice
        objects = [
            {**label, label_type.field: 0} if tie else label
            for label, tie in zip(objects, is_tie.tolist(), strict=True)
        ]
    for field, schema in schemas.items():
        unit = 'values' if field == label_type.field else 'tokens'
        labels[field] = _column(source, objects, field, schema, unit)
    _check_tokens(source, labels, label_type, encoding)
    _check_answers(source, labels, label_type)
    _check_queries(source, labels, encoding)
    labels[label_type.field][is_tie] = TIED
    return labels


def _ties(objects: list[Any], label_type: LabelType) -> torch.Tensor:
    """Which labels are ties that may be given, bool (labels,)."""
    if not label_type.ties:
        return torch.zeros(len(objects), dtype=torch.bool)
    field = label_type.field
    are_ties = [isinstance(label, dict) and label.get(field) == TIE for label in objects]
    return torch.tensor(are_ties, dtype=torch.bool)


def _objects(
    hparams: HParams, encoding: Encoding, folder: LabelFolder | None
) -> tuple[Any, list[str]]:
    """The labels as objects, and what the user should know of texts.

    Labels that were token ids before have not been checked.
    """
    path, option = hparams.labels.source, hparams.labels.option_name('source')
    if folder_labels.is_folder(path):
        return folder_labels.labels_of(folder or LabelFolder(path), hparams, encoding), []
    with about_option(option):
        records.check_kind_of_file(path)
    with mirrors.named_on_failure(path):
        found = records.read(path) if path.endswith('.jsonl') else None
        objects = storage.read_json(path) if found is None else [record for _, record in found]
    if not isinstance(objects, list) or not objects:
        return objects, []
    with about_option(option):
        if not records.is_text(objects[0]):
            return _of_token_ids(objects, path, hparams, encoding)
        if found is None:
            found = [(f'{path}, label {index}', label) for index, label in enumerate(objects)]
        return tokenise.labels_of(found, hparams, encoding)


def _of_token_ids(
    objects: list[Any], path: str, hparams: HParams, encoding: Encoding
) -> tuple[list[Any], list[str]]:
    """Labels of token ids as those of `encoding`, and lines for the user; see `_objects`."""
    theirs = token_ids.encoding_of(objects, encoding, path)
    if theirs.name == encoding.name:
        return objects, []
    label_type = label_types.get(hparams.labels.type)
    found = token_ids.as_texts(objects, label_type, theirs, path)
    labels, notes = tokenise.labels_of(found, hparams, encoding)
    line = f'Token ids of encoding {theirs.name!r} were read as texts, in {encoding.name!r}'
    return labels, [line, *notes]


def _num_train(source: str, count: int, hparams: HParams) -> int:
    """How many of the `count` labels in the file are trained on; UserError if there are fewer."""
    num_train = hparams.labels.num_train
    if num_train is None:
        num_train = count
    if count == 0:
        raise UserError(f'{source} has no labels')
    if count < num_train:
        wanted = hparams.labels.setting('num_train')
        raise UserError(f'{source} has {count} labels, too few for {wanted}')
    return num_train


def _column(source: str, objects: list[Any], field: str, schema: Schema, unit: str) -> torch.Tensor:
    """One field of all labels as a tensor; UserError naming the first label where it is wrong."""
    values = _convert(objects, field, schema)
    if values is not None:
        return values
    # Finding the label that is wrong is slow, and is only done where there is one.
    for index, label in enumerate(objects):
        _check_value(f'{source}: label {index}', label, field, schema, unit)
    raise UserError(f'{source}: field {field!r} holds numbers out of range')


def _python_types(schema: Schema) -> set[type]:
    return {int, float} if schema.dtype.is_floating_point else {int}


def _convert(objects: list[Any], field: str, schema: Schema) -> torch.Tensor | None:
    """One field of all labels as a tensor, or None where any of them does not match `schema`."""
    if not objects:
        return torch.empty(0, *schema.shape, dtype=schema.dtype)
    numpy_kinds = 'iuf' if schema.dtype.is_floating_point else 'i'
    with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
        column = [label[field] for label in objects]
        # Look at the types first: numpy would make every text as long as the longest.
        numbers = itertools.chain.from_iterable(column) if schema.shape else column
        if set(map(type, numbers)) <= _python_types(schema):
            array = np.asarray(column)
            if array.dtype.kind in numpy_kinds and array.shape[1:] == schema.shape:
                return torch.from_numpy(array).to(schema.dtype)
    return None


def _check_value(label_name: str, label: Any, field: str, schema: Schema, unit: str) -> None:
    """UserError unless `label` is an object with a `field` that matches `schema`."""
    if not isinstance(label, dict):
        raise UserError(f'{label_name} is a {type(label).__name__}, not an object')
    if field not in label:
        raise UserError(f'{label_name} has no field {field!r}')
    value = label[field]
    if schema.shape:
        length = schema.shape[0]
        if not isinstance(value, list):
            size = f'a {type(value).__name__}'
            raise UserError(f'{label_name}, field {field!r} must be {length} {unit}, not {size}')
        if len(value) != length:
            size = f'{len(value)} {unit}'
            raise UserError(f'{label_name}, field {field!r} must be {length} {unit}, not {size}')
    numbers: list[Any] = value if schema.shape else [value]
    types = _python_types(schema)
    if not all(type(number) in types and abs(number) < 2**63 for number in numbers):
        raise UserError(
            f'{label_name}, field {field!r} must be {_expected(schema)}, not'
            f' {json.dumps(value)[:80]}'
        )


def _expected(schema: Schema) -> str:
    if schema.dtype.is_floating_point:
        return 'numbers' if schema.shape else 'a number'
    return 'integers' if schema.shape else 'an integer'


def _check_tokens(
    source: str, labels: dict[str, torch.Tensor], label_type: LabelType, encoding: Encoding
) -> None:
    """UserError unless query and samples hold token ids or padding only."""
    padding = encoding.get_encoder().padding_token
    expected = f'token ids 0 to {encoding.n_vocab - 1}, or {padding} for padding'
    for field in ('query', *label_type.samples):
        tokens = labels[field]
        invalid = ((tokens < 0) | (tokens >= encoding.n_vocab)) & (tokens != padding)
        _refuse(source, field, tokens, invalid, expected)


def _check_answers(source: str, labels: dict[str, torch.Tensor], label_type: LabelType) -> None:
    """UserError unless numbers are finite and all are answers of the label type."""
    answers = labels[label_type.field]
    if label_type.is_numeric:
        _refuse(source, label_type.field, answers, ~answers.isfinite(), 'finite')
    invalid = [not label_type.is_valid(answer) for answer in answers.tolist()]
    _refuse(source, label_type.field, answers, torch.tensor(invalid), label_type.expected)


def _refuse(
    source: str, field: str, values: torch.Tensor, invalid: torch.Tensor, expected: str
) -> None:
    """UserError naming the first of `values` that the mask `invalid` marks, if there is one."""
    if invalid.any():
        index = int(invalid.nonzero()[0, 0])
        first = values[invalid][0].tolist()
        raise UserError(f'{source}: label {index}, field {field!r} must be {expected}, not {first}')


def _check_queries(source: str, labels: dict[str, torch.Tensor], encoding: Encoding) -> None:
    """UserError for a query without any token."""
    padding = encoding.get_encoder().padding_token
    empty = (labels['query'] == padding).all(1)
    if empty.any():
        index = int(empty.nonzero()[0])
        raise UserError(f"{source}: label {index}, field 'query' is padding only")
