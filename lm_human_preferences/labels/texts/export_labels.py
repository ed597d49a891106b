"""Labels of a folder written as texts, in formats that texts/records.py reads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lm_human_preferences.errors import UserError
from lm_human_preferences.label_types import LabelType
from lm_human_preferences.labels.answers import LABELLER, REMARK
from lm_human_preferences.language.encodings import Encoder

TOKENS, TEXT, PREFERENCES = 'tokens', 'text', 'preferences'
NO_TIES = 'note: {count} answers without a preference are left out: {form} has no place for them'


def as_file(objects: Iterable[dict[str, Any]], path: str) -> tuple[str, int]:
    """(the contents of a file, number of objects): one a line for a .jsonl, else a JSON array."""
    lines = [json.dumps(value, ensure_ascii=False) for value in objects]
    if path.endswith('.jsonl'):
        return ''.join(f'{line}\n' for line in lines), len(lines)
    return '[' + ',\n'.join(lines) + ']\n', len(lines)


class TextExport:
    """Turns labels of token ids into texts.

    inexact: texts so far that would be read as other tokens. The encoding alone decides that: a
    policy may have written tokens that its own text is not split into, or a part of a character.
    """

    def __init__(self, label_type: LabelType, encoder: Encoder) -> None:
        self.label_type = label_type
        self.encoder = encoder
        self.inexact = 0

    def labels(self, labels: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield each label with texts in place of token ids."""
        for label in labels:
            texts = {name: self._text(label[name]) for name in self.label_type.samples}
            answer = {self.label_type.field: label[self.label_type.field]}
            about = {name: label[name] for name in (LABELLER, REMARK) if name in label}
            yield {'query': self._query(label['query']), **texts, **answer, **about}

    def preferences(self, labels: Iterable[dict[str, Any]]) -> Iterator[dict[str, str]]:
        """Yield {prompt, chosen, rejected}: each two samples of which a label likes one better.

        UserError for ratings.
        """
        if len(self.label_type.samples) < 2:
            raise UserError(
                '--export_as preferences: ratings of one response prefer none; give --export_as'
                ' text'
            )
        for label in self.labels(labels):
            samples = [label[name] for name in self.label_type.samples]
            for better, worse in self.label_type.pairs(label[self.label_type.field]):
                yield {
                    'prompt': label['query'],
                    'chosen': samples[better],
                    'rejected': samples[worse],
                }

    def _query(self, tokens: Sequence[int]) -> str:
        """The text of a query; that of an empty one is empty, see tokenise.Tokeniser."""
        real = self._real(tokens)
        return '' if real == [self.encoder.eot_token] else self._text(tokens)

    def _text(self, tokens: Sequence[int]) -> str:
        real = self._real(tokens)
        text = self.encoder.decode(real)
        self.inexact += self.encoder.encode(text) != real
        return text

    def _real(self, tokens: Sequence[int]) -> list[int]:
        return [token for token in tokens if token != self.encoder.padding_token]
