"""Digests of the files that a run is given."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from lm_human_preferences.datasets import jsonl

QUERIES, REWARD_MODEL = 'task.query_dataset', 'rewards.trained_model'
_OF_MODEL = ('.json', '.safetensors')  # endings of a model's files


def of_files(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return {option: SHA-256} of local queries and a given classifier, which a resumed run reads.

    Labels and a reward function are recorded where they are read, and the base of adapters beside
    the adapters. Other weights are in the checkpoints.
    """
    found = {}
    for option in (QUERIES, REWARD_MODEL):
        path = settings.get(option)
        if isinstance(path, str) and os.path.isabs(path):  # not a name or a URL
            files = list(_files_at(path))
            if files:
                found[option] = _digest(files)
    return found


def _files_at(path: str) -> Iterator[str]:
    if os.path.isfile(path):
        yield path
        test_part = jsonl.file_of_test_part(path)
        if test_part is not None:
            yield test_part
    elif os.path.exists(os.path.join(path, 'config.json')):
        for name in sorted(os.listdir(path)):
            if name.endswith(_OF_MODEL):
                yield os.path.join(path, name)


def _digest(files: list[str]) -> str:
    found = hashlib.sha256()
    for path in files:
        with open(path, 'rb') as file:
            found.update(hashlib.file_digest(file, 'sha256').digest())
    return found.hexdigest()
