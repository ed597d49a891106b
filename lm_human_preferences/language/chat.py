"""Contexts by the chat template of a tokeniser. Only the policy sees a query in its template."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tokenizers

from lm_human_preferences import storage
from lm_human_preferences.datasets import messages
from lm_human_preferences.datasets.messages import Message
from lm_human_preferences.errors import UserError, no_panics
from lm_human_preferences.language.encodings import Encoder
from lm_human_preferences.language.tokenisers import (
    SETTINGS,
    TEMPLATE,
    TOKENISER,
    TokeniserEncoder,
    TokeniserEncoding,
    read_object,
    special_tokens,
)
from lm_human_preferences.utils.time_limit import rendering

# A context may have so many tokens more than its query and the template: a query that was cut, put
# into the template, is sometimes split in another way.
SLACK = 4
SPECIAL = ('bos_token', 'eos_token', 'unk_token', 'pad_token', 'sep_token', 'cls_token')
TOO_LONG, REFUSED = 'too_long', 'refused'


@functools.lru_cache(maxsize=4)
def template_of(encoder: Encoder, prefix: str, suffix: str, query_length: int) -> ChatTemplate:
    return ChatTemplate(encoder, prefix, suffix, query_length)


class ChatTemplate:
    """Contexts (batch, length) of queries up to an answer; UserError if no template works."""

    def __init__(self, encoder: Encoder, prefix: str, suffix: str, query_length: int) -> None:
        if not isinstance(encoder, TokeniserEncoder):
            raise UserError('--task.chat: the model has no chat template; leave --task.chat off')
        self.encoder = encoder
        self.prefix, self.suffix = prefix, suffix
        encoding = encoder.encoding
        self._template = _template_of(encoding)
        self._special = special_tokens(encoding.file('special_tokens_map.json'), SPECIAL)
        self._special |= special_tokens(encoding.file(SETTINGS), SPECIAL)
        path = storage.cached_path(encoding.file(TOKENISER))
        self._tokenizer = tokenizers.Tokenizer.from_file(path)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.context = functools.lru_cache(maxsize=1024)(self._context)
        one = tuple(encoder.encode('a'))
        self.overhead = len(self.context(one)) - len(one) + SLACK
        self.length = query_length + self.overhead

    @property
    def writes_date(self) -> bool:
        """Return whether contexts depend on the day, as in Llama 3's template."""
        return 'strftime_now' in self._template

    def render(self, dialogue: Sequence[Message], asks: bool = True) -> str:
        """Render messages; UserError where the template refuses them.

        asks: up to where an answer begins, or goes on if the last message is the assistant's.
        """
        # It takes a second to import. What it renders in cannot reach the rest of Python.
        from transformers.utils.chat_template_utils import render_jinja_template

        goes_on = asks and dialogue[-1]['role'] == messages.ASSISTANT
        try:
            special: dict[str, Any] = self._special
            with rendering(self._template):
                (text,), _ = render_jinja_template(
                    [list(dialogue)],
                    chat_template=self._template,
                    add_generation_prompt=asks and not goes_on,
                    continue_final_message=goes_on,
                    **special,
                )
        except Exception as e:  # a template can raise anything
            raise UserError(f'--task.chat: the chat template of the model fails: {e}') from e
        return text

    def _context(self, query: tuple[int, ...]) -> list[int]:
        """Return the context of a query without its padding."""
        dialogue = messages.as_messages(self.encoder.decode(query))
        if len(dialogue) == 1 and dialogue[0]['role'] == messages.USER:
            content = f'{self.prefix}{dialogue[0]["content"]}{self.suffix}'
            dialogue = [{'role': messages.USER, 'content': content}]
        last = dialogue[-1]
        if len(dialogue) > 1 and last['role'] == messages.ASSISTANT and not last['content'].strip():
            dialogue.pop()  # nothing to go on from
        return self._encoded(self.render(dialogue))

    def _encoded(self, text: str) -> list[int]:
        """Return the tokens of a text with the marks of the template."""
        try:
            with no_panics():
                return self._tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as e:  # the library raises no other
            raise UserError(f'--task.chat: the tokeniser of the model fails: {e}') from e

    def ends(self) -> frozenset[int]:
        """Return the first added token that the template writes after an answer, if any."""
        answer = 'lm-human-preferences'  # is found again in the rendered text
        dialogue = [
            {'role': messages.USER, 'content': 'a'},
            {'role': messages.ASSISTANT, 'content': answer},
        ]
        after = self.render(dialogue, asks=False).rpartition(answer)[2]
        added = self._tokenizer.get_added_tokens_decoder()
        for token in self._encoded(after):
            if token in added:
                return frozenset([token])
        return frozenset()

    def problem(self, whole: Sequence[int], query: Sequence[int]) -> str | None:
        """Return TOO_LONG or REFUSED for a query without context. whole: before it was cut."""
        # The role that a dialogue begins with is in its first tokens.
        if len(query) < len(whole) and messages.is_dialogue(self.encoder.decode(whole[:16])):
            return TOO_LONG
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
            row = self.context(tuple(token for token in query if token != padding))
            if len(row) > self.length:
                raise UserError(
                    f'--task.chat: a query has {len(row)} tokens in the chat template, more than'
                    f' {self.length}: shorten it'
                )
            rows.append(row + [padding] * (self.length - len(row)))
        return rows


def _template_of(encoding: TokeniserEncoding) -> str:
    """Return the chat template of a tokeniser; UserError if there is none."""
    path = encoding.file(TEMPLATE)
    if storage.exists(path):
        return storage.read_text(path)
    template = read_object(encoding.file(SETTINGS)).get('chat_template')
    if isinstance(template, list):  # several, by name
        named = [each for each in template if isinstance(each, dict)]
        defaults = [each.get('template') for each in named if each.get('name') == 'default']
        template = defaults[-1] if defaults else None
    if not isinstance(template, str):
        raise UserError(
            f'--task.chat: {encoding.directory} has no chat template, neither {TEMPLATE} nor in'
            f' {SETTINGS}: use a chat model, or leave --task.chat off'
        )
    return template
