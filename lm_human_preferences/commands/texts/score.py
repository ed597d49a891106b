"""Scores of texts by a run's reward model, normalised as its training left it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import click
import torch

from lm_human_preferences.commands.sample_policy import warnings_only
from lm_human_preferences.errors import UserError, option_renamed
from lm_human_preferences.evaluation.reward_on_labels import RECORD, load, record_of, saved_model
from lm_human_preferences.external_rewards.by_name import text_scorer
from lm_human_preferences.external_rewards.texts import TextScorer, joined
from lm_human_preferences.hparams.model_sizes import Sizes
from lm_human_preferences.labels.texts import records, token_ids
from lm_human_preferences.labels.texts.tokenise import Skipped, Tokeniser
from lm_human_preferences.language import encodings
from lm_human_preferences.reward_models.ensemble import EnsembleReward, spread
from lm_human_preferences.rewards import LearnedReward
from lm_human_preferences.synthetic.known_reward import KnownReward

KNOWN_REWARD = 'mock'  # as in --rewards.trained_model


class Scored(NamedTuple):
    """A record of the file. tokens: of the query and of each response; None where it is skipped."""

    names: Sequence[str]  # of the responses in the output
    tokens: tuple[list[int], list[list[int]]] | None


def score(
    run: str,
    file: str,
    batch_size: int,
    too_long: str,
    query_length: int | None = None,
    response_length: int | None = None,
) -> None:
    """Print the scores of the texts in `file`: the whole of `./launch.py score`.

    A JSON object is printed for each record; by an ensemble, each score NAME has the spread of its
    members as NAME_std. run: a run with a reward model, the reward model's directory, local or
    remote, a reward that reads texts (external_rewards.by_name), or the known one of reviews. The
    other arguments: see hparams.labelling_options.ScoreHParams.
    """
    found = records.read(file)
    with option_renamed('RUN'), warnings_only():
        scorer = text_scorer(run, chat=True)
    if scorer is not None:
        _refuse_lengths(query_length, response_length)
        _score_texts(scorer, found, batch_size)
        return
    saved = None if run == KNOWN_REWARD else saved_model(run)
    lengths = _lengths(run, query_length, response_length)
    if saved is not None:
        _check_lengths(lengths, saved.hparams())
    encoding = encodings.Reviews if saved is None else saved.encoding
    tokeniser = Tokeniser(encoding.get_encoder(), *lengths, too_long, option='--too_long')
    scored = [_tokens(record, where, tokeniser, encoding.n_vocab) for where, record in found]
    model: LearnedReward | KnownReward
    with warnings_only():
        # Last, as it may be a large download.
        model = KnownReward(encoding) if saved is None else load(saved)
    scores = _scores(model, [each.tokens for each in scored if each.tokens], batch_size)
    for names, tokens in scored:
        columns = {}
        for name in names:
            score, score_std = (None, None) if tokens is None else next(scores)
            columns[name] = score
            if isinstance(model, EnsembleReward):
                columns[f'{name}_std'] = score_std
        click.echo(json.dumps(columns))
    for note in tokeniser.notes():
        click.echo(f'note: {note}', err=True)


def _refuse_lengths(query_length: int | None, response_length: int | None) -> None:
    for name, value in (('query_length', query_length), ('response_length', response_length)):
        if value is not None:
            raise UserError(f'--{name} {value}: this reward reads texts as they are; leave it out')


def _score_texts(scorer: TextScorer, found: Sequence[tuple[str, Any]], batch_size: int) -> None:
    """Print the scores of records by a reward that reads texts, whatever their lengths."""
    named = [texts_of(record, where) for where, record in found]
    texts = [joined(query, text) for query, responses in named for text in responses.values()]
    scores: list[float] = []
    for start in range(0, len(texts), batch_size):
        scores += scorer.score(texts[start : start + batch_size]).tolist()
    left = iter(scores)
    for _, responses in named:
        click.echo(json.dumps({name: next(left) for name in responses}))


def _check_lengths(lengths: tuple[int, int], sizes: Sizes) -> None:
    if sum(lengths) > sizes.n_ctx:
        raise UserError(
            f'--query_length {lengths[0]} + --response_length {lengths[1]} are more than the'
            f' {sizes.limit} tokens that the reward model takes'
        )


def _lengths(run: str, query_length: int | None, response_length: int | None) -> tuple[int, int]:
    """The most tokens of a query and of a response: those given, else those of the run's task."""
    if query_length is None or response_length is None:
        hparams = record_of(run)
        if hparams is None:
            raise UserError(
                f'{run} has no {RECORD}, which says how long texts may be: give --query_length and'
                ' --response_length'
            )
        query_length = query_length or hparams.task.query_length
        response_length = response_length or hparams.task.response_length
    return query_length, response_length


def _tokens(record: Any, where: str, tokeniser: Tokeniser, n_vocab: int) -> Scored:
    """Those that the record of a sample has, else those of its texts. n_vocab: see of_text."""
    query, responses = texts_of(record, where)
    written = record.get('query_tokens'), record.get('response_tokens')
    query_tokens = token_ids.of_text(written[0], query, tokeniser.encoder, n_vocab)
    found = []
    try:
        query_tokens = tokeniser.query(query, where, query_tokens)
        for text in responses.values():
            response_tokens = token_ids.of_text(written[1], text, tokeniser.encoder, n_vocab)
            found.append(tokeniser.response(text, where, response_tokens))
    except Skipped:
        return Scored(list(responses), None)
    return Scored(list(responses), (query_tokens, found))


def texts_of(record: Any, where: str) -> tuple[str, dict[str, str]]:
    """The query of a record and its responses, by the names that their scores get."""
    if isinstance(record, dict) and 'chosen' in record:
        query, samples = records.preference(record, where)
        return query, dict(zip(('chosen', 'rejected'), samples, strict=True))
    if not isinstance(record, dict):
        raise UserError(f'{where} is a {type(record).__name__}, not an object')
    query = records.text_field(record, 'query' if 'query' in record else 'prompt', where)
    for name in ('response', 'completion', 'sample'):
        if name in record:
            return query, {'score': records.text_field(record, name, where)}
    names = itertools.takewhile(record.__contains__, map('sample{}'.format, itertools.count()))
    responses = {name: records.text_field(record, name, where) for name in names}
    if not responses:
        raise UserError(
            f'{where} has nothing to score: neither response, completion, sample or sample0, nor'
            ' chosen and rejected'
        )
    return query, responses


def _scores(
    model: LearnedReward | KnownReward,
    questions: Sequence[tuple[list[int], list[list[int]]]],
    batch_size: int,
) -> Iterator[tuple[float, float | None]]:
    """Yield the score of each response to each query, in their order, with its spread over the
    members of an ensemble."""
    pairs = [(query, response) for query, responses in questions for response in responses]
    for start in range(0, len(pairs), batch_size):
        queries, responses = zip(*pairs[start : start + batch_size], strict=True)
        padded = (_padded(queries, model.padding_token), _padded(responses, model.padding_token))
        if isinstance(model, EnsembleReward):
            of_members = model.rewards_of_members(*padded)
            yield from zip(of_members.mean(0).tolist(), spread(of_members).tolist(), strict=True)
        else:
            yield from ((score, None) for score in model.score(*padded).tolist())


def _padded(sequences: Sequence[list[int]], padding_token: int) -> torch.Tensor:
    """(sequences, length of the longest); padding does not change a score."""
    length = max(1, *map(len, sequences))
    return torch.tensor([ids + [padding_token] * (length - len(ids)) for ids in sequences])
