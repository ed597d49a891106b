"""Texts of labels as token ids of a task's encoding and lengths, and back."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

from lm_human_preferences import label_types
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.reward_options import HParams
from lm_human_preferences.label_types import LabelType
from lm_human_preferences.labels.texts import records
from lm_human_preferences.labels.texts.records import TextLabel
from lm_human_preferences.language.encodings import Encoder, Encoding

# Why a record gives no label, by the name of its count
LEFT_OUT = {
    'unanswered': 'without an answer',
    'empty': 'whose chosen response is empty',
    'equal': 'whose two responses are the same tokens',
}


class Skipped(Exception):
    """A text that is too long, where the user wants such labels to be left out."""


class Tokeniser:
    """Turns texts into token ids that fit a task, and counts what did not fit.

    query_length, response_length: the most tokens of each. too_long: what to do with longer texts:
    'refuse' them; 'cut' the end, as the task cuts its own queries; 'cut_start', the beginning of a
    query and the end of a response; 'skip' the label. An empty query becomes the token that ends a
    text, if the encoding has one. option: that of too_long, which errors name.
    """

    def __init__(
        self,
        encoder: Encoder,
        query_length: int,
        response_length: int,
        too_long: str,
        option: str,
    ) -> None:
        self.encoder = encoder
        self.lengths = {'query': query_length, 'response': response_length}
        self.too_long = too_long
        self.option = option
        self.counts: collections.Counter[str] = collections.Counter()

    def query(self, text: str, where: str, tokens: list[int] | None = None) -> list[int]:
        """The tokens of a query, not padded; UserError, or Skipped, where it does not fit.

        tokens: those that it has, where they are known; None: those that it is encoded as.
        """
        if tokens is None:
            tokens = self._encoded(text, where)
        if not tokens:
            if self.encoder.eot_token is None:
                raise UserError(f'{where} has an empty query: the model needs at least one token')
            return [self.encoder.eot_token]
        return self._fitted(tokens, 'query', where)

    def response(self, text: str, where: str, tokens: list[int] | None = None) -> list[int]:
        """The same of a response, which may be empty."""
        if tokens is None:
            tokens = self._encoded(text, where)
        return self._fitted(tokens, 'response', where)

    def question(self, label: TextLabel, fields: Sequence[str], where: str) -> dict[str, list[int]]:
        """{field: token ids, padded} of a query and its samples; fields: names of the samples."""
        responses = [self.response(sample, where) for sample in label.samples]
        tokens = {'query': self.query(label.query, where), **dict(zip(fields, responses))}
        return {
            field: self._padded(ids, 'query' if field == 'query' else 'response')
            for field, ids in tokens.items()
        }

    def notes(self) -> list[str]:
        """Lines that tell the user what did not fit."""
        query, response = self.lengths.values()
        counts = self.counts
        lines = []
        if counts['padded query'] or counts['padded response']:
            lines.append(
                f'Padded: {counts["padded query"]} queries to {query} tokens,'
                f' {counts["padded response"]} responses to {response}'
            )
        if counts['cut query'] or counts['cut response']:
            lines.append(
                f'Cut: {counts["cut query"]} queries to {query} tokens,'
                f' {counts["cut response"]} responses to {response}'
            )
        if counts['skipped']:
            lines.append(f'Skipped: {counts["skipped"]} records with longer texts')
        for count, what in LEFT_OUT.items():
            if counts[count]:
                lines.append(f'Left out: {counts[count]} records {what}')
        return lines

    def _encoded(self, text: str, where: str) -> list[int]:
        try:
            text.encode()  # JSON can hold half a character
            return self.encoder.encode(text)
        except UnicodeEncodeError as e:
            raise UserError(f'{where} holds what is no text: {e.reason}') from e
        except UserError as e:
            raise UserError(f'{where}: {e}') from e

    def _fitted(self, tokens: list[int], kind: str, where: str) -> list[int]:
        most = self.lengths[kind]
        if len(tokens) <= most:
            return tokens
        if self.too_long == 'refuse':
            raise UserError(
                f'{where}: a {kind} has {len(tokens)} tokens, more than {most}; give'
                f' {self.option} cut, cut_start or skip'
            )
        if self.too_long == 'skip':
            self.counts['skipped'] += 1
            raise Skipped
        self.counts[f'cut {kind}'] += 1
        if kind == 'query' and self.too_long == 'cut_start':
            return tokens[-most:]
        return tokens[:most]

    def _padded(self, tokens: list[int], kind: str) -> list[int]:
        missing = self.lengths[kind] - len(tokens)
        self.counts[f'padded {kind}'] += missing > 0
        return tokens + [self.encoder.padding_token] * missing


def tokenise(
    found: Iterable[tuple[str, Any]],
    hparams: HParams,
    encoding: Encoding,
    *,
    needs_answer: bool = True,
    ties: bool = True,
) -> tuple[list[tuple[TextLabel, dict[str, list[int]]]], list[str]]:
    """The labels in records of texts, each with its question {field: token ids}.

    Also lines that tell the user of what did not fit. found: (where it is, record) of each.
    hparams: train_reward's. needs_answer: whether a record must have one. ties: whether that may be
    a tie. UserError, which says where, for what is of no known format.
    """
    label_type, task = label_types.get(hparams.labels.type), hparams.task
    if ties:
        label_type.allow_ties()
    fields = label_type.samples
    tokeniser = Tokeniser(
        encoding.get_encoder(),
        task.query_length,
        task.response_length,
        hparams.labels.too_long,
        option=hparams.labels.option_name('too_long'),
    )
    labels = []
    for where, record in found:
        parsed = records.parse(
            record,
            where,
            label_type,
            needs_answer=needs_answer,
            type_option=hparams.labels.option_name('type'),
        )
        tokeniser.counts['unanswered'] += not parsed
        is_pair = records.is_pair(record)
        for label in parsed:
            if is_pair and not _chosen(label, label_type).strip():
                tokeniser.counts['empty'] += 1
                continue
            with contextlib.suppress(Skipped):
                question = tokeniser.question(label, fields, where)
                if is_pair and question[fields[0]] == question[fields[1]]:
                    tokeniser.counts['equal'] += 1
                else:
                    labels.append((label, question))
    return labels, tokeniser.notes()


def _chosen(label: TextLabel, label_type: LabelType) -> str:
    """The response that the answer of a pair prefers."""
    chosen = label_type.preferred(label.answer)
    assert chosen is not None
    return label.samples[chosen]


def labels_of(
    found: Iterable[tuple[str, Any]], hparams: HParams, encoding: Encoding
) -> tuple[list[dict[str, Any]], list[str]]:
    """The same as objects of a label file."""
    labels, notes = tokenise(found, hparams, encoding)
    answer = label_types.get(hparams.labels.type).field
    objects = [{**question, answer: label.answer} for label, question in labels]
    return objects, notes
