"""Record of the labels that a reward model learned from: SAVE_DIR/reward_model/labels.json."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError

if TYPE_CHECKING:
    import torch

    from lm_human_preferences.distributed.comm import Comm


def record_of(
    source: str, labels: Mapping[str, torch.Tensor], folder: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the record of `labels` {field: (labels, ...)}. folder: more on a folder of labels."""
    return {'source': source, 'labels': len(labels['query']), 'digest': digest(labels), **folder}


def digest(labels: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of labels {field: (labels, ...)}."""
    found = hashlib.sha256()
    for field in sorted(labels):
        values = labels[field].cpu().contiguous()
        found.update(f'{field} {values.dtype} {tuple(values.shape)}'.encode())
        found.update(values.numpy().tobytes())
    return found.hexdigest()


def read(path: str | None, comm: Comm) -> dict[str, Any] | None:
    """Return the record that rank 0 finds at `path`, on all ranks; None if there is none."""
    record = None
    if path is not None and comm.rank == 0 and storage.exists(path):
        record = storage.read_json(path)
        if not isinstance(record, dict) or not isinstance(record.get('digest'), str):
            raise UserError(f'{path} is not a record of labels')
    return comm.all_gather_object(record)[0]


def check_same(
    record: Mapping[str, Any], before: Mapping[str, Any] | None, *, is_begun: bool
) -> str:
    """Return a note on labels unlike `before`, or ''; UserError where training has begun."""
    if before is None or record['digest'] == before['digest']:
        return ''
    if is_begun:
        raise UserError(
            f'{record["source"]}: these are not the labels that the run was begun'
            f' with, {before.get("labels")} of {before.get("source")}: restore them, or begin again'
            ' with --overwrite'
        )
    return (
        f'note: the labels have changed since this run was started: {record["labels"]} of'
        f' {record["source"]}, before {before.get("labels")} of {before.get("source")}'
    )
