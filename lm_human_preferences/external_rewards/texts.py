"""Rewards that read texts, asked about tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from lm_human_preferences.language import tokenisers
from lm_human_preferences.language.encodings import Encoding


class Texts(NamedTuple):
    """A query and a response as people read them. whole: the one text that they are together."""

    query: str
    response: str
    whole: str


def joined(query: str, response: str) -> Texts:
    """The texts of a query and a response that were written apart: a space is put between words."""
    is_apart = query[-1:].isspace() or response[:1].isspace()
    space = '' if is_apart or not query or not response else ' '
    return Texts(query, response, query + space + response)


class TextScorer(Protocol):
    """What a reward is that reads texts."""

    def score(self, texts: Sequence[Texts]) -> torch.Tensor:
        """Scores (texts,), float32; UserError where there are none."""
        ...


class TextReward:
    """A reward that reads texts, for a policy whose tokens are of `encoding`.

    Its score is that of the response as it is scored, without what the task cuts off. chat: whether
    the policy answers in a chat, whose marks people do not read.
    """

    def __init__(self, scorer: TextScorer, encoding: Encoding, *, chat: bool = False) -> None:
        self.scorer = scorer
        self.encoder = encoding.get_encoder()
        self.padding_token = self.encoder.padding_token
        self._reader = tokenisers.reader(self.encoder, chat)

    def score(self, queries: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
        """Scores (batch,) of responses to queries.

        queries: (batch, query_length). responses: (batch, response_length). Padding is not read.
        """
        rows = zip(queries.tolist(), responses.tolist(), strict=True)
        texts = [self._texts(query, response) for query, response in rows]
        return self.scorer.score(texts).to(queries.device)

    def parameters_by_name(self) -> dict[str, torch.nn.Parameter]:
        """Nothing: this reward is not part of a checkpoint."""
        return {}

    def _texts(self, query: list[int], response: list[int]) -> Texts:
        query, response = self._unpadded(query), self._unpadded(response)
        decode = self._reader.decode
        return Texts(decode(query), decode(response), decode(query + response))

    def _unpadded(self, tokens: list[int]) -> list[int]:
        return [token for token in tokens if token != self.padding_token]
