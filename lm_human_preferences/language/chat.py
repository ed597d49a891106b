"""Contexts of queries as transformers encodes them: in a chat template, or as whole texts.

Only the policy reads queries in this form.
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

# Tokens that a context may have beyond those of its query and of the text around it: inside that
# text, a query is sometimes split into more tokens.
SLACK = 4
TOO_LONG, REFUSED = 'too_long', 'refused'


class Contexts(ABC):
    """Contexts (batch, length) of queries of at most `query_length` tokens."""

    def __init__(self, encoder: TokeniserEncoder, query_length: int) -> None:
        self.encoder = encoder
        self.context = functools.lru_cache(maxsize=1024)(self._context)
        one = tuple(encoder.encode('a'))
        self.overhead = len(self.context(one)) - len(one) + SLACK
        self.length = query_length + self.overhead

    @abstractmethod
    def _context(self, query: tuple[int, ...]) -> list[int]:
        """Return the context of a query without its padding; UserError if it has none."""

    def problem(self, whole: Sequence[int], query: Sequence[int]) -> str | None:
        """Return TOO_LONG or REFUSED for a query without a context. whole: the query uncut."""
        try:
            context = self.context(tuple(query))
        except UserError:
            return REFUSED
        return TOO_LONG if len(context) > self.length else None

    def contexts(self, queries: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return contexts of padded queries, padded on the right to the same length."""
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
    """Contexts of prefix, query and suffix as one text, before which transformers puts a space."""

    def __init__(
        self, encoder: TokeniserEncoder, prefix: str, suffix: str, query_length: int
    ) -> None:
        self.prefix, self.suffix = prefix, suffix
        super().__init__(encoder, query_length)

    def _context(self, query: tuple[int, ...]) -> list[int]:
        text = f'{self.prefix}{self.encoder.decode(query)}{self.suffix}'
        return self.encoder.encode_whole(text)


class ChatTemplate(Contexts):
    """Contexts by the chat template of a tokeniser; UserError if no template works."""

    def __init__(self, encoder: Encoder, prefix: str, suffix: str, query_length: int) -> None:
        if not isinstance(encoder, TokeniserEncoder):
            raise UserError('--task.chat: the model has no chat template; leave --task.chat off')
        self.prefix, self.suffix = prefix, suffix
        try:
            self._template: str = encoder.own.get_chat_template()
        except ValueError as e:
            directory = os.path.dirname(encoder.files[TOKENISER])
            raise UserError(
                f'--task.chat: {directory} has no default chat template, neither'
                ' chat_template.jinja nor in tokenizer_config.json: use a chat model, call one of'
                ' its templates `default`, or leave --task.chat off'
            ) from e
        super().__init__(encoder, query_length)

    @property
    def writes_date(self) -> bool:
        """Return whether contexts depend on the day, as in Llama 3's template."""
        return 'strftime_now' in self._template

    def render(self, dialogue: Sequence[Message], **settings: Any) -> str:
        """Render messages, see apply_chat_template; UserError where the template refuses them."""
        try:
            return render(self.encoder.own, dialogue, **settings)
        except TemplateError as e:
            raise UserError(f'--task.chat: the chat template of the model fails: {e}') from e

    def _tokens(self, rendered: str) -> list[int]:
        """Return the tokens of a rendered text, in which special tokens are read as such."""
        with failing('encode', rendered):
            return self.encoder.own(rendered, add_special_tokens=False)['input_ids']

    def _context(self, query: tuple[int, ...]) -> list[int]:
        """Return the tokens up to where an answer begins, or goes on."""
        dialogue = messages.as_messages(self.encoder.decode(query))
        if len(dialogue) == 1 and dialogue[0]['role'] == messages.USER:
            content = f'{self.prefix}{dialogue[0]["content"]}{self.suffix}'
            dialogue = [{'role': messages.USER, 'content': content}]
        last = dialogue[-1]
        if len(dialogue) > 1 and last['role'] == messages.ASSISTANT and not last['content'].strip():
            dialogue.pop()  # nothing to go on from
        goes_on = dialogue[-1]['role'] == messages.ASSISTANT
        rendered = self.render(
            dialogue, add_generation_prompt=not goes_on, continue_final_message=goes_on
        )
        _check_shown(dialogue, rendered)
        return self._tokens(rendered)

    def ends(self) -> frozenset[int]:
        """Return the first added token that the template writes after an answer, if any."""
        answer = 'lm-human-preferences'  # is found again in the rendered text
        dialogue = [
            {'role': messages.USER, 'content': 'a'},
            {'role': messages.ASSISTANT, 'content': answer},
        ]
        after = self.render(dialogue).rpartition(answer)[2]
        added = self.encoder.own.backend_tokenizer.get_added_tokens_decoder()
        return frozenset([token for token in self._tokens(after) if token in added][:1])

    def problem(self, whole: Sequence[int], query: Sequence[int]) -> str | None:
        """Return what is wrong with a query; a dialogue must not lose its end."""
        # The first tokens of a dialogue hold the role that it begins with.
        if len(query) < len(whole) and messages.is_dialogue(self.encoder.decode(whole[:16])):
            return TOO_LONG
        return super().problem(whole, query)


def _check_shown(dialogue: Sequence[Message], rendered: str) -> None:
    """Raise UserError unless a rendered text has each message's content, in any order.

    White space around contents does not count, as many templates trim it.
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
        rest = f'{before}\0{after}'  # so that an equal content has to be there once more


@functools.lru_cache(maxsize=4)
def template_of(encoder: Encoder, prefix: str, suffix: str, query_length: int) -> ChatTemplate:
    return ChatTemplate(encoder, prefix, suffix, query_length)


@functools.lru_cache(maxsize=4)
def whole_texts(encoder: Encoder, prefix: str, suffix: str, query_length: int) -> WholeTexts | None:
    """Return contexts of whole texts; None where encoding their parts gives the same tokens."""
    if not isinstance(encoder, TokeniserEncoder) or not encoder.adds_space:
        return None
    return WholeTexts(encoder, prefix, suffix, query_length)
