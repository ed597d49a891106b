"""Scores of texts by a run's reward model, normalised as its training left it."""

import itertools
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import click
import torch

from lm_human_preferences.commands.sampler import OF_SAMPLES, warnings_only
from lm_human_preferences.datasets import fields
from lm_human_preferences.errors import UserError, option_renamed
from lm_human_preferences.external_rewards.by_name import text_scorer
from lm_human_preferences.external_rewards.texts import TextScorer, joined
from lm_human_preferences.frozen_head import head
from lm_human_preferences.frozen_head.reward import FrozenReward
from lm_human_preferences.hparams.task_options import TaskHParams
from lm_human_preferences.labels.texts import preferences, records, token_ids
from lm_human_preferences.labels.texts.tokenise import Skipped, Tokeniser
from lm_human_preferences.language.tokenisers import text_encoder
from lm_human_preferences.reward_sources.loading import LearnedReward, load_saved, saved_model
from lm_human_preferences.runs.run_files import REWARD
from lm_human_preferences.runs.run_settings import reward_settings_of
from lm_human_preferences.utils.terminal import printable

# Prints {name: score} of a record with its query and its responses {name: text}.
Printer = Callable[[Mapping[str, float | None], str, Mapping[str, str]], None]
Question = tuple[list[int], list[list[int]]]  # tokens of a query and of each response
BATCH = 64  # responses that are scored at a time
_RESPONSES = ('response', 'completion', 'sample')  # names of a single one


def score(run: str, file: str, too_long: str) -> None:
    """Print the scores of texts by a run's reward: a table on a terminal, else JSON lines."""
    found = records.read(file)
    with option_renamed('RUN'), warnings_only():
        scorer = text_scorer(run, chat=True, may_be_code=True)
    if scorer is not None:
        _score_texts(scorer, found)
        return
    saved = saved_model(run)
    task, encoding = _task_of(run), saved.encoding
    tokeniser = Tokeniser(
        # As the reward model has learned to read texts
        text_encoder(encoding.get_encoder(), task.special_tokens),
        task.query_length,
        task.response_length,
        too_long,
        option='--too_long',
    )
    named = [texts_of(record, where) for where, record in found]
    questions = []
    for (where, record), texts in zip(found, named, strict=True):
        questions.append(_tokens(record, where, texts, tokeniser, encoding.n_vocab))
    with warnings_only():
        model = load_saved(saved)  # last, as it may be a large download
    has_spread = isinstance(model, FrozenReward)
    scores = _scores(model, [tokens for tokens in questions if tokens])
    show = _printer(has_spread=has_spread)
    for tokens, (_, record), (query, responses) in zip(questions, found, named, strict=True):
        columns = {}
        for name in responses:
            score, score_std = (None, None) if tokens is None else next(scores)
            columns[name] = score
            if has_spread:
                columns[f'{name}_std'] = score_std
        columns = _others(record, responses) | columns
        tokeniser.count_special([query, *responses.values()])
        show(columns, query, responses)
    for note in tokeniser.notes():
        click.echo(f'note: {note}', err=True)


def _task_of(run: str) -> TaskHParams:
    """Return the task that a reward model has learned."""
    settings = reward_settings_of(run)
    if settings is not None:
        return settings.task
    if head.is_head(run):  # an exported one, whose file says it
        return head.task_of(head.load(run)[1])
    raise UserError(f'{run} has no {REWARD.settings}, which says how long texts may be')


def _score_texts(scorer: TextScorer, found: Sequence[tuple[str, Any]]) -> None:
    named = [texts_of(record, where) for where, record in found]
    texts = []
    for (_, record), (query, responses) in zip(found, named, strict=True):
        columns = _others(record, responses)
        texts += [joined(query, text, columns) for text in responses.values()]
    scores: list[float] = []
    for start in range(0, len(texts), BATCH):
        scores += scorer.score(texts[start : start + BATCH]).tolist()
    left = iter(scores)
    show = _printer(has_spread=False)
    for (_, record), (query, responses) in zip(found, named, strict=True):
        own = {name: next(left) for name in responses}
        show(_others(record, responses) | own, query, responses)


def _others(record: Mapping[str, Any], responses: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a record besides texts and what `sample` measures, such as an id."""
    return fields.columns(record, (*_RESPONSES, *responses, *OF_SAMPLES))


def _printer(*, has_spread: bool) -> Printer:
    if not sys.stdout.isatty():
        return lambda scores, query, responses: click.echo(json.dumps(scores))
    heads = ['score', 'spread'] if has_spread else ['score']
    columns = shutil.get_terminal_size((100, 24)).columns
    left = max(40, columns - 10 * len(heads) - 15)  # for both texts
    of_query, of_text = left // 3, left - left // 3
    row = f'{"{:>9} " * len(heads)} {{:10}} {{:{of_query}}}  {{}}'

    def _show(scores: Mapping[str, float | None], query: str, responses: Mapping[str, str]) -> None:
        for name, text in responses.items():
            numbers = (scores[name], scores.get(f'{name}_std'))[: len(heads)]
            cells = ['-' if number is None else f'{number:.3f}' for number in numbers]
            cells.append('response' if name == 'score' else name)
            click.echo(row.format(*cells, _fitted(query, of_query), _fitted(text, of_text)))

    click.echo(row.format(*heads, '', 'query', 'text'))
    return _show


def _fitted(text: str, width: int) -> str:
    """Return a text in one line of at most `width` characters, safe to print."""
    shown = printable(' '.join(text.split()))
    return shown if len(shown) <= width else f'{shown[: width - 1]}…'


def _tokens(
    record: Any,
    where: str,
    texts: tuple[str, dict[str, str]],
    tokeniser: Tokeniser,
    n_vocab: int,
) -> Question | None:
    query, responses = texts
    # A sample may hold tokens after its end, which no reward has seen.
    response_tokens, after_end = record.get('response_tokens'), record.get('tokens_after_end')
    if isinstance(response_tokens, list) and type(after_end) is int and after_end > 0:
        response_tokens = response_tokens[:-after_end]
    query_tokens = token_ids.tokens_of(
        record.get('query_tokens'), query, tokeniser.encoder, n_vocab
    )
    try:
        query_tokens = tokeniser.query(query, where, query_tokens)
        found = []
        for text in responses.values():
            tokens = token_ids.tokens_of(response_tokens, text, tokeniser.encoder, n_vocab)
            found.append(tokeniser.response(text, where, tokens))
    except Skipped:
        return None
    return query_tokens, found


def texts_of(record: Any, where: str) -> tuple[str, dict[str, str]]:
    """Return the query of a record and its responses, by the names of their scores."""
    if isinstance(record, dict) and 'chosen' in record:
        query, samples = preferences.preference(record, where)
        return query, dict(zip(('chosen', 'rejected'), samples, strict=True))
    if not isinstance(record, dict):
        raise UserError(f'{where} is a {type(record).__name__}, not an object')
    query = fields.text_field(record, fields.query_field(record, where) or 'prompt', where)
    query = fields.after_system(record, query, where)
    for name in _RESPONSES:
        if name in record:
            return query, {'score': fields.text_field(record, name, where)}
    names = itertools.takewhile(record.__contains__, map('sample{}'.format, itertools.count()))
    responses = {name: fields.text_field(record, name, where) for name in names}
    if not responses:
        raise UserError(
            f'{where} has nothing to score: neither response, completion, sample or sample0, nor'
            ' chosen and rejected'
        )
    return query, responses


def _scores(
    model: LearnedReward, questions: Sequence[Question]
) -> Iterator[tuple[float, float | None]]:
    """Yield the score of each response to each query, with its standard deviation by a head."""
    pairs = [(query, response) for query, responses in questions for response in responses]
    for start in range(0, len(pairs), BATCH):
        queries, responses = zip(*pairs[start : start + BATCH], strict=True)
        padded = (_padded(queries, model.padding_token), _padded(responses, model.padding_token))
        if isinstance(model, FrozenReward):
            means, spreads = model.score_and_spread(*padded)
            yield from zip(means.tolist(), spreads.tolist(), strict=True)
        else:
            yield from ((score, None) for score in model.score(*padded).tolist())


def _padded(sequences: Sequence[list[int]], padding_token: int) -> torch.Tensor:
    """Pad to (sequences, length of the longest), which changes no score."""
    length = max(1, *map(len, sequences))
    return torch.tensor([ids + [padding_token] * (length - len(ids)) for ids in sequences])
