"""Registry of all data sets by name. To add one, write a module with a generator; list it here."""

import importlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any


@dataclass(frozen=True)
class DatasetInfo:
    """Entry of a data set in the registry."""

    name: str  # value of --task.query_dataset that selects the data set
    summary: str  # description of the data set in docs/options.md
    # A data set's module has generator(mode, seed=0, shuffle=False), for texts of the split `mode`.
    module: str
    downloaded: bool = False  # whether texts are downloaded at first use, unchecked by a dry run
    labels_stand_in: bool = False  # whether queries of a label file replace an unavailable data set
    seed_per_run: bool = False  # whether --run.seed, not --task.query_seed, sets the texts' order
    is_enumerable: bool = False  # whether an evaluation covers every query of the data set
    loaded: Any = None  # object whose function `generator` replaces the one in `module`

    def load(self) -> Any:
        return self.loaded or importlib.import_module(self.module)


# Texts of the experiment `test` are random letters, as in the original's tests.
LETTERS = 'abcdefghijklmnopqrstuvwxyz.'
TEXT_LENGTH = 40  # number of letters in a random text


def _letters(mode: str, seed: int = 0, shuffle: bool = False) -> Iterator[str]:
    """Yield random texts without end; the same seed and split give the same texts."""
    rng = random.Random(f'{mode} {seed}')
    while True:
        yield ''.join(rng.choices(LETTERS, k=TEXT_LENGTH))


_LETTERS = SimpleNamespace(generator=_letters)
_HERE = 'lm_human_preferences.datasets'
_BUILTIN = (
    DatasetInfo(
        'books', 'passages of books', f'{_HERE}.books', downloaded=True, labels_stand_in=True
    ),
    DatasetInfo('cnndm', 'articles of CNN and the Daily Mail', f'{_HERE}.cnndm', downloaded=True),
    DatasetInfo(
        'tldr', 'Reddit posts whose authors added a summary', f'{_HERE}.tldr', downloaded=True
    ),
    DatasetInfo('test', 'random letters, for tests', '', seed_per_run=True, loaded=_LETTERS),
    DatasetInfo(
        'reviews', 'film reviews from a small grammar', f'{_HERE}.reviews', is_enumerable=True
    ),
)
DATASETS = {info.name: info for info in _BUILTIN}


def add(name: str, generator: Callable[..., Iterator[Any]]) -> None:
    """Register a data set whose texts `generator` yields; ValueError if the name is taken."""
    if name in DATASETS:
        raise ValueError(f'a data set named {name!r} is registered already')
    own = SimpleNamespace(generator=generator)
    DATASETS[name] = DatasetInfo(name, 'texts of your own', module='', loaded=own)


def choices() -> str:
    return ', '.join(DATASETS)


def info(name: str) -> DatasetInfo:
    """Return a data set's entry; an unknown name is taken for the path of a query file."""
    if name in DATASETS:
        return DATASETS[name]
    return DatasetInfo(name, 'the strings of a .jsonl file', f'{_HERE}.jsonl')
