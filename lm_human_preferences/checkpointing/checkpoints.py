"""Checkpoints in the original's format, written so that a crash at any moment loses none of them.

names.py lists the files of a checkpoint. The original program reads these directories as its own,
and nothing in them can execute.

Which checkpoint is the last one depends on who asks. `latest` is what the list says, as TensorFlow
reads it: sampling, evaluation and another training start from there. `latest_resumable` is the last
one with a manifest whose every byte is verified: a training that was interrupted goes on from
there. They differ where a checkpoint was saved in the midst of a step (it has no manifest), where a
kill came between a checkpoint and the list (it is not in the list yet), and where the last one is
damaged.
"""

from __future__ import annotations

import dataclasses
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
from lm_human_preferences.checkpointing.names import (
    DATA,
    FILE,
    INDEX,
    LEFTOVER,
    LIST,
    NAME,
    RESUME,
    format_checkpoint_file,
    parse_checkpoint_file,
    resumable,
    step_of,
)
from lm_human_preferences.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    import torch

SIZE_OF_OTHER_FILES = 1 << 20  # bytes: more than all of a checkpoint but its values takes
COUNT = range(2**63)
MANIFEST = {'index_sha256': str, 'sizes': {INDEX: COUNT, DATA: COUNT}, 'state': object}


def latest(directory: str) -> str | None:
    """The prefix of the checkpoint that a local directory lists last, None where there is none."""
    names = _listed(directory)
    return os.path.join(directory, names[-1]) if names else None


def _listed(directory: str) -> list[str]:
    """Names of the checkpoints that `directory` lists and has, the latest last."""
    path = os.path.join(directory, LIST)
    try:
        with open(storage.cached_path(path), encoding='utf-8', errors='replace') as f:
            names = parse_checkpoint_file(f.read())
    except storage.NotFound:
        return []
    except OSError as e:
        raise UserError(f'{path} cannot be read: {e.strerror}') from e
    return [name for name in names if os.path.exists(os.path.join(directory, f'{name}{INDEX}'))]


@dataclasses.dataclass(frozen=True)
class Planned:
    """What a training will save in `directory`: so many checkpoints in all, of `size` bytes each.

    max_to_keep: how many of them are kept at a time.
    """

    directory: str
    saves: int
    size: int
    max_to_keep: int = 20

    def to_come(self) -> int:
        """How many more than now there will be at a time."""
        # The new one is written before the oldest is deleted.
        at_a_time = min(self.saves, self.max_to_keep + 1)
        return max(0, at_a_time - len(_listed(self.directory)))


def check_disk_space(*planned: Planned) -> None:
    """UserError unless the disk of the first has room for all that will be kept at a time."""
    count = sum(each.to_come() for each in planned)
    need = sum(each.to_come() * each.size for each in planned)
    directory = planned[0].directory
    while not os.path.exists(directory):
        directory = os.path.dirname(directory) or '.'
    free = shutil.disk_usage(directory).free
    if free < need:
        raise UserError(
            f'--save_dir: {directory} has {free >> 20} MiB free, but {count} checkpoints will take '
            f'{need >> 20} MiB: make room, or raise --run.save_interval'
        )


def size_of(tensors: Mapping[str, np.ndarray | torch.Tensor]) -> int:
    """Bytes that a checkpoint of `tensors` takes."""
    return sum(getattr(tensor, 'nbytes', 8) for tensor in tensors.values()) + SIZE_OF_OTHER_FILES


def save(
    directory: str,
    name: str,
    tensors: Mapping[str, np.ndarray | torch.Tensor],
    *,
    state: Any = None,
    max_to_keep: int = 20,
) -> str:
    """Save a checkpoint, list it as the latest, delete the oldest beyond `max_to_keep`.

    Returns its prefix. name: 'model.ckpt', or 'model.ckpt-N' for step N. tensors: {variable name:
    array or torch tensor}, converted and written one at a time. state: what else to keep, as JSON,
    for `restore_state`. UserError if the directory cannot be written or the disk is full; what was
    there is then as it was.
    """
    assert re.fullmatch(NAME, name), name
    prefix = os.path.join(directory, name)
    need = size_of(tensors)
    free = 'free space unknown'
    try:
        os.makedirs(directory, exist_ok=True)
        free_bytes = shutil.disk_usage(directory).free
        free = f'{free_bytes >> 20} MiB are free'
        if free_bytes < need:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        before = _listed(directory)
        others = [other for other in before if other != name]
        keep = [*others, name][-max_to_keep:]
        try:
            write_bundle(prefix, tensors, state)
            _commit(directory, keep)
        except BaseException:
            _delete(directory, {name} - set(before))
            raise
        # Only this program writes resume.json: one that is not listed is a killed run's.
        _delete(directory, {*resumable(directory), *before} - set(keep))
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
    """Write the checkpoint `prefix` byte for byte as tf.train.Saver does: all of it, or nothing.

    With a `state`, the manifest is written beside it: the state, the sizes of both files and the
    digest of the index, which holds the checksum of every tensor.
    """
    manifests = [f'{prefix}{RESUME}'] if state is not None else []
    targets = [*manifests, f'{prefix}{DATA}', f'{prefix}{INDEX}']
    with storage.atomic_write(*targets) as (*manifest_files, data, index):
        table = tf_bundle.write_values(data, tensors)
        index.write(table)
        for file in manifest_files:
            manifest = {
                'index_sha256': hashlib.sha256(table).hexdigest(),
                'sizes': {INDEX: len(table), DATA: data.tell()},
                'state': state,
            }
            file.write(_sign(manifest))


def _sign(value: dict[str, Any]) -> bytes:
    """JSON of `value` that begins with the digest of the rest: no byte can change unnoticed."""
    rest = json.dumps(value)[1:].encode()
    return b'{"sha256": "%s", ' % hashlib.sha256(rest).hexdigest().encode() + rest


def _parse_signed(text: bytes) -> dict[str, Any]:
    """The value that `_sign` got; {} or another value if `text` is not what it returned."""
    try:
        signed = json.loads(text)
        return {name: value for name, value in signed.items() if name != 'sha256'}
    except (ValueError, AttributeError, RecursionError):
        return {}


def _commit(directory: str, keep: Sequence[str]) -> None:
    """Replace the list of checkpoints."""
    with storage.atomic_write(os.path.join(directory, LIST)) as (file,):
        file.write(format_checkpoint_file(keep))


def _delete(directory: str, names: Collection[str]) -> None:
    """Delete the files of the checkpoints `names`, and what killed runs left half written."""
    # Sorted, the resume.json comes last: if a kill interrupts this, it leads here again.
    for file in sorted(os.listdir(directory)):
        match = FILE.fullmatch(file)
        if LEFTOVER.fullmatch(file) or (match and match[1] in names):
            os.remove(os.path.join(directory, file))


def latest_resumable(directory: str, schema: Any = dict) -> tuple[str, Any] | None:
    """(prefix, state) of the last checkpoint in a local directory that a run can go on from.

    Every byte is verified, and that the state has `schema`, see `matches_schema`. One that fails is
    passed over with a warning. None if there is no checkpoint; UserError if none is whole.
    """
    # The index is the last of its files to appear.
    prefixes = []
    for name in resumable(directory):
        prefix = os.path.join(directory, name)
        if os.path.exists(prefix + INDEX):
            prefixes.append(prefix)
    for prefix in prefixes:
        try:
            return prefix, _verify(prefix, schema)
        except UserError as e:
            print(f'WARNING: {prefix} is passed over: {e}')
    if prefixes:
        raise UserError(f'no checkpoint in {directory} is whole: begin again with --overwrite')
    return None


def _verify(prefix: str, schema: Any) -> Any:
    """The state of the checkpoint `prefix`; UserError unless all of its files are whole."""
    state = restore_state(prefix)
    if not matches_schema(state, schema):
        raise UserError(f'{prefix}{RESUME} does not hold the state of such a run')
    bundle = tf_bundle.Bundle(prefix)
    for name in bundle:
        _ = bundle[name]  # checks its CRC
    return state


def discard_after(directory: str, name: str) -> None:
    """List `name` as the latest checkpoint in `directory`, and delete those of later steps."""
    before = _listed(directory)
    keep = []
    for other in before:
        if other != name and step_of(other) < step_of(name):
            keep.append(other)
    keep.append(name)
    if keep != before:
        _commit(directory, keep)
        _delete(directory, {*resumable(directory), *before} - set(keep))


def restore_state(prefix: str) -> Any:
    """The `state` saved with the checkpoint `prefix`, None where there is none.

    BundleError if it, the index or the size of the data is not what was saved. Values are not read.
    """
    path = prefix + RESUME
    if not os.path.exists(path):
        return None
    with (
        tf_bundle.open_file(path) as manifest_file,
        tf_bundle.open_file(prefix + INDEX) as index,
        tf_bundle.open_file(prefix + DATA) as data,
    ):
        text = manifest_file.read()
        digest = hashlib.sha256(index.read()).hexdigest()
        size = os.fstat(data.fileno()).st_size
    manifest = _parse_signed(text)
    if text != _sign(manifest):
        raise tf_bundle.BundleError(f'{path} is damaged: its checksum does not match')
    if not matches_schema(manifest, MANIFEST):
        raise tf_bundle.BundleError(f'{path} is no manifest of a checkpoint')
    if manifest['index_sha256'] != digest:
        raise tf_bundle.BundleError(
            f'{path} does not belong to {prefix}{INDEX}: one of them is damaged'
        )
    expected = manifest['sizes'][DATA]
    if size != expected:
        raise tf_bundle.BundleError(f'{prefix}{DATA} is damaged: it has {size} of {expected} bytes')
    return manifest['state']


def matches_schema(value: object, schema: Any) -> bool:
    """Whether a JSON `value` has `schema`, which is made of types, and of `range` for integers.

    A dict requires its names, with values that match; a list at least one value, and that all match
    its only schema; a tuple as many values, each of which matches its own schema.
    """
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            return False
        return all(
            name in value and matches_schema(value[name], part) for name, part in schema.items()
        )
    if isinstance(schema, list):
        if not isinstance(value, list) or not value:
            return False
        return all(matches_schema(part, schema[0]) for part in value)
    if isinstance(schema, tuple):
        if not isinstance(value, list) or len(value) != len(schema):
            return False
        return all(map(matches_schema, value, schema))
    if isinstance(schema, range):
        return type(value) is int and value in schema  # True is no integer here
    return isinstance(value, schema)
