"""Checkpoints of a training run in the original's format, written so that a crash at any moment
loses none of them.

    checkpoint                         the newest and all that are kept; replaced last: the commit
    model.ckpt-N.data-00000-of-00001   values of the variables, under the original's names
    model.ckpt-N.index                 their names, shapes and checksums
    model.ckpt-N.resume.json           the manifest: what TensorFlow does not keep, sizes, checksums

The original program reads these directories as its own, and nothing in them can execute.
"""

from __future__ import annotations

import collections
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lm_human_preferences import storage
from lm_human_preferences.checkpointing import tf_bundle
from lm_human_preferences.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    import torch

NAME = r'model\.ckpt(?:-\d+)?'
RESUME, DATA, INDEX = '.resume.json', '.data-00000-of-00001', '.index'
SUFFIX = r'\.(?:index|meta|resume\.json|data-\d{5}-of-\d{5})'
FILE = re.compile(f'({NAME})({SUFFIX})')
COUNT = range(2**63)
MANIFEST = {'index_sha256': str, 'sizes': {INDEX: COUNT, DATA: COUNT}, 'state': object}
LEFTOVER = re.compile(rf'(?:checkpoint|{NAME}{SUFFIX})\.\d+\.part')
LISTED = re.compile(
    r'^[ \t]*(model_checkpoint_path|all_model_checkpoint_paths)[ \t]*:[ \t]*'
    r'"(?:[^"\n]*[/\\])?([\w+=@-][\w.+=@ -]{0,200})"[ \t\r]*$',
    re.M | re.A,
)


def parse_checkpoint_file(text: str) -> list[str]:
    """Names of the checkpoints that the text of a `checkpoint` file (CheckpointState) lists, the
    one in force last.

    Of a path, such as a training machine's, only the base name counts: a checkpoint is always
    beside the file.
    """
    listed = LISTED.findall(text)
    newest = [name for field, name in listed if field == 'model_checkpoint_path'][:1]
    return [
        name for name in dict.fromkeys(name for _, name in listed) if name not in newest
    ] + newest


def latest(directory: str) -> str | None:
    """The prefix of the newest checkpoint in a local directory, None where there is none."""
    kept = _kept(directory)
    return os.path.join(directory, kept[-1]) if kept else None


def _kept(directory: str) -> list[str]:
    """Names of the checkpoints that `directory` lists and has, the newest last."""
    path = os.path.join(directory, 'checkpoint')
    try:
        with open(storage.cached_path(path), encoding='utf-8', errors='replace') as f:
            names = parse_checkpoint_file(f.read())
    except storage.NotFound:
        return []
    except OSError as e:
        raise UserError(f'{path} cannot be read: {e.strerror}') from e
    return [name for name in names if os.path.exists(os.path.join(directory, f'{name}.index'))]


def check_disk_space(
    directory: str,
    tensors: Mapping[str, np.ndarray | torch.Tensor],
    saves: int,
    *,
    max_to_keep: int = 20,
) -> None:
    """UserError unless the disk has room for those checkpoints of `tensors` that are kept at a
    time, of `saves`."""
    count = min(saves, max_to_keep + 1) - len(
        _kept(directory)
    )  # the newest is written before the oldest goes
    while not os.path.exists(directory):
        directory = os.path.dirname(directory) or '.'
    need, free = count * _size(tensors), shutil.disk_usage(directory).free
    if free < need:
        raise UserError(
            f'--save_dir: {directory} has {free >> 20} MiB free, but {count} checkpoints will take '
            f'{need >> 20} MiB: make room, or raise --run.save_interval'
        )


def _size(tensors: Mapping[str, np.ndarray | torch.Tensor]) -> int:
    return sum(getattr(tensor, 'nbytes', 8) for tensor in tensors.values()) + (1 << 20)


def save(
    directory: str,
    name: str,
    tensors: Mapping[str, np.ndarray | torch.Tensor],
    *,
    state: Any = None,
    max_to_keep: int = 20,
) -> str:
    """Save a checkpoint, make it the newest and delete the oldest beyond `max_to_keep`; returns its
    prefix.

    name: 'model.ckpt', or 'model.ckpt-N' for step N. tensors: {variable name: array or torch
    tensor}, converted and written one at a time. state: what else to keep, as JSON, for
    `restore_state`. Raises UserError where the directory cannot be written or the disk is full;
    what was there is then as it was.
    """
    assert re.fullmatch(NAME, name), name
    prefix, need, free = os.path.join(directory, name), _size(tensors), 'free space unknown'
    try:
        os.makedirs(directory, exist_ok=True)
        room = shutil.disk_usage(directory).free
        free = f'{room >> 20} MiB are free'
        if room < need:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        kept = _kept(directory)
        keep = ([other for other in kept if other != name] + [name])[-max_to_keep:]
        try:
            write_bundle(prefix, tensors, state)
            _commit(directory, keep)
        except BaseException:
            _delete(directory, {name} - set(kept))
            raise
        # Only we write resume.json, so that one that is not listed is a killed run's.
        _delete(directory, {*resumable(directory), *kept} - set(keep))
    except OSError as e:
        raise UserError(
            f'cannot save {name} in {directory}: {e.strerror}; it needs {need >> 20} MiB, {free}'
        ) from e
    return prefix


def write_bundle(
    prefix: str,
    tensors: Mapping[str, np.ndarray | torch.Tensor],
    state: Any = None,
) -> None:
    """Write the checkpoint `prefix` byte for byte as tf.train.Saver does, and `state` beside it;
    all of it, or nothing.

    The resume.json has the sizes of both files and the digest of the index, which holds the
    checksum of every tensor.
    """
    paths = [f'{prefix}{RESUME}'] if state is not None else []
    with storage.atomic_write(*paths, f'{prefix}{DATA}', f'{prefix}{INDEX}') as (
        *resume,
        data,
        index,
    ):
        table = tf_bundle.write_values(data, tensors)
        index.write(table)
        manifest = {
            'index_sha256': hashlib.sha256(table).hexdigest(),
            'sizes': {INDEX: len(table), DATA: data.tell()},
        }
        for file in resume:
            file.write(_signed({**manifest, 'state': state}))


def _signed(value: dict[str, Any]) -> bytes:
    """`value`, a dict, as JSON that begins with the digest of what follows it: no byte can change
    unnoticed."""
    rest = json.dumps(value)[1:].encode()
    return b'{"sha256": "%s", ' % hashlib.sha256(rest).hexdigest().encode() + rest


def _commit(directory: str, keep: Sequence[str]) -> None:
    with storage.atomic_write(os.path.join(directory, 'checkpoint')) as (file,):
        file.write(state_text(keep))


def state_text(names: Sequence[str]) -> bytes:
    """The `checkpoint` file that lists `names`, the newest last, as tf.train.Saver's
    save_relative_paths writes it."""
    lines = [
        f'model_checkpoint_path: "{names[-1]}"\n',
        *(f'all_model_checkpoint_paths: "{name}"\n' for name in names),
    ]
    return ''.join(lines).encode()


def _delete(directory: str, names: Collection[str]) -> None:
    """Delete the files of the checkpoints `names`, and what killed runs left half written."""
    for file in sorted(
        os.listdir(directory)
    ):  # resume.json last: until then the rest is found again
        match = FILE.fullmatch(file)
        if LEFTOVER.fullmatch(file) or (match and match[1] in names):
            os.remove(os.path.join(directory, file))


def _parsed(text: bytes) -> dict[str, Any]:
    """What `_signed` made the JSON of; of anything else, something else."""
    try:
        return {name: value for name, value in json.loads(text).items() if name != 'sha256'}
    except (ValueError, AttributeError, RecursionError):
        return {}


def resumable(directory: str) -> list[str]:
    """Names of the checkpoints in a local directory that have a state, whole or not, the newest
    first."""
    files = os.listdir(directory) if os.path.isdir(directory) else []
    return sorted(
        (m[1] for m in map(FILE.fullmatch, files) if m and m[0].endswith(RESUME)),
        key=step_of,
        reverse=True,
    )


def step_of(name: str) -> int:
    """The step that a checkpoint's name tells: 5 for model.ckpt-5."""
    return int((re.search(r'-(\d+)$', name) or [0, 0])[1])


def latest_resumable(directory: str, schema: Any = dict) -> tuple[str, Any] | None:
    """(prefix, state) of the newest checkpoint in a local directory that a run can go on from, None
    if there never was.

    Every byte is verified, and that the state has `schema`, see `matches_schema`. Others are named,
    and passed over; UserError where none is left.
    """
    prefixes = [os.path.join(directory, name) for name in resumable(directory)]
    prefixes = [
        prefix for prefix in prefixes if os.path.exists(prefix + INDEX)
    ]  # which is the last one to appear
    for prefix in prefixes:
        try:
            state = restore_state(prefix)
            if not matches_schema(state, schema):
                raise UserError(f'{prefix}{RESUME} does not hold the state of such a run')
            collections.deque(tf_bundle.Bundle(prefix).values(), maxlen=0)
            return prefix, state
        except UserError as e:
            print(f'WARNING: {prefix} is passed over: {e}')
    if prefixes:
        raise UserError(f'no checkpoint in {directory} is whole: begin again with --overwrite')
    return None


def discard_after(directory: str, name: str) -> None:
    """Make `name` the newest checkpoint in `directory`, and delete those of later steps."""
    kept = _kept(directory)
    keep = [other for other in kept if other != name and step_of(other) < step_of(name)] + [name]
    if keep != kept:
        _commit(directory, keep)
        _delete(directory, {*resumable(directory), *kept} - set(keep))


def restore_state(prefix: str) -> Any:
    """The `state` saved with the checkpoint `prefix`, None where there is none.

    BundleError where it, the index or the size of the data is not what was saved. Values are not
    looked at.
    """
    path = prefix + RESUME
    if not os.path.exists(path):
        return None
    with (
        tf_bundle.open_file(path) as state,
        tf_bundle.open_file(prefix + INDEX) as index,
        tf_bundle.open_file(prefix + DATA) as data,
    ):
        text, digest, size = (
            state.read(),
            hashlib.sha256(index.read()).hexdigest(),
            os.fstat(data.fileno()).st_size,
        )
    if text != _signed(saved := _parsed(text)):
        raise tf_bundle.BundleError(f'{path} is damaged: its checksum does not match')
    if not matches_schema(saved, MANIFEST):
        raise tf_bundle.BundleError(f'{path} is no manifest of a checkpoint')
    if saved['index_sha256'] != digest:
        raise tf_bundle.BundleError(
            f'{path} does not belong to {prefix}{INDEX}: one of them is damaged'
        )
    if saved['sizes'][DATA] != size:
        raise tf_bundle.BundleError(
            f'{prefix}{DATA} is damaged: it has {size} of {saved["sizes"][DATA]} bytes'
        )
    return saved['state']


def matches_schema(value: object, schema: Any) -> bool:
    """Whether a JSON `value` has `schema`, which is made of types, and of `range` for whole
    numbers.

    A dict wants these names and values of their forms, a list at least one value and all of its
    schema, a tuple one value of each of its forms.
    """
    if isinstance(schema, dict):
        return isinstance(value, dict) and all(
            name in value and matches_schema(value[name], schema[name]) for name in schema
        )
    if isinstance(schema, list):
        return (
            isinstance(value, list)
            and value != []
            and all(matches_schema(part, schema[0]) for part in value)
        )
    if isinstance(schema, tuple):
        return (
            isinstance(value, list)
            and len(value) == len(schema)
            and all(map(matches_schema, value, schema))
        )
    return (
        type(value) is int and value in schema
        if isinstance(schema, range)
        else isinstance(value, schema)
    )
