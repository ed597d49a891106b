"""Rewards that read texts, and an adapter that decodes a policy's tokens for such rewards."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch

from lm_human_preferences.language.encodings import Encoding
from lm_human_preferences.language.texts import tokenisers
from lm_human_preferences.ppo import PART

LARGEST = 1e15  # largest allowed score: sums of squares over a batch stay finite in float32


class Texts(NamedTuple):
    """Texts of a query, of a response and of both joined. columns: other fields of the query."""

    query: str
    response: str
    whole: str
    columns: Mapping[str, Any] = MappingProxyType({})


def joined(query: str, response: str, columns: Mapping[str, Any] = MappingProxyType({})) -> Texts:
    """Return Texts for a query and a response; `whole` has a space between them if needed."""
    is_apart = query[-1:].isspace() or response[:1].isspace()
    space = '' if is_apart or not query or not response else ' '
    return Texts(query, response, query + space + response, columns)


class TextScorer(Protocol):
    """Interface of rewards that read texts and, if asks_for_columns, other fields of queries."""

    asks_for_columns: bool = False

    def score(self, texts: Sequence[Texts]) -> torch.Tensor:
        """Return scores (texts,), float32."""
        ...

    def score_and_parts(
        self, texts: Sequence[Texts]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return scores (texts,) and {component: (texts,)}; by default there are no components."""
        return self.score(texts), {}


class TextReward:
    """Adapter that decodes a policy's tokens, and has `scorer` score the texts.

    columns: {padded tokens of a query: its other fields in the query file}.
    """

    blocks = ()

    def __init__(self, scorer: TextScorer, encoding: Encoding, *, chat: bool = False) -> None:
        self.scorer = scorer
        self.encoder = encoding.get_encoder()
        self.padding_token = self.encoder.padding_token
        self.columns: Mapping[tuple[int, ...], Mapping[str, Any]] = {}
        self._reader = tokenisers.for_people(self.encoder, chat)

    def score(self, queries: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
        """Return scores (batch,) of responses (batch, length) to queries; padding is ignored."""
        return self.score_and_stats(queries, responses)[0]

    def score_and_stats(
        self, queries: torch.Tensor, responses: torch.Tensor, states: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return scores (batch,) and their components, {name: (batch,)}. states: not used."""
        rows = zip(queries.tolist(), responses.tolist(), strict=True)
        texts = [self._texts(query, response) for query, response in rows]
        scores, parts = self.scorer.score_and_parts(texts)
        return scores.to(queries.device), {f'{PART}{name}': part for name, part in parts.items()}

    def _texts(self, query: list[int], response: list[int]) -> Texts:
        columns = self.columns.get(tuple(query), {})
        query, response = map(self.encoder.without_padding, (query, response))
        decode = self._reader.decode
        return Texts(decode(query), decode(response), decode(query + response), columns)
