"""Paths among the settings of a run: absolute, and with digests of what was there at its start."""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from lm_human_preferences import storage
from lm_human_preferences.datasets import jsonl, registry

INITIAL_MODEL = 'task.policy.initial_model'  # what settings that name it end with
QUERIES, REWARD_MODEL = 'task.query_dataset', 'rewards.trained_model'
# Options whose values are paths, or names where there is nothing of that name, end so.
_PATHS = (
    INITIAL_MODEL,
    QUERIES,
    REWARD_MODEL,
    'labels.source',
    'rewards.function',
    'online.instructions',
    'serve.certificate',
    'serve.key',
)
_NO_PATHS = {*registry.DATASETS, 'mock', 'test'}
_OF_MODEL = ('.json', '.safetensors')  # what the files of a model end with


def absolute(option: str, value: Any, folder: str) -> Any:
    """Return the value of an option, the path of what is in `folder` as an absolute one."""
    if not isinstance(value, str) or storage.is_remote(value) or value in _NO_PATHS:
        return value
    path = os.path.normpath(os.path.join(folder, value))
    is_there = os.path.exists(re.sub(r'(?<=\.py):\w+$', '', path))  # a function follows its file
    return path if option.endswith(_PATHS) and is_there else value


def digests(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return {option: SHA-256} of the local queries and of a given reward model.

    What else a run reads is recorded elsewhere: labels and a reward function by those who read
    them, the base of adapters beside them, and other weights in its checkpoints.
    """
    found = {}
    for option in (QUERIES, REWARD_MODEL):
        path = settings.get(option)
        if not isinstance(path, str) or storage.is_remote(path) or path in _NO_PATHS:
            continue
        files = list(_files_at(path))
        if files:
            found[option] = _digest(files)
    return found


def changed(recorded: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """Return the options whose files have other digests than those `recorded`."""
    now = digests(settings)
    return [option for option in now.keys() & recorded if now[option] != recorded[option]]


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
