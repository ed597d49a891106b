"""Samples of a trained policy, or of a model that no run trained (sample.py of the original)."""

import contextlib
import itertools
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

import torch

from lm_human_preferences import lm_tasks
from lm_human_preferences.commands.sampler import Sampler, Source, warnings_only
from lm_human_preferences.datasets.jsonl import Query, read_queries
from lm_human_preferences.distributed import comm as comms
from lm_human_preferences.errors import UserError, about_option
from lm_human_preferences.hparams.command_options import SampleHParams
from lm_human_preferences.hparams.policy_options import HParams
from lm_human_preferences.language.adapters import layers
from lm_human_preferences.language.encodings import Encoder
from lm_human_preferences.language.texts import tokenisers
from lm_human_preferences.machine import precision as precisions
from lm_human_preferences.reward_sources import loading
from lm_human_preferences.reward_sources.sources import source_of
from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.core import set_seed

SHOWN = 60  # maximum number of characters of a prompt in an error message


def sample_policy(options: SampleHParams, comm: comms.Comm | None = None) -> None:
    """Sample responses to queries on all ranks and print both; see SampleHParams for `options`."""
    comm = comm or comms.init_comm()
    per_query, best_of, output = options.per_query, options.best_of, options.output
    is_original = options.console == 'original'
    stdout = sys.stdout
    with contextlib.redirect_stdout(stdout if is_original else sys.stderr):
        if options.task is None:
            source = Source.of_run(str(options.save_dir), options.savescope)
        else:
            source = Source.of_task(options.task)
        encoder = _checked_encoder(source, options.precision, is_original=is_original)
        given = given_queries(options.prompt, options.queries)
        of_task = source.settings.task
        encoded = [encoded_query(each.where, each.text, of_task, encoder) for each in given]
        reference = None if output is None else source.reference()
        reward = None
        if output is not None or best_of > 1:
            named = options.judge, options.rewards.function
            with warnings_only():
                reward = source.reward(*named, reference, is_needed=best_of > 1)
            loading.give_more_columns(reward, zip(encoded, given, strict=True))
        set_seed(options.seed, comm.rank)
        with contextlib.nullcontext() if is_original else warnings_only():
            policy = source.policy(options.temperature, best_of, reward)
        if options.precision == 'bf16':
            layers.reduce(policy.model)
        if given:
            in_order = itertools.cycle(torch.tensor(encoded))
        else:
            if comm.rank == 0 and not is_original:
                for note in lm_tasks.query_notes(of_task, encoder, 'test'):
                    print(note)
            in_order = queries_of_data_set(source.settings, encoder, options.batch_size, comm)
        rounds = rounds_of(in_order, per_query, options.batch_size, comm)
        count = options.nsamples or len(given) * per_query or None
        sampler = Sampler(policy, of_task, reward, reference)
        path = output if comm.rank == 0 else None
        with open(path, 'x', encoding='utf-8') if path else contextlib.nullcontext() as file:
            for number, sample in enumerate(samples_of(rounds, count, sampler, comm)):
                columns = given[number // per_query % len(given)].columns if given else {}
                if file is not None:
                    line = json.dumps({**columns, **sample}, ensure_ascii=False, allow_nan=False)
                    print(line, file=file, flush=True)
                _print_sample(sample, sampler.reader, stdout, best_of)
    if path is not None:
        print(f'Saved the samples in {path}', file=sys.stderr)


def _checked_encoder(source: Source, precision: str, *, is_original: bool) -> Encoder:
    """Set the precision, check the task's lengths, and return the model's encoder."""
    sizes, encoder = source.model.sizes(), source.model.encoding.get_encoder()
    if is_original:
        print('hparams', source.settings)
        hyperparams.dump(sizes, name='model_hparams')
    precisions.configure_for(sizes.n_embd, precision)
    lm_tasks.check_lengths(source.settings.task, encoder, sizes)
    return encoder


def _print_sample(
    sample: Mapping[str, Any], encoder: Encoder, stdout: TextIO, best_of: int
) -> None:
    """Print a query, its whole response and, if that is the best of several, its score."""
    print('=' * 80, file=stdout)
    for tokens in (sample['query_tokens'], sample['response_tokens']):
        print(encoder.decode(tokens).replace('\n', '⏎'), file=stdout, flush=True)
    if best_of > 1:
        numbers = (sample['score'], sample['mean_score'], sample['choice_kl'])
        score, mean, kl = ('-' if each is None else f'{each:.2f}' for each in numbers)
        rank = f'rank {sample["rank"]:g} of {best_of}'
        shown = f'(score {score}, {rank}, mean {mean}, KL of the choice {kl})'
        print(shown, file=stdout, flush=True)


def given_queries(prompts: Sequence[str], path: str | None) -> list[Query]:
    """Return `prompts` and the queries in `path`, each with its origin for error messages."""
    found = []
    for text in prompts:
        found.append(Query(f'--prompt {text!r:.{SHOWN}}', text, {}))
    if path is not None:
        with about_option('--queries'):
            queries = read_queries(path)
            if not queries:
                raise UserError(f'{path} has no text')
        found += [query._replace(where=f'--queries {query.where}') for query in queries]
    return found


def encoded_query(name: str, text: str, task: lm_tasks.TaskHParams, encoder: Encoder) -> list[int]:
    """Encode a query, padded to `query_length`; UserError if it is too long, empty or not text."""
    try:
        tokens = tokenisers.text_encoder(encoder, task.special_tokens).encode(text)
        contexts = lm_tasks.contexts_of(task, encoder)
        if contexts is not None and len(tokens) <= task.query_length:
            contexts.contexts([tokens])
    except (UnicodeEncodeError, UserError) as problem:  # JSON can hold lone surrogates
        raise UserError(f'{name}: {problem}') from problem
    if len(tokens) > task.query_length:
        raise UserError(
            f'{name} has {len(tokens)} tokens, but the queries here have at most '
            f'{task.query_length} (--task.query_length): shorten it'
        )
    if not tokens and not task.query_prefix and not task.query_suffix:
        raise UserError(f'{name} is empty: the model needs at least one token to continue')
    return tokens + [encoder.padding_token] * (task.query_length - len(tokens))


def rounds_of(
    queries: Iterator[torch.Tensor], per_query: int, batch_size: int, comm: comms.Comm
) -> Iterator[torch.Tensor]:
    """Yield this rank's batches of `queries`, with each query repeated `per_query` times."""
    repeated = itertools.chain.from_iterable(itertools.repeat(each, per_query) for each in queries)
    while True:
        this_round = list(itertools.islice(repeated, batch_size * comm.size))
        yield torch.stack(this_round[comm.rank :: comm.size])


def queries_of_data_set(
    hparams: HParams, encoder: Encoder, batch_size: int, comm: comms.Comm
) -> Iterator[torch.Tensor]:
    """Yield queries of the data set endlessly, in the same order on every rank."""
    query_sampler = lm_tasks.make_query_sampler(
        hparams.task,
        encoder=encoder,
        comm=comm,
        batch_size=batch_size,
        mode='test',
        labels=source_of(hparams).label_source(),
    )
    while True:
        of_ranks = comm.all_gather_object(query_sampler()['tokens'])
        for in_turn in zip(*of_ranks, strict=True):
            yield from in_turn


def samples_of(
    rounds: Iterator[torch.Tensor], count: int | None, sampler: Sampler, comm: comms.Comm
) -> Iterator[dict[str, Any]]:
    """Yield all ranks' samples, `count` in total (None: endless), in the same order on all ranks.

    Whole batches are sampled, so that a seed gives the same samples for each `count`.
    """
    left = math.inf if count is None else count
    while left > 0:
        queries = next(rounds)
        wanted = int(min(left, len(queries) * comm.size))
        left -= wanted
        answered = sampler.answered(queries, len(range(comm.rank, wanted, comm.size)))
        for in_turn in itertools.zip_longest(*comm.all_gather_object(answered)):
            yield from filter(None, in_turn)
