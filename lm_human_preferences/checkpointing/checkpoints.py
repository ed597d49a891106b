"""Checkpoints in the original's format; a crash at any moment loses no complete checkpoint.

`latest` is the last checkpoint in the list, as in TensorFlow. `latest_resumable` is the last intact
checkpoint with a manifest. They differ after a save in the middle of a step, or after a kill.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
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
from lm_human_preferences.errors import UserError, os_errors_as

if TYPE_CHECKING:
    import numpy as np
    import torch

SIZE_OF_OTHER_FILES = 1 << 20  # upper bound in bytes for the index and manifest of a checkpoint


def latest(directory: str) -> str | None:
    """Return the prefix of the last checkpoint that a local directory lists, or None."""
    names = _listed(directory)
    return os.path.join(directory, names[-1]) if names else None


def _listed(directory: str) -> list[str]:
    """Return the names of existing checkpoints in the list of `directory`, the latest last."""
    path = os.path.join(directory, LIST)
    try:
        with os_errors_as(f'{path} cannot be read'):
            text = Path(storage.cached_path(path)).read_text(encoding='utf-8', errors='replace')
    except storage.NotFound:
        return []
    names = parse_checkpoint_file(text)
    return [name for name in names if os.path.exists(os.path.join(directory, f'{name}{INDEX}'))]


def check_disk_space(directory: str, saves: int, size: int, max_to_keep: int) -> None:
    """Raise UserError if the disk lacks room for `saves` checkpoints of `size` bytes each."""
    # The oldest checkpoint is deleted only after the newest is written: leave room for one more.
    count = max(0, min(saves, max_to_keep + 1) - len(_listed(directory)))
    free = storage.free_bytes(directory)
    if free < count * size:
        raise UserError(
            f'--save_dir: {directory} has {free >> 20} MiB free, but {count} checkpoints will take '
            f'{count * size >> 20} MiB: make room, or raise --run.save_interval'
        )


def size_of(tensors: Mapping[str, np.ndarray | torch.Tensor]) -> int:
    """Return the number of bytes on disk of a checkpoint of `tensors`."""
    return sum(getattr(tensor, 'nbytes', 8) for tensor in tensors.values()) + SIZE_OF_OTHER_FILES


def save(
    directory: str,
    name: str,
    tensors: Mapping[str, np.ndarray | torch.Tensor],
    *,
    state: Any = None,
    max_to_keep: int = 20,
) -> str:
    """Save a checkpoint, list it as the latest, delete the oldest; return the new one's prefix.

    name: model.ckpt, or model.ckpt-STEP. UserError, with nothing changed, if it cannot be written.
    """
    assert re.fullmatch(NAME, name), name
    prefix = os.path.join(directory, name)
    try:
        os.makedirs(directory, exist_ok=True)
        before = _listed(directory)
        others = [other for other in before if other != name]
        keep = [*others, name][-max_to_keep:]
        try:
            write_bundle(prefix, tensors, state)
            _commit(directory, keep)
        except BaseException:
            _delete(directory, {name} - set(before))
            raise
        # Delete old checkpoints, and unlisted ones with a resume.json, which a killed run has left.
        _delete(directory, {*resumable(directory), *before} - set(keep))
    except OSError as e:
        need = f'it needs {size_of(tensors) >> 20} MiB'
        raise UserError(f'cannot save {name} in {directory}: {e.strerror}; {need}') from e
    return prefix


def write_bundle(
    prefix: str,
    tensors: Mapping[str, np.ndarray | torch.Tensor],
    state: Any = None,
) -> None:
    """Write all files of a checkpoint or none; if `state` is given, also write it to a manifest."""
    manifests = [f'{prefix}{RESUME}'] if state is not None else []
    targets = [*manifests, f'{prefix}{DATA}', f'{prefix}{INDEX}']
    with storage.atomic_write(*targets) as (*manifest_files, data, index):
        table = tf_bundle.write_values(data, tensors)
        index.write(table)
        for file in manifest_files:
            manifest = {'sha256': _digest(table, state), 'state': state}
            file.write(json.dumps(manifest).encode())


def _digest(index: bytes, state: Any) -> str:
    return hashlib.sha256(index + json.dumps(state).encode()).hexdigest()


def _commit(directory: str, keep: Sequence[str]) -> None:
    """Replace the list of checkpoints by `keep`; from then on, readers see the new checkpoint."""
    with storage.atomic_write(os.path.join(directory, LIST)) as (file,):
        file.write(format_checkpoint_file(keep))


def _delete(directory: str, names: Collection[str]) -> None:
    """Delete the files of the checkpoints `names`, and partial files of killed processes."""
    # In sorted order, resume.json goes last, so that the next save finds half-deleted checkpoints.
    for file in sorted(os.listdir(directory)):
        match = FILE.fullmatch(file)
        if LEFTOVER.fullmatch(file) or (match and match[1] in names):
            os.remove(os.path.join(directory, file))


def latest_resumable(directory: str) -> tuple[str, Any] | None:
    """Return (prefix, state) of the last intact checkpoint; UserError if all are damaged."""
    damaged = False
    for name in resumable(directory):
        prefix = os.path.join(directory, name)
        if not os.path.exists(prefix + INDEX):  # a save that was killed leaves no index
            continue
        try:
            return prefix, _verify(prefix)
        except UserError as e:
            print(f'WARNING: {prefix} is skipped: {e}')
            damaged = True
    if damaged:
        raise UserError(f'no checkpoint in {directory} is intact: begin again with --overwrite')
    return None


def _verify(prefix: str) -> Any:
    """Return the state of a checkpoint; UserError if any of its files is damaged."""
    state = restore_state(prefix)
    bundle = tf_bundle.Bundle(prefix)
    for name in bundle:
        _ = bundle[name]  # reading a tensor checks its CRC
    return state


def discard_after(directory: str, name: str) -> None:
    """List `name` as the latest checkpoint in `directory`; delete checkpoints of later steps."""
    before = _listed(directory)
    earlier = [other for other in before if step_of(other) < step_of(name)]
    keep = [*earlier, name]
    if keep != before:
        _commit(directory, keep)
        _delete(directory, {*resumable(directory), *before} - set(keep))


def restore_state(prefix: str) -> Any:
    """Return a checkpoint's state, None without a manifest; BundleError if a file is damaged."""
    path = prefix + RESUME
    if not os.path.exists(path):
        return None
    with tf_bundle.open_file(path) as manifest_file, tf_bundle.open_file(prefix + INDEX) as index:
        try:
            manifest = json.load(manifest_file)
            if 'index_sha256' in manifest:  # the manifest is of an earlier version
                found = hashlib.sha256(index.read()).hexdigest()
                is_whole = 'state' in manifest and manifest['index_sha256'] == found
            else:
                is_whole = manifest['sha256'] == _digest(index.read(), manifest['state'])
        except (ValueError, KeyError, TypeError, RecursionError):
            is_whole = False
    if not is_whole:
        raise tf_bundle.BundleError(f'{path} is damaged, or does not belong to {prefix}{INDEX}')
    return manifest['state']
