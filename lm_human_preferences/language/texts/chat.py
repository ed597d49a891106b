"""Contexts, the inputs of a policy: queries in a chat template, or between prefix and suffix.

Contexts have the tokens that transformers makes. Only the policy reads them.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from lm_human_preferences.datasets import messages
from lm_human_preferences.datasets.messages import Message
from lm_human_preferences.errors import UserError
from lm_human_preferences.language.encodings import Encoder
from lm_human_preferences.language.texts.tokenisers import TokeniserEncoder
from lm_human_preferences.utils.rendering import TemplateError, render

# A query inside a chat template may take about this many tokens more than it takes alone.
SLACK = 4
TOO_LONG, REFUSED = 'too_long', 'refused'


class Contexts(ABC):
    """A policy's inputs (contexts), made from queries of at most `query_length` tokens."""

    def __init__(
        self, encoder: TokeniserEncoder, prefix: str, suffix: str, query_length: int
    ) -> None:
        self.encoder, self.prefix, self.suffix = encoder, prefix, suffix
        self.context = functools.lru_cache(maxsize=1024)(self._context)
        one = tuple(encoder.encode('a'))
        self.overhead = len(self.context(one)) - len(one) + SLACK
        self.length = query_length + self.overhead

    @abstractmethod
    def _context(self, query: tuple[int, ...]) -> list[int]:
        """Return the context's tokens for an unpadded query; UserError if it cannot be made."""

    def problem(self, whole: Sequence[int], query: Sequence[int]) -> str | None:
        """Return why a query cannot be used: TOO_LONG or REFUSED; otherwise None.

        whole: the query before it was cut.
        """
        try:
            context = self.context(tuple(query))
        except UserError:
            return REFUSED
        return TOO_LONG if len(context) > self.length else None

    def contexts(self, queries: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return contexts for `queries`, padded to `length`; UserError if a query is too long."""
        padding = self.encoder.padding_token
        rows = []
        for query in queries:
            row = self.context(tuple(self.encoder.without_padding(query)))
            if len(row) > self.length:
                raise UserError(
                    f'a query in its chat template has {len(row)} tokens, but at most {self.length}'
                    ' are allowed: shorten the query'
                )
            rows.append(row + [padding] * (self.length - len(row)))
        return rows


class WholeTexts(Contexts):
    """Contexts that join prefix, query and suffix into one text, with a space before the text."""

    def _context(self, query: tuple[int, ...]) -> list[int]:
        text = f'{self.prefix}{self.encoder.decode(query)}{self.suffix}'
        return self.encoder.encode_whole(text)


class ChatTemplate(Contexts):
    """Contexts formatted by a tokeniser's chat template; UserError if there is none or it fails."""

    def __init__(self, encoder: Encoder, prefix: str, suffix: str, query_length: int) -> None:
        if not isinstance(encoder, TokeniserEncoder):
            raise UserError('--task.chat: the model has no chat template; leave --task.chat off')
        self._reader = encoder.with_special_tokens()
        super().__init__(encoder, prefix, suffix, query_length)

    def render(self, dialogue: Sequence[Message], **settings: Any) -> str:
        """Render messages as text; UserError if that fails. settings: see apply_chat_template."""
        try:
            return render(self.encoder.own, dialogue, **settings)
        except ValueError as e:
            raise UserError(
                '--task.chat: the model has no default chat template: use a chat model, or leave'
                ' --task.chat off'
            ) from e
        except TemplateError as e:
            raise UserError(f'--task.chat: the chat template of the model fails: {e}') from e

    def _context(self, query: tuple[int, ...]) -> list[int]:
        """Return the tokens of a query in the chat template, up to where the response begins."""
        dialogue = messages.as_messages(self.encoder.decode(query))
        if len(dialogue) == 1 and dialogue[0]['role'] == messages.USER:
            content = f'{self.prefix}{dialogue[0]["content"]}{self.suffix}'
            dialogue = [{'role': messages.USER, 'content': content}]
        last = dialogue[-1]
        if len(dialogue) > 1 and last['role'] == messages.ASSISTANT and not last['content'].strip():
            dialogue.pop()  # the policy writes the answer in place of this empty message
        goes_on = dialogue[-1]['role'] == messages.ASSISTANT
        return self._reader.encode_whole(
            self.render(dialogue, add_generation_prompt=not goes_on, continue_final_message=goes_on)
        )

    @functools.cached_property
    def ends(self) -> frozenset[int]:
        """Return a set with the token by which the template ends an answer, or an empty set."""
        answer = 'lm-human-preferences'  # a text that is easy to find in the rendered dialogue
        dialogue = [
            {'role': messages.USER, 'content': 'a'},
            {'role': messages.ASSISTANT, 'content': answer},
        ]
        after = self.render(dialogue).rpartition(answer)[2]
        added = self.encoder.own.backend_tokenizer.get_added_tokens_decoder()
        return frozenset(
            [token for token in self._reader.encode_whole(after) if token in added][:1]
        )

    def problem(self, whole: Sequence[int], query: Sequence[int]) -> str | None:
        """Return why a query cannot be used, or None; a dialogue that was cut is TOO_LONG."""
        # 16 tokens are enough to see the role with which a dialogue begins.
        if len(query) < len(whole) and messages.is_dialogue(self.encoder.decode(whole[:16])):
            return TOO_LONG
        return super().problem(whole, query)


@functools.lru_cache(maxsize=4)
def template_of(encoder: Encoder, prefix: str, suffix: str, query_length: int) -> ChatTemplate:
    return ChatTemplate(encoder, prefix, suffix, query_length)


@functools.lru_cache(maxsize=4)
def whole_texts(
    encoder: TokeniserEncoder, prefix: str, suffix: str, query_length: int
) -> WholeTexts:
    """Return a cached WholeTexts object, for a tokeniser that puts a space before each text."""
    return WholeTexts(encoder, prefix, suffix, query_length)
