"""Printing samples of a trained policy (the original's sample.py)."""

import contextlib
import io
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

import torch

from lm_human_preferences import lm_tasks, rewards, storage
from lm_human_preferences.commands.sample_file import SampleFile
from lm_human_preferences.datasets.jsonl import numbered_texts
from lm_human_preferences.distributed import comm as comms
from lm_human_preferences.errors import UserError, about_option
from lm_human_preferences.hparams.model_sizes import Sizes
from lm_human_preferences.hparams.policy_options import HParams
from lm_human_preferences.hparams.task_options import TaskHParams
from lm_human_preferences.language import tokenisers, trained_models
from lm_human_preferences.language.encodings import Encoder, Encoding
from lm_human_preferences.machine import products
from lm_human_preferences.policy import Policy
from lm_human_preferences.reward_models import places
from lm_human_preferences.runs.run_settings import load_run_hparams
from lm_human_preferences.training import precision as precisions
from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.core import set_seed

SHOWN = 60  # characters of a prompt in an error message


def sample_policy(
    save_dir: str,
    savescope: str = 'policy',
    temperature: float | None = None,
    seed: int | None = None,
    batch_size: int = 4,
    nsamples: int = 0,
    precision: str = 'fp32',
    prompt: Sequence[str] = (),
    queries: str | None = None,
    per_query: int = 1,
    output: str | None = None,
    console: str = 'summary',
    comm: comms.Comm | None = None,
) -> None:
    """Print `nsamples` (over all ranks) queries, each with a response of the policy.

    save_dir: a run directory. savescope: the model in its checkpoints to sample from, 'policy' or
    'ref_policy'. temperature: None for the task's own. nsamples: how many to print, for which the
    given queries are repeated if need be; 0: one pass over them or, without any, until interrupted.
    precision: see training.precision.configure. prompt, queries: texts, and a .jsonl file of texts,
    to respond to; without them, the test part of the run's data set. per_query: responses to each
    query. output: file to which each sample is written with its score and KL (see Judge), one JSON
    object per line. console: 'summary' prints only samples on standard output, and notes on
    standard error; 'original' prints what the original program printed.
    """
    comm = comm or comms.init_comm()
    file = SampleFile(output if comm.rank == 0 else None)
    is_original = console == 'original'
    stdout = sys.stdout
    with contextlib.redirect_stdout(stdout if is_original else sys.stderr):
        hparams = load_run_hparams(save_dir)
        trained_model = trained_models.TrainedModel(
            'sample', storage.join(save_dir, 'policy'), savescope
        )
        task, encoder = hparams.task, trained_model.encoding.get_encoder()
        if is_original:
            _show_settings(hparams, trained_model.hparams())
        _prepare_to_compute(trained_model.hparams(), precision)
        lm_tasks.check_lengths(task, encoder, trained_model.hparams())
        scopes = _checked_scopes(trained_model)
        given = given_queries(prompt, queries, task, encoder)

        judge = Judge(save_dir, hparams, scopes) if output is not None else None
        set_seed(seed, comm.rank)
        with contextlib.nullcontext() if is_original else warnings_only():
            policy = _policy(trained_model, task, temperature)
        if given is None and comm.rank == 0 and not is_original:
            for note in lm_tasks.query_notes(task, encoder, 'test'):
                print(note)
        rounds = _rounds(given, hparams, encoder, per_query, nsamples, batch_size, comm)

        samples = samples_of(rounds, policy, task, judge, comm)
        for sample in itertools.islice(samples, nsamples or None):
            file.write(sample)
            _print_sample(sample, tokenisers.reader(encoder, task.chat), stdout)
    if file.count:
        print(f'Saved {file.count} samples in {output}', file=sys.stderr)


def _show_settings(hparams: HParams, sizes: Sizes) -> None:
    """Print them as the original did."""
    print('hparams', hparams)
    hyperparams.dump(sizes, name='model_hparams')


def _prepare_to_compute(sizes: Sizes, precision: str) -> None:
    """Set this process up for a network of these sizes; notes on a precision that is slow here."""
    precisions.configure_for(sizes.n_embd, precision)
    note = products.note_on_bf16(precision)
    if note:
        print(note)


def _print_sample(sample: Mapping[str, Any], encoder: Encoder, stdout: TextIO) -> None:
    print('=' * 80, file=stdout)
    for name in ('query_tokens', 'response_tokens'):
        print(encoder.decode(sample[name]).replace('\n', '⏎'), file=stdout, flush=True)


def _rounds(
    given: torch.Tensor | None,
    hparams: HParams,
    encoder: Encoder,
    per_query: int,
    nsamples: int,
    batch_size: int,
    comm: comms.Comm,
) -> Iterator[torch.Tensor]:
    """This rank's batches of queries: those given, else those of the run's data set."""
    if given is not None:
        return rounds_of(given, per_query, nsamples, batch_size, comm)
    sampler = lm_tasks.make_query_sampler(
        hparams=hparams.task,
        encoder=encoder,
        comm=comm,
        batch_size=batch_size,
        mode='test',
        labels=places.label_source(hparams),
    )
    return endless_rounds(sampler, per_query, batch_size, comm)


def _policy(
    trained_model: trained_models.TrainedModel, task: TaskHParams, temperature: float | None
) -> Policy:
    """temperature: None for the task's own."""
    formatter = lm_tasks.query_formatter(task, trained_model.encoding.get_encoder())
    scope = trained_model.scope
    assert scope is not None
    if temperature is None:
        temperature = task.policy.temperature
    return Policy(
        trained_model,
        scope=scope,
        embed_queries=formatter,
        temperature=temperature,
        only_samples=True,
    )


def _checked_scopes(trained_model: trained_models.TrainedModel) -> list[str]:
    """The scopes of the models in a checkpoint; UserError if the one to sample from is missing."""
    # The same warnings are printed again when the model is built.
    with contextlib.redirect_stdout(io.StringIO()):
        scopes = trained_model.scopes()
    if scopes and trained_model.scope not in scopes:
        raise UserError(
            f'--savescope {trained_model.scope}: the checkpoint in {trained_model.savedir} has '
            f'{" and ".join(scopes)}'
        )
    return scopes


@contextlib.contextmanager
def warnings_only() -> Iterator[None]:
    """Of what the block prints, print only the warnings, on standard error.

    Loading a model prints a line for each variable.
    """
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    finally:
        for line in printed.getvalue().splitlines():
            if line.startswith('WARNING'):
                print(line, file=sys.stderr)


def given_queries(
    prompts: Sequence[str], path: str | None, task: TaskHParams, encoder: Encoder
) -> torch.Tensor | None:
    """The texts `prompts` and those in the .jsonl file `path` as queries (queries, query_length).

    None if neither is given. UserError for a text that is too long, empty or cannot be encoded.
    """
    named = [(f'--prompt {_shortened(text)}', text) for text in prompts]
    if path is not None:
        with about_option('--queries'):
            texts = numbered_texts(path)
            if not texts:
                raise UserError(f'{path} has no text')
        named += [(f'--queries {where}', text) for where, text in texts]
    if not named:
        return None
    return torch.tensor([_encoded(name, text, task, encoder) for name, text in named])


def _shortened(text: str) -> str:
    return repr(text if len(text) <= SHOWN else f'{text[:SHOWN]}...')


def _encoded(name: str, text: str, task: TaskHParams, encoder: Encoder) -> list[int]:
    """The tokens of a query, padded to `query_length`; `name` says in errors which one it is."""
    try:
        tokens = encoder.encode(text)
    except UnicodeEncodeError as e:  # JSON can hold half a character
        raise UserError(f'{name} cannot be encoded: {e.reason}') from e
    except UserError as e:
        raise UserError(f'{name}: {e}') from e
    if len(tokens) > task.query_length:
        raise UserError(
            f'{name} has {len(tokens)} tokens, but the queries of this run have at most '
            f'{task.query_length} (its --task.query_length): shorten it'
        )
    chat = lm_tasks.chat_template(task, encoder)
    if chat is not None and chat.problem(tokens, tokens):
        raise UserError(f'{name} is too long for the chat template of this run, or refused by it')
    if not tokens and not task.query_prefix and not task.query_suffix:
        raise UserError(f'{name} is empty: the model needs at least one token to continue')
    return tokens + [encoder.padding_token] * (task.query_length - len(tokens))


def rounds_of(
    queries: torch.Tensor, per_query: int, nsamples: int, batch_size: int, comm: comms.Comm
) -> Iterator[torch.Tensor]:
    """This rank's share of `queries (queries, query_length)`, at most `batch_size` rows at a time.

    Each query comes `per_query` times. They are gone through as often as `nsamples` rows of all
    ranks take, once for 0. Rank r of n takes the rows r, r + n, r + 2n and so on. All ranks have
    the same number of rounds; in the last one, some may have fewer rows, or none.
    """
    count = nsamples or len(queries) * per_query
    rows_of_all = batch_size * comm.size
    for start in range(0, count, rows_of_all):
        end = min(start + rows_of_all, count)
        numbers = torch.arange(start, end)[comm.rank :: comm.size]
        yield queries[numbers // per_query % len(queries)]


def endless_rounds(
    query_sampler: Callable[[], dict[str, torch.Tensor]],
    per_query: int,
    batch_size: int,
    comm: comms.Comm,
) -> Iterator[torch.Tensor]:
    """As rounds_of, for queries without end: yields (batch_size, query_length).

    query_sampler: gives the next queries of this rank, see lm_tasks.make_query_sampler.
    """
    rows = batch_size * comm.size
    waiting: list[torch.Tensor] = []
    while True:
        while len(waiting) < rows:
            shares = comm.all_gather_object(query_sampler()['tokens'])
            for in_turn in zip(*shares, strict=True):  # the next query of each rank
                for query in in_turn:
                    waiting += [query] * per_query
        this_round = waiting[:rows]
        waiting = waiting[rows:]
        yield torch.stack(this_round[comm.rank :: comm.size])


def samples_of(
    rounds: Iterator[torch.Tensor],
    policy: Policy,
    task: TaskHParams,
    judge: 'Judge | None',
    comm: comms.Comm,
) -> Iterator[dict[str, Any]]:
    """The samples of all ranks, on every rank, in the order of their queries.

    rounds: the queries of this rank (rows, query_length), see rounds_of. Each sample is a dict with
    query_tokens and response_tokens; with a `judge`, also query, response, score and kl.
    """
    for queries in rounds:
        own = _answered(queries, policy, task, judge) if len(queries) else []
        for in_turn in itertools.zip_longest(*comm.all_gather_object(own)):
            yield from filter(None, in_turn)


def _answered(
    queries: torch.Tensor, policy: Policy, task: TaskHParams, judge: 'Judge | None'
) -> list[dict[str, Any]]:
    drawn = policy.respond(queries, length=task.response_length)
    columns = {'query_tokens': queries.tolist(), 'response_tokens': drawn['responses'].tolist()}
    if judge is not None:
        columns = {**_texts(columns, policy), **columns, **judge(queries, drawn)}
    samples = []
    for row in zip(*columns.values(), strict=True):
        samples.append(dict(zip(columns, row, strict=True)))
    return samples


def _texts(columns: dict[str, list[list[int]]], policy: Policy) -> dict[str, list[str]]:
    """Decode columns of tokens, {'query_tokens': ...}, to {'query': ...}, without padding."""
    texts: dict[str, list[str]] = {}
    for name, rows in columns.items():
        decoded = []
        for tokens in rows:
            unpadded = [token for token in tokens if token != policy.padding_token]
            decoded.append(policy.encoder.decode(unpadded))
        texts[name.removesuffix('_tokens')] = decoded
    return texts


class Judge:
    """Scores samples with the run's reward model, and measures their KL from its initial model.

    Scores are computed as in training: a response is cut after the truncate token, and one without
    it gets the penalty. The KL of a sample is log pi - log rho, summed over its response, in nats.
    pi is the model sampled from, at the sampling temperature; rho is the initial model at the
    task's temperature, as in training. The mean over samples estimates the KL divergence of the
    two. If the run has no reward model or no initial model, the score or the KL is None, with a
    note.
    """

    def __init__(self, save_dir: str, hparams: HParams, scopes: Sequence[str]) -> None:
        """scopes: the models in the policy's checkpoint, see _checked_scopes."""
        policy_dir = storage.join(save_dir, 'policy')
        model = trained_models.TrainedModel('judge', policy_dir, 'ref_policy')
        self.reference = self.score_fn = None
        with warnings_only():
            if 'ref_policy' in scopes:
                self.reference = _policy(model, hparams.task, temperature=None)
            else:
                print(f'note: {policy_dir} has no ref_policy, so kl is null', file=sys.stderr)
            reward_model = self._reward_model(save_dir, hparams, model.encoding)
            if reward_model is not None:
                self.score_fn = rewards.make_score_fn(hparams.task, reward_model)

    def _reward_model(
        self, save_dir: str, hparams: HParams, encoding: Encoding
    ) -> rewards.FrozenRewardModel | None:
        """The run's reward, or the copy of its reward model beside the policy; None, with a note,
        if neither can be loaded."""
        try:
            return rewards.load_reward_of_run(save_dir, hparams, encoding)
        except UserError as e:
            error = e
        with contextlib.suppress(UserError):
            return rewards.load_reward_model(storage.join(save_dir, 'policy'), encoding)
        print(f'note: no reward model could be loaded, so score is null: {error}', file=sys.stderr)
        return None

    def __call__(
        self, queries: torch.Tensor, drawn: dict[str, torch.Tensor]
    ) -> dict[str, list[float | None]]:
        """The score and the KL of each sample, as columns; of an ensemble also score_std.

        queries (rows, query_length); drawn: what Policy.respond returned for them.
        """
        responses = drawn['responses']
        scores = kls = torch.full([len(queries)], math.nan)
        stats: dict[str, torch.Tensor] = {}
        if self.score_fn is not None:
            scores, _, stats = self.score_fn(queries.to(responses.device), responses)
        if self.reference is not None:
            ref_logprobs = self.reference.analyze_responses(queries, responses)['logprobs']
            kls = (drawn['logprobs'].double() - ref_logprobs.double()).sum(1)
        spread = {'score_std': _numbers(stats['score_std'])} if 'score_std' in stats else {}
        return {'score': _numbers(scores), **spread, 'kl': _numbers(kls)}


def _numbers(values: torch.Tensor) -> list[float | None]:
    """The values for JSON: None instead of NaN and infinities."""
    return [value if math.isfinite(value) else None for value in values.tolist()]
