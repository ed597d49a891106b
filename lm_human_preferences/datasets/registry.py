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

    name: str  # value for --task.query_dataset
    summary: str  # description in docs/options.md
    # The module has generator(mode, seed=0, shuffle=False), which yields texts of the split `mode`.
    module: str
    downloaded: bool = False  # whether it is downloaded at first use, so a dry run cannot check it
    labels_stand_in: bool = False  # whether queries of labels may replace lost texts
    seed_per_run: bool = False  # whether the run's seed sets the order, not --task.query_seed
    is_enumerable: bool = False  # whether an evaluation covers all its queries
    loaded: Any = None  # object that has the generator, in place of a module

    def load(self) -> Any:
        return self.loaded or importlib.import_module(self.module)


# Texts of the experiment `test` are random letters, as in the original's tests.
LETTERS = 'abcdefghijklmnopqrstuvwxyz.'
TEXT_LENGTH = 40  # number of letters in a text


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
    """Register a data set. generator: see DatasetInfo.module. ValueError if the name is taken."""
    if name in DATASETS:
        raise ValueError(f'there is a data set {name!r} already')
    own = SimpleNamespace(generator=generator)
    DATASETS[name] = DatasetInfo(name, 'texts of your own', module='', loaded=own)


def choices() -> str:
    return ', '.join(DATASETS)


def info(name: str) -> DatasetInfo:
    """Return a data set's entry; an unknown name is taken for the path of a query file."""
    if name in DATASETS:
        return DATASETS[name]
    return DatasetInfo(name, 'the strings of a .jsonl file', f'{_HERE}.jsonl')
