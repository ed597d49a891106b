"""The record of the labels that a reward model learned from: SAVE_DIR/reward_model/labels.json.

Labels are named by a path, and what is there may grow or be replaced. The record says how many they
were and has a digest of them; for a folder of labels also which answers they are. (While a policy
trains, used.jsonl says that of each reward model: online/decisions.py.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError

if TYPE_CHECKING:
    import torch

    from lm_human_preferences.distributed.comm import Comm

MADE_HERE = ('test', 'mock')  # sources whose labels each start of the program makes anew


def record_of(
    source: str, labels: Mapping[str, torch.Tensor], folder: Mapping[str, Any]
) -> dict[str, Any]:
    """The record of `labels` {field: (labels, ...)}, those held out included.

    folder: what is recorded of a folder of labels besides, see labels.folder_labels.to_record.
    """
    return {'source': source, 'labels': len(labels['query']), 'digest': digest(labels), **folder}


def digest(labels: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of labels {field: (labels, ...)}, of their tokens and of what was said of them."""
    found = hashlib.sha256()
    for field in sorted(labels):
        values = labels[field].cpu().contiguous()
        found.update(f'{field} {values.dtype} {tuple(values.shape)}'.encode())
        found.update(values.numpy().tobytes())
    return found.hexdigest()


def read(path: str | None, comm: Comm) -> dict[str, Any] | None:
    """The record that rank 0 finds at `path`, the same on all ranks; None if there is none."""
    record = None
    if path is not None and comm.rank == 0 and storage.exists(path):
        record = storage.read_json(path)
        if not isinstance(record, dict) or not isinstance(record.get('digest'), str):
            raise UserError(f'{path} is no record of labels')
    return comm.all_gather_object(record)[0]


def check(record: Mapping[str, Any], before: Mapping[str, Any] | None, *, is_begun: bool) -> str:
    """What the user should know of labels that are not those of `before`; '' if they are.

    UserError if the training that goes on has learned from some of those: is_begun.
    """
    if before is None or record['digest'] == before['digest'] or record['source'] in MADE_HERE:
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
