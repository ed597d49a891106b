"""All data sets by name, and what is special about each.

To add a data set, write its generator in a module of this package and list it here: the help of
`--task.query_dataset`, error messages, docs/options.md and every special treatment follow from
its entry. Reading this module loads no other: a generator is imported when its data set is first
used, because `--help` needs the names only.
"""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DatasetInfo:
    """One data set.

    name: what `--task.query_dataset` calls it.
    summary: what its texts are, for the table in docs/options.md.
    generator: 'module:function' of a function (mode, seed=0, shuffle=False) that yields texts of
        the part `mode`: train, valid or test.
    downloaded: its files are fetched when they are first used, so a dry run cannot check them.
    labels_stand_in: the generator also takes `labels`, the path of a label file. It yields that
        file's queries (lists of token ids) if its own files cannot be had.
    seed_per_run: each run reads it in another order; all others are read in the order of seed 0, as
        in the original.
    file: 'module:function' of a function that gives, for a part, the URL of the file that is read
        first, unless it can be done without.
    queries: 'module:function' of a function that lists all queries, if they are few and equally
        frequent; an evaluation then covers every one of them.
    """

    name: str
    summary: str
    generator: str
    downloaded: bool = False
    labels_stand_in: bool = False
    seed_per_run: bool = False
    file: str | None = None
    queries: str | None = None

    def load_generator(self) -> Callable[..., Iterator[str | list[int]]]:
        """The generator function."""
        return _load(self.generator)

    def first_file(self, mode: str) -> str | None:
        """The URL of the file that the part `mode` begins with; None where none is needed."""
        return None if self.file is None else _load(self.file)(mode)

    @property
    def is_enumerable(self) -> bool:
        """Whether `all_queries` can list every query."""
        return self.queries is not None

    def all_queries(self) -> list[str] | None:
        """Every query of the data set; None if there are too many to list."""
        return None if self.queries is None else _load(self.queries)()


def _load(path: str) -> Any:
    module, _, function = path.partition(':')
    return getattr(importlib.import_module(module), function)


_BUILTIN = (
    DatasetInfo(
        'books',
        'passages of books',
        'lm_human_preferences.datasets.books:books_generator',
        downloaded=True,
        labels_stand_in=True,
    ),
    DatasetInfo(
        'cnndm',
        'articles of CNN and the Daily Mail',
        'lm_human_preferences.datasets.cnndm:cnndm_generator',
        downloaded=True,
        file='lm_human_preferences.datasets.cnndm:list_url',
    ),
    DatasetInfo(
        'tldr',
        'Reddit posts whose authors added a summary',
        'lm_human_preferences.datasets.tldr:tldr_generator',
        downloaded=True,
        file='lm_human_preferences.datasets.tldr:posts_url',
    ),
    DatasetInfo(
        'test',
        'random letters, for tests',
        'lm_human_preferences.datasets.letters:letters_generator',
        seed_per_run=True,
    ),
    DatasetInfo(
        'reviews',
        'film reviews from a small grammar',
        'lm_human_preferences.datasets.reviews:reviews_generator',
        queries='lm_human_preferences.datasets.reviews:queries',
    ),
)
DATASETS = {info.name: info for info in _BUILTIN}


def choices() -> str:
    """The names of all data sets, for help and error messages."""
    return ', '.join(DATASETS)


def info(name: str) -> DatasetInfo:
    """The entry of the data set `name`; any other name is taken for a .jsonl file."""
    if name in DATASETS:
        return DATASETS[name]
    return DatasetInfo(
        name,
        'the strings of a .jsonl file',
        'lm_human_preferences.datasets.jsonl:jsonl_generator',
    )
