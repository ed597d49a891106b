"""Contexts, which a policy reads: queries in a chat template, or between prefix and suffix.

Contexts have the tokens that transformers makes. Only the policy reads them.
"""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from lm_human_preferences.datasets import messages
from lm_human_preferences.datasets.messages import Message
from lm_human_preferences.errors import UserError
from lm_human_preferences.language.encodings import Encoder
from lm_human_preferences.language.tokenisers import TOKENISER, TokeniserEncoder, failing
from lm_human_preferences.utils.rendering import TemplateError, render

# Extra tokens that a context may have: with text around it, a query is sometimes split into more
# tokens than alone.
SLACK = 4
TOO_LONG, REFUSED = 'too_long', 'refused'


class Contexts(ABC):
    """Maker of contexts (batch, length) from queries of at most `query_length` tokens."""

    def __init__(self, encoder: TokeniserEncoder, query_length: int) -> None:
        self.encoder = encoder
        self.context = functools.lru_cache(maxsize=1024)(self._context)
        one = tuple(encoder.encode('a'))
        self.overhead = len(self.context(one)) - len(one) + SLACK
        self.length = query_length + self.overhead

    @abstractmethod
    def _context(self, query: tuple[int, ...]) -> list[int]:
        """Return the tokens of the context of an unpadded query; UserError if none can be made."""

    def problem(self, whole: Sequence[int], query: Sequence[int]) -> str | None:
        """Return TOO_LONG or REFUSED for a query without context. whole: its tokens uncut."""
        try:
            context = self.context(tuple(query))
        except UserError:
            return REFUSED
        return TOO_LONG if len(context) > self.length else None

    def contexts(self, queries: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the contexts of padded queries, themselves padded on the right to `length`."""
        padding = self.encoder.padding_token
        rows = []
        for query in queries:
            row = self.context(tuple(self.encoder.without_padding(query)))
            if len(row) > self.length:
                raise UserError(
                    f'a query has {len(row)} tokens in its context, more than {self.length}:'
                    ' shorten it'
                )
            rows.append(row + [padding] * (self.length - len(row)))
        return rows


class WholeTexts(Contexts):
    """Contexts of prefix, query and suffix encoded as one text, with a space before it."""

    def __init__(
        self, encoder: TokeniserEncoder, prefix: str, suffix: str, query_length: int
    ) -> None:
        self.prefix, self.suffix = prefix, suffix
        super().__init__(encoder, query_length)

    def _context(self, query: tuple[int, ...]) -> list[int]:
        text = f'{self.prefix}{self.encoder.decode(query)}{self.suffix}'
        return self.encoder.encode_whole(text)


class ChatTemplate(Contexts):
    """Contexts that a tokeniser's chat template makes; UserError if it has none that works."""

    def __init__(self, encoder: Encoder, prefix: str, suffix: str, query_length: int) -> None:
        if not isinstance(encoder, TokeniserEncoder):
            raise UserError('--task.chat: the model has no chat template; leave --task.chat off')
        self.prefix, self.suffix = prefix, suffix
        try:
            encoder.own.get_chat_template()
        except ValueError as e:
            directory = os.path.dirname(encoder.files[TOKENISER])
            raise UserError(
                f'--task.chat: {directory} has no default chat template, neither'
                ' chat_template.jinja nor in tokenizer_config.json: use a chat model, call one of'
                ' its templates `default`, or leave --task.chat off'
            ) from e
        super().__init__(encoder, query_length)

    def render(self, dialogue: Sequence[Message], **settings: Any) -> str:
        """Render messages as text, by apply_chat_template's `settings`; UserError if that fails."""
        try:
            return render(self.encoder.own, dialogue, **settings)
        except TemplateError as e:
            raise UserError(f'--task.chat: the chat template of the model fails: {e}') from e

    def _tokens(self, rendered: str) -> list[int]:
        """Return the tokens of a rendered text; where it spells special tokens, it has these."""
        with failing('encode', rendered):
            return self.encoder.own(rendered, add_special_tokens=False)['input_ids']

    def _context(self, query: tuple[int, ...]) -> list[int]:
        """Return tokens of the rendered query, up to where the assistant begins or continues."""
        dialogue = messages.as_messages(self.encoder.decode(query))
        if len(dialogue) == 1 and dialogue[0]['role'] == messages.USER:
            content = f'{self.prefix}{dialogue[0]["content"]}{self.suffix}'
            dialogue = [{'role': messages.USER, 'content': content}]
        last = dialogue[-1]
        if len(dialogue) > 1 and last['role'] == messages.ASSISTANT and not last['content'].strip():
            dialogue.pop()  # an empty answer need not be continued
        goes_on = dialogue[-1]['role'] == messages.ASSISTANT
        rendered = self.render(
            dialogue, add_generation_prompt=not goes_on, continue_final_message=goes_on
        )
        _check_shown(dialogue, rendered)
        return self._tokens(rendered)

    def ends(self) -> frozenset[int]:
        """Return {first added token that the template writes after an answer}, or an empty set."""
        answer = 'lm-human-preferences'  # marks where the answer is in the rendered text
        dialogue = [
            {'role': messages.USER, 'content': 'a'},
            {'role': messages.ASSISTANT, 'content': answer},
        ]
        after = self.render(dialogue).rpartition(answer)[2]
        added = self.encoder.own.backend_tokenizer.get_added_tokens_decoder()
        return frozenset([token for token in self._tokens(after) if token in added][:1])

    def problem(self, whole: Sequence[int], query: Sequence[int]) -> str | None:
        """Return why a query can have no context; a dialogue that was cut is TOO_LONG."""
        # 16 tokens are enough to see the role with which a dialogue begins.
        if len(query) < len(whole) and messages.is_dialogue(self.encoder.decode(whole[:16])):
            return TOO_LONG
        return super().problem(whole, query)


def _check_shown(dialogue: Sequence[Message], rendered: str) -> None:
    """Raise UserError unless a rendered text contains each message's content, in any order.

    White space around a content is ignored, as many templates trim it.
    """
    contents = sorted((message['content'].strip() for message in dialogue), key=len, reverse=True)
    rest = rendered
    for content in filter(None, contents):
        before, found, after = rest.partition(content)
        if not found:
            raise UserError(
                '--task.chat: the chat template of the model does not show a message as it is:'
                f' {content!r:.80}'
            )
        rest = f'{before}\0{after}'  # an equal message must be found elsewhere


@functools.lru_cache(maxsize=4)
def template_of(encoder: Encoder, prefix: str, suffix: str, query_length: int) -> ChatTemplate:
    return ChatTemplate(encoder, prefix, suffix, query_length)


@functools.lru_cache(maxsize=4)
def whole_texts(encoder: Encoder, prefix: str, suffix: str, query_length: int) -> WholeTexts | None:
    """Return WholeTexts for a tokeniser that puts a space before texts; None for other encoders."""
    if not isinstance(encoder, TokeniserEncoder) or not encoder.adds_space:
        return None
    return WholeTexts(encoder, prefix, suffix, query_length)
