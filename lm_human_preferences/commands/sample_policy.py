"""Samples of a trained policy, or of a model without a run (the original's sample.py)."""

import contextlib
import dataclasses
import io
import itertools
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

import torch

from lm_human_preferences import lm_tasks, storage
from lm_human_preferences.commands.sampler import Sampler, Source, warnings_only
from lm_human_preferences.datasets.jsonl import Query, read_queries
from lm_human_preferences.distributed import comm as comms
from lm_human_preferences.errors import UserError, about_option, os_errors_as
from lm_human_preferences.hparams.policy_options import HParams
from lm_human_preferences.language import tokenisers
from lm_human_preferences.language.adapters import layers
from lm_human_preferences.language.encodings import Encoder
from lm_human_preferences.machine import products
from lm_human_preferences.reward_sources import loading
from lm_human_preferences.reward_sources.sources import source_of
from lm_human_preferences.training import precision as precisions
from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.core import set_seed

SHOWN = 60  # characters of a prompt that an error message shows


def sample_policy(
    save_dir: str | None = None,
    savescope: str = 'policy',
    temperature: float | None = None,
    seed: int | None = None,
    batch_size: int = 4,
    nsamples: int = 0,
    precision: str = 'fp32',
    model: str | None = None,
    prompt: Sequence[str] = (),
    queries: str | None = None,
    per_query: int = 1,
    best_of: int = 1,
    judge: str | None = None,
    output: str | None = None,
    rewards: Mapping[str, str | None] | None = None,
    task: Mapping[str, Any] | None = None,
    console: str = 'summary',
    comm: comms.Comm | None = None,
) -> None:
    """Print `nsamples` queries with responses (all ranks together); options: see sample.py."""
    comm = comm or comms.init_comm()
    file = SampleFile(output if comm.rank == 0 else None)
    is_original = console == 'original'
    stdout = sys.stdout
    with contextlib.redirect_stdout(stdout if is_original else sys.stderr):
        is_run = save_dir is not None
        source = Source.of_run(save_dir, savescope) if is_run else Source.of_task(task or {})
        encoder = _checked_encoder(source, precision, is_original=is_original)
        given = given_queries(prompt, queries)
        of_task = source.settings.task
        encoded = [encoded_query(each.where, each.text, of_task, encoder) for each in given]
        reference = None if output is None else source.reference()
        reward = None
        if output is not None or best_of > 1:
            function = (rewards or {}).get('function')
            with warnings_only():
                reward = source.reward(judge, function, reference, is_needed=best_of > 1)
            loading.give_more_columns(reward, zip(encoded, given, strict=True))
        set_seed(seed, comm.rank)
        with contextlib.nullcontext() if is_original else warnings_only():
            policy = source.policy(temperature, best_of, reward)
        if precision == 'bf16':
            layers.reduce(policy.model)
        if given:
            in_order = itertools.cycle(torch.tensor(encoded))
        else:
            if comm.rank == 0 and not is_original:
                for note in lm_tasks.query_notes(of_task, encoder, 'test'):
                    print(note)
            in_order = queries_of_data_set(source.settings, encoder, batch_size, comm)
        rounds = rounds_of(in_order, per_query, batch_size, comm)
        count = nsamples or len(given) * per_query or None
        sampler = Sampler(policy, of_task, reward, reference)
        for number, sample in enumerate(samples_of(rounds, count, sampler, comm)):
            columns = given[number // per_query % len(given)].columns if given else {}
            file.write({**columns, **sample})
            _print_sample(sample, sampler.reader, stdout, best_of)
    if file.count:
        print(f'Saved {file.count} samples in {output}', file=sys.stderr)


def _checked_encoder(source: Source, precision: str, *, is_original: bool) -> Encoder:
    """Set the precision, check the task's lengths, and return the model's encoder."""
    sizes, encoder = source.model.sizes(), source.model.encoding.get_encoder()
    if is_original:
        print('hparams', source.settings)
        hyperparams.dump(sizes, name='model_hparams')
    precisions.configure_for(sizes.n_embd, precision)
    if note := products.note_on_bf16(precision):
        print(note)
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
    """Return prompts and the queries of the file `path`, with their places for messages."""
    found = []
    for text in prompts:
        shown = text if len(text) <= SHOWN else f'{text[:SHOWN]}...'
        found.append(Query(f'--prompt {shown!r}', text, {}))
    if path is not None:
        with about_option('--queries'):
            queries = read_queries(path)
            if not queries:
                raise UserError(f'{path} has no text')
        found += [query._replace(where=f'--queries {query.where}') for query in queries]
    return found


def encoded_query(name: str, text: str, task: lm_tasks.TaskHParams, encoder: Encoder) -> list[int]:
    """Encode a query, padded to `query_length`; UserError, with `name`, if it does not fit."""
    try:
        tokens = tokenisers.text_encoder(encoder, task.special_tokens).encode(text)
        contexts = lm_tasks.contexts_of(task, encoder)
        if contexts is not None and len(tokens) <= task.query_length:
            contexts.contexts([tokens])
    except (UnicodeEncodeError, UserError) as e:  # JSON can hold lone surrogates
        raise UserError(f'{name}: {e}') from e
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
    """Yield this rank's batches of `queries`, in which each query comes `per_query` times."""
    repeated = itertools.chain.from_iterable(itertools.repeat(each, per_query) for each in queries)
    while True:
        this_round = list(itertools.islice(repeated, batch_size * comm.size))
        yield torch.stack(this_round[comm.rank :: comm.size])


def queries_of_data_set(
    hparams: HParams, encoder: Encoder, batch_size: int, comm: comms.Comm
) -> Iterator[torch.Tensor]:
    """Yield queries of the data set endlessly, the same on every rank: each rank's in turn."""
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
    """Yield `count` samples (None: endlessly) of all ranks, in order, the same on every rank.

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


@dataclasses.dataclass
class SampleFile:
    """JSON lines file, created with the first sample, not before. path: None for no file."""

    path: str | None
    file: io.FileIO | None = None
    count: int = 0

    def write(self, sample: Mapping[str, Any]) -> None:
        """Append a sample as a line, without buffering; UserError if that fails."""
        if self.path is None:
            return
        line = json.dumps(sample, ensure_ascii=False, allow_nan=False).encode() + b'\n'
        left = f'; it has {self.count} samples'
        with os_errors_as(f'--output {self.path} cannot be written', left):
            if self.file is None:
                self.file = open(self.path, 'xb', buffering=0)
            storage.append(self.file, line, sync=False)
        self.count += 1
