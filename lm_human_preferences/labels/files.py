"""Reading label files, and every check that their mistakes deserve before training starts."""

import contextlib
import json
import math
import warnings
from typing import Any

import numpy as np
import torch

from lm_human_preferences import label_types, storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.train_reward import HParams
from lm_human_preferences.labels import folder_labels
from lm_human_preferences.language.encodings import Encoding
from lm_human_preferences.training import memory
from lm_human_preferences.utils.core import Schema, ceil_div

TEST_SEED = 0
TEST_LABELS = 64  # how many the source 'test' has unless --labels.num_train asks for another number


def schemas_of(hparams: HParams) -> dict[str, Schema]:
    """{field: Schema} of one label under train_reward's hparams."""
    label_type = label_types.get(hparams.labels.type)
    questions = label_type.question_schemas(
        query_length=hparams.task.query_length, response_length=hparams.task.response_length
    )
    if len(questions) < 2:
        raise UserError(
            f'--labels.type {hparams.labels.type} shows no response: N of best_of_N must be at'
            ' least 1'
        )
    return {**questions, **label_type.label_schemas()}


def load_labels(
    hparams: HParams,
    encoding: Encoding,
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The labels to train on (the original's download_labels), all checked.

    hparams: train_reward's. Returns ({field: tensor (num_train, *schema.shape)}, lines that tell
    the user what was found and what is left out). Raises UserError naming file, index and field.
    """
    schemas, source, num_train = (
        schemas_of(hparams),
        hparams.labels.source,
        hparams.labels.num_train,
    )
    if source == 'test':
        if num_train:
            check_labels_fit(num_train, schemas)
        return (
            generate_labels(
                schemas,
                num_train or ceil_div(TEST_LABELS, hparams.batch_size) * hparams.batch_size,
                encoding.n_vocab,
            ),
            [],
        )
    is_folder = folder_labels.is_folder(source)
    found = folder_labels.labels_of(source, hparams, encoding) if is_folder else _read(source)
    if not isinstance(found, list):
        raise UserError(
            f'--labels.source {source} must hold a JSON array of labels, not a'
            f' {type(found).__name__}'
        )
    notes = [f'Num labels found in source: {len(found)}']
    if num_train is None:
        num_train = len(found) - len(found) % hparams.batch_size
        notes.append(
            f'Training on {num_train} of them; {len(found) - num_train} do not fill a batch of '
            f'{hparams.batch_size}'
        )
    if len(found) < num_train or num_train == 0:
        raise UserError(
            f'--labels.source {source} has {len(found)} labels, too few for '
            + (
                f'--labels.num_train {num_train}'
                if num_train
                else f'--batch_size {hparams.batch_size}'
            )
        )
    found = found[:num_train]
    labels = {field: _column(source, found, field, schema) for field, schema in schemas.items()}
    _check_ranges(source, labels, schemas, encoding)
    return labels, notes


def _read(source: str) -> Any:
    """The value in the file `source`, with the lists of whole numbers in its objects as arrays
    where that can be.

    To make a Python object of each token would take more than twice as long, and half more memory.
    """
    quoted = storage.read_text(source).strip().replace('[', '"[').replace(']', ']"')
    try:
        with warnings.catch_warnings(action='error'):
            return json.loads(quoted[1:-1], object_hook=_with_arrays, strict=False)
    except (
        ValueError,
        RecursionError,
        DeprecationWarning,
    ):  # of other lists, or brackets in a text
        return storage.read_json(source)


def _with_arrays(label: dict[str, Any]) -> dict[str, Any]:
    return {
        field: (
            np.fromstring(value[1:-1], np.int64, sep=',')
            if type(value) is str and value[:1] == '['
            else value
        )
        for field, value in label.items()
    }


def check_labels_fit(count: int, schemas: dict[str, Schema]) -> None:
    """UserError where so many made-up labels do not fit into memory."""
    numbers = sum(math.prod(schema.shape) for schema in schemas.values())
    memory.check_fits('--labels.num_train', count, 8 * numbers, memory.on_host())


def _column(source: str, found: list[Any], field: str, schema: Schema) -> torch.Tensor:
    """One field of all labels as a tensor; the slow search for a culprit runs only where there is
    one."""
    types, kinds = (
        ({int, float}, 'iuf') if schema.dtype.is_floating_point else ({int}, 'i')
    )  # Python's and numpy's
    with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
        column = [label[field] for label in found]
        if {*map(type, column)} == {np.ndarray}:
            values = torch.empty(
                len(column), *schema.shape, dtype=schema.dtype
            )  # numpy asks for huge pages: slow
            np.stack(column, out=values.numpy())  # ValueError where one has another length
            return values
        rows = column if schema.shape else [column]
        # numpy would make all texts as long as the longest
        if {type(value) for row in rows for value in row} <= types:
            column = np.asarray(column)
            if column.dtype.kind in kinds and column.shape[1:] == schema.shape:
                return torch.from_numpy(column).to(schema.dtype)
    for index, label in enumerate(found):
        _check_value(f'--labels.source {source}: label {index}', label, field, schema, types)
    raise UserError(f'--labels.source {source}: field {field!r} holds numbers out of range')


def _check_value(where: str, label: Any, field: str, schema: Schema, types: set[type]) -> None:
    if not isinstance(label, dict):
        raise UserError(f'{where} is a {type(label).__name__}, not an object')
    if field not in label:
        raise UserError(f'{where} has no field {field!r}')
    value, length = label[field], schema.shape[0] if schema.shape else None
    value = value.tolist() if isinstance(value, np.ndarray) else value
    if length is not None and (not isinstance(value, list) or len(value) != length):
        size = f'{len(value)} tokens' if isinstance(value, list) else f'a {type(value).__name__}'
        raise UserError(f'{where}, field {field!r} must be {length} tokens, not {size}')
    numbers: list[Any] = value if schema.shape else [value]
    if not all(type(x) in types and abs(x) < 2**63 for x in numbers):
        kind = (
            'a number'
            if schema.dtype.is_floating_point
            else 'an integer'
            if length is None
            else 'integers'
        )
        raise UserError(f'{where}, field {field!r} must be {kind}, not {json.dumps(value)[:80]}')


def _check_ranges(
    source: str,
    labels: dict[str, torch.Tensor],
    schemas: dict[str, Schema],
    encoding: Encoding,
) -> None:
    """Token ids must be tokens or padding, `best` one of the samples, scores finite."""
    padding = encoding.get_encoder().padding_token
    samples = sum(field.startswith('sample') for field in schemas)
    for field, values in labels.items():
        if schemas[field].dtype.is_floating_point:
            bad, expected = ~values.isfinite(), 'finite'
        elif field == 'best':
            bad, expected = (values < 0) | (values >= samples), f'0 to {samples - 1}'
        else:
            bad = ((values < 0) | (values >= encoding.n_vocab)) & (values != padding)
            expected = f'token ids 0 to {encoding.n_vocab - 1}, or {padding} for padding'
        if bad.any():
            raise UserError(
                f'--labels.source {source}: label {int(bad.nonzero()[0, 0])}, field {field!r} must'
                f' be {expected}, not {values[bad][0].item()}'
            )
    if (empty := (labels['query'] == padding).all(1)).any():
        raise UserError(
            f"--labels.source {source}: label {int(empty.nonzero()[0])}, field 'query' is padding"
            ' only'
        )


def generate_labels(
    schemas: dict[str, Schema],
    count: int,
    n_vocab: int,
) -> dict[str, torch.Tensor]:
    """Labels of somebody who likes small token ids, for the source 'test': {field: tensor (count,
    *schema.shape)}."""
    generator = torch.Generator().manual_seed(TEST_SEED)
    labels = {
        field: torch.randint(n_vocab, (count, *schema.shape), generator=generator)
        for field, schema in schemas.items()
        if schema.shape
    }
    liking = torch.stack(
        [-v.float().mean(1) / n_vocab for k, v in labels.items() if k.startswith('sample')], dim=1
    )
    return answered(labels, liking, schemas)


def answered(
    questions: dict[str, torch.Tensor],
    liking: torch.Tensor,
    schemas: dict[str, Schema],
) -> dict[str, torch.Tensor]:
    """Labels of somebody who likes the samples that much: `questions` {field: (count, length)},
    `liking (count, n)`."""
    answers = {
        'best': liking.argmax(1),
        'score': liking[:, 0],
        'difference': liking[:, -1] - liking[:, 0],
    }
    return {
        **questions,
        **{field: answers[field] for field, schema in schemas.items() if not schema.shape},
    }
