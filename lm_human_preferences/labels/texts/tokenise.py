"""Conversion of labels from texts to token ids that fit a task's encoding and lengths."""

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from lm_human_preferences import label_types, lm_tasks
from lm_human_preferences.datasets.messages import UnusableError, is_empty
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.reward_options import HParams
from lm_human_preferences.hparams.task_options import TaskHParams
from lm_human_preferences.labels.texts import preferences, records
from lm_human_preferences.labels.texts.records import TextLabel, Tokens
from lm_human_preferences.language.encodings import Encoding
from lm_human_preferences.language.texts import tokenisers
from lm_human_preferences.utils.streams import printable

# {name of a count in Tokeniser.counts: message to the user about this count}
NOTES = {
    'cut query': 'Cut: {} queries, to --task.query_length',
    'cut response': 'Cut: {} responses, to --task.response_length',
    'skipped': 'Skipped: {} records with longer texts',
    'unusable': 'Left out: {} records with an empty text or answer, two equal responses, a call of'
    ' a tool, a part that is not text, or answers to different queries',
}


class Skipped(Exception):
    """Exception for a label that is left out, after Tokeniser.counts has counted the label."""


class Tokeniser:
    """Converter of texts to token ids that fit a task, with counts of what did not fit.

    An empty query becomes the end-of-text token, if the encoding has one. A response that is not
    cut gets the end that a sampled response has, see lm_tasks.end_of_text.

    too_long: 'refuse', 'skip' or 'cut' texts that are too long. Cutting removes the end of a text,
    as for the task's own queries, but the beginning of a dialogue, as its last turn is answered.
    option: name of the option too_long, for errors.
    """

    def __init__(self, encoding: Encoding, task: TaskHParams, too_long: str, option: str) -> None:
        self.encoder = tokenisers.text_encoder(encoding.get_encoder(), task.special_tokens)
        self.end = lm_tasks.end_of_text(task, encoding.get_encoder())
        self.lengths = {'query': task.query_length, 'response': task.response_length}
        self.too_long, self.option = too_long, option
        self.counts: collections.Counter[str] = collections.Counter()
        # This counts the records that have an ignored field, by the field's name.
        self.unread: collections.Counter[str] = collections.Counter()

    def fitted(self, kind: str, text: str, where: str) -> list[int]:
        """Return the unpadded tokens of a 'query' or a 'response'.

        UserError, or Skipped, if they do not fit.
        """
        most = self.lengths[kind]
        try:
            text.encode()  # fails for lone surrogates, which JSON can hold
            tokens = self.encoder.encode(text)
        except (UnicodeEncodeError, UserError) as e:
            raise UserError(f'{where} cannot be read as text: {e}') from e
        if not tokens and kind == 'query':
            if self.encoder.eot_token is None:
                raise UserError(f'{where} has an empty query: the model needs at least one token')
            return [self.encoder.eot_token]
        if kind == 'response' and self.end not in (None, *tokens) and len(tokens) < most:
            tokens.append(self.end)
        if len(tokens) <= most:
            return tokens
        if self.too_long == 'refuse':
            raise UserError(
                f'{where}: a {kind} has {len(tokens)} tokens, more than {most}; give'
                f' {self.option} cut, or {self.option} skip'
            )
        if self.too_long == 'skip':
            self.counts['skipped'] += 1
            raise Skipped
        self.counts[f'cut {kind}'] += 1
        is_dialogue = kind == 'query' and preferences.is_dialogue(text)
        return tokens[-most:] if is_dialogue else tokens[:most]

    def question(self, label: TextLabel, fields: Sequence[str], where: str) -> Tokens:
        """Return {name: padded token ids} of query and samples. fields: names of the samples.

        UnusableError for a preference with an empty text, or two responses of the same tokens.
        """
        if label.is_pair and any(map(is_empty, (label.query, *label.samples))):
            raise UnusableError(f'{where} has an empty text')
        samples = [self.fitted('response', each, where) for each in label.samples]
        if label.is_pair and samples[0] == samples[1]:
            raise UnusableError(f'{where} has two equal responses')
        query = self.fitted('query', label.query, where)
        missing = self.lengths['query'] - len(query)
        question = {'query': query + [self.encoder.padding_token] * missing}
        for name, tokens in zip(fields, samples, strict=True):
            missing = self.lengths['response'] - len(tokens)
            question[name] = tokens + [self.encoder.padding_token] * missing
        return question

    def notes(self) -> list[str]:
        """Return lines for the user on what was cut, left out or ignored."""
        counts = self.counts
        lines = [text.format(counts[name]) for name, text in NOTES.items() if counts[name]]
        if self.unread:
            names = sorted(self.unread.items())
            fields = ', '.join(f'{printable(name):.80} ({count})' for name, count in names)
            lines.append(f'Not read, with the number of records that have it: {fields}')
        return lines


def tokenise(
    found: Iterable[tuple[str, dict[str, Any]]],
    settings: HParams,
    encoding: Encoding,
    *,
    needs_answer: bool = True,
    ties: bool = True,
) -> tuple[list[TextLabel], list[str]]:
    """Parse records of texts; return labels with their token ids, and notes for the user.

    found: (place for messages, record) pairs. settings: options of train_reward. needs_answer:
    whether a record without an answer is an error. ties: whether an answer may be a tie. UserError
    names the place of a record in an unknown format.
    """
    label_type = label_types.get(settings.labels.type)
    if ties:
        label_type.allow_ties()
    too_long, option = settings.labels.too_long, settings.labels.option_name('too_long')
    tokeniser = Tokeniser(encoding, settings.task, too_long, option)
    labels = []
    for where, record in found:
        try:
            label = records.parse(record, where, label_type, needs_answer)
            tokeniser.unread.update(records.unread(record, label_type))
            tokens = tokeniser.question(label, label_type.samples, where)
            labels.append(dataclasses.replace(label, tokens=tokens))
        except UnusableError:
            tokeniser.counts['unusable'] += 1
        except Skipped:
            pass
    return labels, tokeniser.notes()
