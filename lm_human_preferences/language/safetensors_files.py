"""The safetensors that transformers' `save_pretrained` has written, in one file or in several."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError

WEIGHTS = 'model.safetensors'
INDEX = f'{WEIGHTS}.index.json'  # where the weights are in several files


class SavedTensors:
    """The tensors in a directory, local or remote, by the names in its files.

    path: of the only file, else of the directory, for messages. local_path: where its files are on
    this machine, with config.json. UserError for files that are missing or damaged.
    """

    def __init__(self, directory: str) -> None:
        from safetensors import safe_open

        has_index = storage.exists(storage.join(directory, INDEX))
        files = _files_of_index(directory) if has_index else [WEIGHTS]
        self.path = directory if len(files) > 1 else storage.join(directory, files[0])
        self._directory = directory
        self.local_path = _fetched(directory, [*files, INDEX] if has_index else files)
        self._files: dict[str, Any] = {}  # {name of a file: the open file}
        self._places: dict[str, str] = {}  # {name of a tensor: that of its file}
        for name in files:
            with self._damage_is_told(name):
                file: Any = safe_open(os.path.join(self.local_path, name), 'pt')
                self._files[name] = file
                self._places.update(dict.fromkeys(file.keys(), name))

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def numbers(self) -> int:
        """How many numbers all tensors have, which takes reading none of them."""
        slices = (self._files[file].get_slice(name) for name, file in self._places.items())
        return sum(math.prod(each.get_shape()) for each in slices)

    def place(self, name: str) -> str:
        """The path of the file that a tensor is in, for messages."""
        return storage.join(self._directory, self._places[name])

    def read(self, name: str) -> torch.Tensor:
        """The tensor, in the type that it is saved in."""
        with self._damage_is_told(self._places[name]):
            return self._files[self._places[name]].get_tensor(name)

    @contextmanager
    def _damage_is_told(self, name: str) -> Iterator[None]:
        from safetensors import SafetensorError

        try:
            yield
        except (OSError, SafetensorError) as e:
            raise UserError(
                f'{storage.join(self._directory, name)} is damaged or missing: {e}'
            ) from e


def _fetched(directory: str, files: list[str]) -> str:
    """The local directory with these files of `directory`, and with config.json.

    UserError where there are no weights.
    """
    if files == [WEIGHTS] and not storage.exists(storage.join(directory, WEIGHTS)):
        raise UserError(
            f'{directory} has a config.json but no {WEIGHTS}; pickled weights are not read: save it'
            ' again with save_pretrained'
        )
    if not storage.is_remote(directory):
        return directory
    copies = storage.cached_paths(
        [storage.join(directory, name) for name in ('config.json', *files)]
    )
    return os.path.dirname(copies[0])


def _files_of_index(directory: str) -> list[str]:
    """The names of the files with tensors, where there are several."""
    index = storage.join(directory, INDEX)
    content: Any = storage.read_json(index)
    try:
        names = sorted(set(content['weight_map'].values()))
    except (KeyError, AttributeError, TypeError) as e:
        raise UserError(f'{index} is damaged: it maps no tensors to files') from e
    for name in names:
        if not isinstance(name, str) or os.path.basename(name) != name:
            raise UserError(f'{index} names a file elsewhere: {name}')
    return names
