"""Command `score`: score texts by a run's reward model, with scores normalised as in training."""

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import click
import torch

from lm_human_preferences.commands.sampler import OF_SAMPLES, warnings_only
from lm_human_preferences.datasets import messages
from lm_human_preferences.errors import UserError, option_renamed
from lm_human_preferences.hparams.task_options import TaskHParams
from lm_human_preferences.labels.texts import preferences, records
from lm_human_preferences.labels.texts.tokenise import Skipped, Tokeniser
from lm_human_preferences.language.networks import model_kinds
from lm_human_preferences.reward_sources.frozen_head import head
from lm_human_preferences.reward_sources.frozen_head.reward import FrozenReward
from lm_human_preferences.reward_sources.loading import (
    LearnedReward,
    load_saved,
    saved_model,
    text_scorer,
)
from lm_human_preferences.reward_sources.texts import TextScorer, joined
from lm_human_preferences.runs.run_files import REWARD
from lm_human_preferences.runs.run_settings import reward_settings_of

Pair = tuple[list[int], list[int]]  # token ids of a query, and token ids of a response
# A response's score, under the key '', and the score's standard deviation, under the key _SPREAD.
Scores = dict[str, float | None]
Named = tuple[str, dict[str, str]]  # query of a record, and its responses {column: text}
BATCH = 64  # number of responses that are scored at a time
_RESPONSES = ('response', 'completion', 'sample')  # possible names of the field of a response
_SPREAD = '_std'  # suffix of the column with the standard deviation of a score


def score(run: str, file: str, too_long: str) -> None:
    """Print the scores of texts by a run's reward, as JSON lines."""
    found = records.read(file)
    with option_renamed('RUN'), warnings_only():
        scorer = text_scorer(run, chat=True, may_be_code=True)
    named = [texts_of(record, where) for where, record in found]
    others = []  # for each record, {field: value} to copy to the output, such as an id
    for (_, record), (_, responses) in zip(found, named, strict=True):
        others.append(messages.columns(record, (*_RESPONSES, *responses, *OF_SAMPLES)))
    if scorer is not None:
        scores, notes = _by_texts(scorer, named, others), []
    else:
        scores, notes = _by_tokens(run, found, named, too_long)
    for columns, (_, responses) in zip(others, named, strict=True):
        row = dict(columns)
        for name in responses:
            row |= {f'{name}{suffix}': value for suffix, value in next(scores).items()}
        click.echo(json.dumps(row))
    for note in notes:
        click.echo(f'note: {note}', err=True)


def _by_texts(
    scorer: TextScorer, named: Sequence[Named], columns: Sequence[dict[str, Any]]
) -> Iterator[Scores]:
    """Yield the Scores that `scorer`, which reads texts, gives to each response."""
    texts = []
    for (query, responses), others in zip(named, columns, strict=True):
        texts += [joined(query, text, others) for text in responses.values()]
    for start in range(0, len(texts), BATCH):
        for number in scorer.score(texts[start : start + BATCH]).tolist():
            yield {'': number}


def _by_tokens(
    run: str,
    found: Sequence[tuple[str, Any]],
    named: Sequence[Named],
    too_long: str,
) -> tuple[Iterator[Scores], list[str]]:
    """Return (scores of responses by a reward model that reads tokens, notes for the user)."""
    saved = saved_model(run)
    tokeniser = Tokeniser(saved.encoding, _task_of(run), too_long, option='--too_long')
    pairs: list[Pair | None] = []
    for (where, _), (query, responses) in zip(found, named, strict=True):
        try:
            tokens = tokeniser.fitted('query', query, where)
            for text in responses.values():
                pairs.append((tokens, tokeniser.fitted('response', text, where)))
        except Skipped:
            pairs += [None] * len(responses)
    with warnings_only():
        model = load_saved(saved)  # the model may be a large download, so check texts first
    scores = _scores(model, [pair for pair in pairs if pair])
    none: Scores = {'': None, _SPREAD: None} if isinstance(model, FrozenReward) else {'': None}
    return (next(scores) if pair else none for pair in pairs), tokeniser.notes()


def _task_of(run: str) -> TaskHParams:
    """Return the task on which a reward model was trained."""
    settings = reward_settings_of(run)
    if settings is not None:
        return settings.task
    if model_kinds.is_head(run):  # an exported head records its task in its file
        return head.task_of(head.load(run)[1])
    raise UserError(f'{run} has no {REWARD.settings}, which says how long texts may be')


def texts_of(record: Any, where: str) -> tuple[str, dict[str, str]]:
    """Return the query of a record, and its responses as {name of the score's column: response}."""
    if 'chosen' in record:
        query, samples = preferences.preference(record, where)
        return query, dict(zip(('chosen', 'rejected'), samples, strict=True))
    query = messages.text_field(record, messages.query_field(record, where) or 'prompt', where)
    query = messages.after_system(record, query, where)
    for name in _RESPONSES:
        if name in record:
            return query, {'score': messages.text_field(record, name, where)}
    names = itertools.takewhile(record.__contains__, map('sample{}'.format, itertools.count()))
    responses = {name: messages.text_field(record, name, where) for name in names}
    if not responses:
        raise UserError(
            f'{where} has nothing to score: it needs a field "response", "completion", "sample" or'
            ' "sample0", or the fields "chosen" and "rejected"'
        )
    return query, responses


def _scores(model: LearnedReward, pairs: Sequence[Pair]) -> Iterator[Scores]:
    """Yield the score of each pair; if the model is a frozen head, add the standard deviation."""
    for start in range(0, len(pairs), BATCH):
        batch = zip(*pairs[start : start + BATCH], strict=True)
        queries, responses = (_padded(each, model.padding_token) for each in batch)
        if isinstance(model, FrozenReward):
            means, stats = model.score_and_stats(queries, responses)
            for number, spread in zip(means.tolist(), stats['score_std'].tolist(), strict=True):
                yield {'': number, _SPREAD: spread}
        else:
            for number in model.score(queries, responses).tolist():
                yield {'': number}


def _padded(sequences: Sequence[list[int]], padding_token: int) -> torch.Tensor:
    """Pad token ids to (sequences, longest length); padding changes no score."""
    length = max(1, *map(len, sequences))
    return torch.tensor([ids + [padding_token] * (length - len(ids)) for ids in sequences])
