"""Data sets by name, and queries (lists of token ids) made from their texts."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from lm_human_preferences import storage
from lm_human_preferences.datasets import messages, registry
from lm_human_preferences.errors import OptionError, UserError
from lm_human_preferences.language import encodings
from lm_human_preferences.language.encodings import Encoder
from lm_human_preferences.language.texts.chat import ChatTemplate, Contexts
from lm_human_preferences.language.texts.tokenisers import unnamed_ids_are_of_gpt2
from lm_human_preferences.utils.original_names import explain_missing

if TYPE_CHECKING:
    from lm_human_preferences.distributed.comm import Comm

USED, CUT = 'used', 'cut'  # how a text becomes a query: the whole text is used, or it is cut
COUNTED_CHARACTERS = 4_000_000  # GPT-2's encoder needs about a second for 4 million characters


@dataclasses.dataclass(frozen=True)
class QueryRules:
    """Rules to make queries of at most `length` tokens from the texts in a split of a data set.

    A query begins after the text's first start token and ends with the last end token within
    `length`, if these are set. A text is left out if it lacks one of them, if `contexts` has no
    context for its query, or if the query is empty and not `allow_empty`. With a chat template,
    dialogues are never cut.
    """

    length: int
    mode: str
    encoder: Encoder
    seed: int = 0
    shuffle: bool = True
    start_token: int | None = None
    end_token: int | None = None
    allow_empty: bool = True
    contexts: Contexts | None = None

    def query_of(self, text: str | list[int]) -> tuple[list[int], str]:
        """Return (query, 'used' or 'cut') for a text; ([], reason) for a text that is left out."""
        start, end = self.start_token, self.end_token
        if isinstance(text, str):
            tokens = self.encoder.encode(text)
            if isinstance(self.contexts, ChatTemplate) and messages.is_dialogue(text):
                start = end = None
        else:
            tokens = _label_query(text, self.encoder)
            start = None  # text up to the start token is already removed from a label's query
        begun = tokens
        if start is not None:
            if start not in tokens:
                return [], 'no_start'
            # As in the original, a text is used whole if nothing follows its first start token.
            begun = tokens[tokens.index(start) + 1 :] or tokens
        ended = begun[: self.length]
        if end is not None:
            while ended and ended[-1] != end:
                ended.pop()
            if not ended:
                return [], 'no_end'
        if not ended and not self.allow_empty:
            return [], 'empty'
        problem = None if self.contexts is None else self.contexts.problem(tokens, ended)
        if problem is not None:
            return [], problem
        return ended, CUT if len(ended) < len(tokens) else USED


@dataclasses.dataclass
class Dataset:
    """One data set; `generator(mode, seed=0, shuffle=False)` yields the texts of the split `mode`.

    is_file: whether the texts are in a user's file; its generator also takes `seen` (see jsonl).
    texts_read: number of texts read in this epoch. is_new: whether to register the name, as the
    original does, so that `--task.query_dataset` accepts it.
    """

    name: str
    generator: Callable[..., Iterator[str] | Iterator[str | list[int]]]
    is_file: bool = False
    texts_read: int = 0
    is_new: dataclasses.InitVar[bool] = True

    def __post_init__(self, is_new: bool) -> None:
        if is_new:
            registry.add(self.name, self.generator)

    def sequences(
        self,
        rules: QueryRules,
        *,
        comm: Comm | None = None,
        repeat_count: int | None = None,
        skip: tuple[int, int] = (0, 0),
    ) -> Iterator[list[int]]:
        """Yield queries, padded on the right to `rules.length` ids (tf_dataset in the original).

        All `repeat_count` epochs (None: endless, until an epoch has no query) have the same order.
        Rank r of n takes every n-th query, beginning with query r. skip: numbers of texts of the
        first epoch, and of queries after these texts, to skip when a run resumes.
        """
        texts_to_skip, sequences_to_skip = skip
        rank = comm.rank if comm else 0
        size = comm.size if comm else 1
        everything = self._epochs(rules, repeat_count, texts_to_skip)
        return itertools.islice(everything, sequences_to_skip + rank, None, size)

    def _epochs(
        self, rules: QueryRules, count: int | None, texts_to_skip: int
    ) -> Iterator[list[int]]:
        """Yield the queries of `count` epochs or, without `count`, until an epoch has no query."""
        first = texts_to_skip
        for _ in itertools.count() if count is None else range(count):
            is_empty = first == 0  # a resumed epoch may have no text left
            self.texts_read = first
            for text in itertools.islice(self._texts(rules), first, None):
                self.texts_read += 1
                tokens, use = rules.query_of(text)
                if use in (USED, CUT):
                    is_empty = False
                    yield tokens + [rules.encoder.padding_token] * (rules.length - len(tokens))
            if is_empty:
                return
            first = 0

    def usage(self, rules: QueryRules) -> tuple[collections.Counter[str], bool]:
        """Return how many texts of a split are used, cut or left out, and whether all were counted.

        Counting ends after COUNTED_CHARACTERS. Keys: 'texts' (all), USED, CUT, reasons of the rest.
        """
        usage: collections.Counter[str] = collections.Counter()
        characters = 0
        for text in self._texts(rules):
            if characters > COUNTED_CHARACTERS:
                return usage, False
            characters += len(text)
            usage.update(['texts', rules.query_of(text)[1]])
        return usage, True

    def _texts(self, rules: QueryRules) -> Iterator[str] | Iterator[str | list[int]]:
        """Return the texts of a split; in a user's file, texts with the same query share a split.

        The query of an uncut text is the text itself here, even if its tokens decode differently.
        """

        def seen(text: str) -> str:
            tokens, use = rules.query_of(text)
            return rules.encoder.decode(tokens) if use == CUT else text

        more = {'seen': seen} if self.is_file else {}
        return self.generator(rules.mode, seed=rules.seed, shuffle=rules.shuffle, **more)


def _label_query(tokens: list[int], encoder: Encoder) -> list[int]:
    """Return a label's query without padding, as ids of `encoder`; UserError for an invalid id."""
    own = encodings.Main.get_encoder() if unnamed_ids_are_of_gpt2(encoder) else encoder
    n_tokens = own.padding_token if own.eot_token is None else own.eot_token + 1
    query = own.without_padding(tokens)
    if not all(0 <= token < n_tokens for token in query):
        raise UserError(f'a query of the label file has token ids outside of 0 to {n_tokens - 1}')
    return query if own is encoder else encoder.encode(own.decode(query))


def get_dataset(name: str, labels: str | None = None) -> Dataset:
    """Return a data set by its name or file. labels: label file to use if the download fails."""
    info = registry.info(name)
    generator = info.load().generator
    if name in registry.DATASETS:
        if info.labels_stand_in:
            generator = functools.partial(generator, labels=labels)
        return Dataset(name, generator, is_new=False)
    if not str(name).endswith('.jsonl') and not storage.is_table(str(name)):
        raise UserError(
            f'--task.query_dataset {name}: choose {registry.choices()} or a .jsonl or .csv file'
            ' of texts'
        )
    try:
        storage.cached_path(name)
    except storage.NotFound as e:
        raise OptionError(f'--task.query_dataset cannot be read: {e}') from e
    return Dataset(name, functools.partial(generator, name), is_file=True, is_new=False)


explain_missing(__name__)
