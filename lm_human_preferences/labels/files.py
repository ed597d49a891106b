"""Reads label files and reports every mistake in them before training starts."""

import contextlib
import json
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from lm_human_preferences import label_types, storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.train_reward import HParams
from lm_human_preferences.label_types import LabelType
from lm_human_preferences.labels import folder_labels, simulated
from lm_human_preferences.labels.texts import records, tokenise
from lm_human_preferences.language.encodings import Encoding
from lm_human_preferences.utils.core import Schema


def load_labels(
    hparams: HParams,
    encoding: Encoding,
    lines: Mapping[str, int] | None = None,
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The labels to train on, all checked (the original's download_labels).

    hparams: train_reward's. lines: of a folder of labels, {labeller: how many lines of the answers
    count}; None: all that there are.

    Returns ({field: tensor (num_train, *schema.shape)}, lines that tell the user how many labels
    there are and how many are left out). Raises UserError naming file, index and field.
    """
    label_types.schemas_of(hparams)  # refuses a type without responses
    if hparams.labels.source == 'test':
        return simulated.generate_labels(hparams, encoding), []
    source = f'--labels.source {hparams.labels.source}'
    objects, text_notes = _objects(hparams, encoding, lines)
    if not isinstance(objects, list):
        raise UserError(
            f'{source} must hold a JSON array of labels, not a {type(objects).__name__}'
        )
    num_train, notes = _num_train(source, len(objects), hparams)
    labels = as_tensors(source, objects[:num_train], hparams, encoding)
    return labels, [*notes, *text_notes]


def check_order(order: list[int], num_train: int, hparams: HParams) -> None:
    """Raise UserError unless a training that was begun in this `order` of its labels can go on with
    `num_train` labels. hparams: train_reward's."""
    if sorted(order) == list(range(num_train)):
        return
    fix = 'name them as before'
    if len(order) < num_train and hparams.labels.held_out == 0:
        fix += f' (--labels.num_train {len(order)}, if more were added at the end)'
    raise UserError(
        f'the run was begun with {len(order)} labels, not {num_train}: {fix}, or begin again with'
        ' --overwrite'
    )


def as_tensors(
    source: str, objects: list[Any], hparams: HParams, encoding: Encoding
) -> dict[str, torch.Tensor]:
    """Labels as objects of JSON, as tensors {field: (labels, *schema.shape)}, all checked.

    hparams: train_reward's. UserError naming source, index and field.
    """
    label_type = label_types.get(hparams.labels.type)
    labels = {}
    for field, schema in label_types.schemas_of(hparams).items():
        unit = 'values' if field in label_type.label_schemas() else 'tokens'
        labels[field] = _column(source, objects, field, schema, unit)
    _check_tokens(source, labels, label_type, encoding)
    _check_answers(source, labels, label_type)
    _check_queries(source, labels, encoding)
    return labels


def _objects(
    hparams: HParams, encoding: Encoding, lines: Mapping[str, int] | None
) -> tuple[Any, list[str]]:
    """The labels as objects, and what the user should know of texts.

    Labels that were token ids before have not been checked.
    """
    path = hparams.labels.source
    if folder_labels.is_folder(path):
        return folder_labels.labels_of(path, hparams, encoding, lines), []
    found = records.read(path) if path.endswith('.jsonl') else None
    objects = _read(path) if found is None else [record for _, record in found]
    if not isinstance(objects, list) or not objects or not records.is_text(objects[0]):
        return objects, []
    if found is None:
        found = [(f'{path}, label {index}', label) for index, label in enumerate(objects)]
    try:
        return tokenise.labels_of(found, hparams, encoding)
    except UserError as e:
        raise UserError(f'--labels.source {e}') from e


def _num_train(source: str, count: int, hparams: HParams) -> tuple[int, list[str]]:
    """How many of the `count` labels in the file are trained on, and the lines that say so."""
    notes = [f'Num labels found in source: {count}']
    num_train = hparams.labels.num_train
    option = f'--labels.num_train {num_train}'
    if hparams.labels.held_out and num_train is None:
        num_train, option = count, '--labels.held_out'  # which makes whole batches of the rest
    elif num_train is None:
        num_train = count - count % hparams.batch_size
        option = f'--batch_size {hparams.batch_size}'
        notes.append(
            f'Training on {num_train} of them; {count - num_train} do not fill a batch of '
            f'{hparams.batch_size}'
        )
    if num_train == 0 or count < num_train:
        raise UserError(f'{source} has {count} labels, too few for {option}')
    return num_train, notes


def _read(path: str) -> Any:
    """The JSON value in the file at `path`.

    In objects, lists of integers are numpy arrays where possible.
    A Python object for each token would take more than twice as long and half more memory, and so
    do the JSON libraries that were tried (benchmarks/README.md). So every list is put in quotes,
    the rest is parsed as JSON, and numpy parses the lists.
    """
    quoted = storage.read_text(path).strip().replace('[', '"[').replace(']', ']"')
    outer_quotes_removed = quoted[1:-1]
    try:
        with warnings.catch_warnings(action='error'):
            return json.loads(outer_quotes_removed, object_hook=_parse_lists, strict=False)
    except (ValueError, RecursionError, DeprecationWarning):
        # Other lists, brackets in a text, or no JSON at all, which this names.
        return storage.read_json(path)


def _parse_lists(label: dict[str, Any]) -> dict[str, Any]:
    """`label` with its quoted lists of integers as arrays; DeprecationWarning for other lists."""
    for field, value in label.items():
        if type(value) is str and value[:1] == '[':
            label[field] = np.fromstring(value[1:-1], np.int64, sep=',')
    return label


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
    numpy_kinds = 'iuf' if schema.dtype.is_floating_point else 'i'
    with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
        column = [label[field] for label in objects]
        if set(map(type, column)) == {np.ndarray}:
            # torch.empty, because numpy asks for huge pages, which is slow.
            values = torch.empty(len(column), *schema.shape, dtype=schema.dtype)
            np.stack(column, out=values.numpy())  # ValueError where one has another length
            return values
        # Look at the types first: numpy would make every text as long as the longest.
        rows = column if schema.shape else [column]
        types = {type(value) for row in rows for value in row}
        if types <= _python_types(schema):
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
    if isinstance(value, np.ndarray):
        value = value.tolist()
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
    """UserError unless numbers are finite and the label type finds nothing invalid."""
    for field, schema in label_type.label_schemas().items():
        if schema.dtype.is_floating_point:
            _refuse(source, field, labels[field], ~labels[field].isfinite(), 'finite')
    for field, invalid, expected in label_type.find_invalid(labels):
        _refuse(source, field, labels[field], invalid, expected)


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
