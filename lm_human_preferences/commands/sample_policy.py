"""Samples of a trained policy (the original's sample.py)."""

import contextlib
import dataclasses
import io
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

import torch

from lm_human_preferences import lm_tasks, storage
from lm_human_preferences.datasets.jsonl import Query, read_queries
from lm_human_preferences.distributed import comm as comms
from lm_human_preferences.errors import UserError, about_option, os_errors_as
from lm_human_preferences.hparams.policy_options import HParams
from lm_human_preferences.language import tokenisers, trained_models
from lm_human_preferences.language.adapters import layers
from lm_human_preferences.language.encodings import Encoder, Encoding
from lm_human_preferences.machine import products
from lm_human_preferences.policy import Policy
from lm_human_preferences.reward_sources import loading
from lm_human_preferences.reward_sources.sources import source_of, source_of_run
from lm_human_preferences.rewards import ScoringModel, make_score_fn
from lm_human_preferences.runs.run_settings import load_run_hparams, note_on_queries
from lm_human_preferences.training import precision as precisions
from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.core import set_seed

# What a line of --output has besides texts, and other columns of the file of queries
OF_SAMPLES = ('query_tokens', 'response_tokens', 'tokens_after_end', 'score', 'score_std', 'kl')
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
    rewards: Mapping[str, str | None] | None = None,
    console: str = 'summary',
    comm: comms.Comm | None = None,
) -> None:
    """Print `nsamples` (over all ranks) queries with responses; options: see sample.py."""
    comm = comm or comms.init_comm()
    file = SampleFile(output if comm.rank == 0 else None)
    is_original = console == 'original'
    stdout = sys.stdout
    with contextlib.redirect_stdout(stdout if is_original else sys.stderr):
        hparams = load_run_hparams(save_dir)
        trained_model = trained_models.TrainedModel(
            'sample', storage.join(save_dir, 'policy'), savescope
        )
        sizes = trained_model.sizes()
        task, encoder = hparams.task, trained_model.encoding.get_encoder()
        if is_original:
            _print_settings(hparams, sizes)
        precisions.configure_for(sizes.n_embd, precision)
        if note := products.note_on_bf16(precision):
            print(note)
        lm_tasks.check_lengths(task, encoder, sizes)
        scopes = _checked_scopes(trained_model)
        given = given_queries(prompt, queries)
        encoded = [encoded_query(query.where, query.text, task, encoder) for query in given]
        judge = None
        if output is not None:
            function = (rewards or {}).get('function')
            judge = Judge(save_dir, hparams, function, scopes, encoded, given)
        set_seed(seed, comm.rank)
        with contextlib.nullcontext() if is_original else warnings_only():
            policy = _policy(trained_model, task, temperature)
        if precision == 'bf16':
            layers.reduce(policy.model)
        if given:
            rounds = rounds_of(torch.tensor(encoded), per_query, batch_size, comm)
        else:
            if comm.rank == 0 and not is_original:
                _print_query_notes(save_dir, hparams, encoder)
            rounds = endless_rounds(hparams, encoder, per_query, batch_size, comm)

        count = nsamples or len(given) * per_query or None
        reader = tokenisers.for_people(encoder, task.chat)
        samples = samples_of(rounds, count, policy, task, judge, comm)
        for number, sample in enumerate(samples):
            columns = given[number // per_query % len(given)].columns if given else {}
            file.write({**columns, **sample})
            _print_sample(sample, reader, stdout)
    if file.count:
        print(f'Saved {file.count} samples in {output}', file=sys.stderr)


def _print_settings(hparams: HParams, sizes: hyperparams.HParams) -> None:
    """Print the settings of a run and the sizes of its model as the original did."""
    print('hparams', hparams)
    hyperparams.dump(sizes, name='model_hparams')


def _print_query_notes(save_dir: str, hparams: HParams, encoder: Encoder) -> None:
    """Print what is to be known of the queries that a run samples by itself."""
    for note in lm_tasks.query_notes(hparams.task, encoder, 'test'):
        print(note)
    if note := note_on_queries(save_dir, hparams):
        print(note)


def _print_sample(sample: Mapping[str, Any], encoder: Encoder, stdout: TextIO) -> None:
    """Print a query, and all that was sampled after it."""
    print('=' * 80, file=stdout)
    for tokens in (sample['query_tokens'], sample['response_tokens']):
        print(encoder.decode(tokens).replace('\n', '⏎'), file=stdout, flush=True)


def _policy(
    trained_model: trained_models.TrainedModel,
    task: lm_tasks.TaskHParams,
    temperature: float | None,
) -> Policy:
    """temperature: None for the task's own."""
    settings = lm_tasks.policy_settings(task, trained_model.encoding.get_encoder())
    scope = trained_model.scope
    assert scope is not None
    if temperature is not None:
        settings['temperature'] = temperature
    return Policy(trained_model, scope=scope, only_samples=True, **settings)


def _checked_scopes(trained_model: trained_models.TrainedModel) -> list[str]:
    """Return the scopes in a checkpoint; UserError if the one to sample from is missing."""
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
    """Print only the warnings of what the block prints, such as a line for each variable."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    finally:
        for line in printed.getvalue().splitlines():
            if line.startswith('WARNING'):
                print(line, file=sys.stderr)


def given_queries(prompts: Sequence[str], path: str | None) -> list[Query]:
    """Return texts and the queries of a file, named for messages."""
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
    """Encode a query, padded to `query_length`. name: for errors."""
    try:
        tokens = tokenisers.text_encoder(encoder, task.special_tokens).encode(text)
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
    queries: torch.Tensor, per_query: int, batch_size: int, comm: comms.Comm
) -> Iterator[torch.Tensor]:
    """Yield this rank's batches of queries, each `per_query` times, again and again."""
    for start in itertools.count(step=batch_size * comm.size):
        numbers = start + comm.rank + comm.size * torch.arange(batch_size)
        yield queries[numbers // per_query % len(queries)]


def endless_rounds(
    hparams: HParams, encoder: Encoder, per_query: int, batch_size: int, comm: comms.Comm
) -> Iterator[torch.Tensor]:
    """Yield (batch_size, query_length), as rounds_of, of the run's data set without end."""
    query_sampler = lm_tasks.make_query_sampler(
        hparams.task,
        encoder=encoder,
        comm=comm,
        batch_size=batch_size,
        mode='test',
        labels=source_of(hparams).label_source(),
    )
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
    count: int | None,
    policy: Policy,
    task: lm_tasks.TaskHParams,
    judge: 'Judge | None',
    comm: comms.Comm,
) -> Iterator[dict[str, Any]]:
    """Yield `count` samples of all ranks (None: without end) on every rank, in their order.

    Whole batches are sampled, so that a seed gives the same samples, however many are wanted.
    """
    left = math.inf if count is None else count
    truncate = None
    if task.truncates:
        truncate = lm_tasks.postprocess_fn_from_hparams(task, policy.padding_token, policy.encoder)
    while left > 0:
        queries = next(rounds)
        wanted = int(min(left, len(queries) * comm.size))
        left -= wanted
        own = len(range(comm.rank, wanted, comm.size))
        answered = _answered(queries, own, policy, task, judge, truncate)
        for in_turn in itertools.zip_longest(*comm.all_gather_object(answered)):
            yield from filter(None, in_turn)


def _answered(
    queries: torch.Tensor,
    wanted: int,
    policy: Policy,
    task: lm_tasks.TaskHParams,
    judge: 'Judge | None',
    truncate: Callable[[torch.Tensor], torch.Tensor] | None,
) -> list[dict[str, Any]]:
    """Answer all queries; return the first `wanted` samples, which alone are judged."""
    if not wanted:
        return []
    drawn = policy.respond(queries, length=task.response_length)
    queries, drawn = queries[:wanted], {name: rows[:wanted] for name, rows in drawn.items()}
    responses = drawn['responses']
    ended = responses if truncate is None else truncate(responses)
    columns: dict[str, list[Any]] = {}
    if judge is not None:
        reader = tokenisers.for_people(policy.encoder, task.chat)
        columns = {'query': _texts(queries, policy.encoder), 'response': _texts(ended, reader)}
    columns |= {'query_tokens': queries.tolist(), 'response_tokens': responses.tolist()}
    if truncate is not None:
        columns['tokens_after_end'] = (responses != ended).sum(1).tolist()
    if judge is not None:
        columns |= judge(queries, drawn)
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _texts(rows: torch.Tensor, encoder: Encoder) -> list[str]:
    texts = []
    for tokens in rows.tolist():
        unpadded = [token for token in tokens if token != encoder.padding_token]
        texts.append(encoder.decode(unpadded))
    return texts


class Judge:
    """Judge of samples: score by the run's reward model, KL from its initial model.

    Scores are computed as in training: a response is cut after the truncate token, and one without
    it gets the penalty. The KL of a sample is log pi - log rho, summed over its response, in nats.
    pi is the model sampled from, at the sampling temperature; rho is the initial model at the
    task's temperature. If the run has no reward model or no initial model, the score or the KL is
    None, with a note.
    """

    def __init__(
        self,
        save_dir: str,
        hparams: HParams,
        function: str | None,
        scopes: Sequence[str],
        encoded: Sequence[Sequence[int]],
        given: Sequence[Query],
    ) -> None:
        """function: see source_of_run. scopes: see _checked_scopes. given: the queries named;

        encoded: their tokens.
        """
        policy_dir = storage.join(save_dir, 'policy')
        model = trained_models.TrainedModel('judge', policy_dir, 'ref_policy')
        self.reference = self.score_fn = None
        with warnings_only():
            if 'ref_policy' in scopes:
                self.reference = _policy(model, hparams.task, temperature=None)
            else:
                print(f'note: {policy_dir} has no ref_policy, so kl is null', file=sys.stderr)
            reward_model = self._reward_model(save_dir, hparams, function, model.encoding)
            if reward_model is not None:
                rows = zip(encoded, given, strict=True)
                loading.give_more_columns(reward_model, [row for row in rows if row[1].columns])
                self.score_fn = make_score_fn(hparams.task, reward_model)

    def _reward_model(
        self, save_dir: str, hparams: HParams, function: str | None, encoding: Encoding
    ) -> ScoringModel | None:
        """Load the run's reward, or the copy beside the policy; None with a note if that fails."""
        try:
            source = source_of_run(hparams, save_dir, function)
            return source.for_evaluation(save_dir, encoding, self.reference)
        except UserError as e:
            if function is not None:
                raise
            error = e
        with contextlib.suppress(UserError):
            return loading.load_reward_model(storage.join(save_dir, 'policy'), encoding)
        print(f'note: no reward model could be loaded, so score is null: {error}', file=sys.stderr)
        return None

    def __call__(
        self, queries: torch.Tensor, drawn: dict[str, torch.Tensor]
    ) -> dict[str, list[float | None]]:
        """Return columns score, kl, and score_std of a head, for (rows, length) queries."""
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
    """Return the values for JSON: None instead of NaN and infinities."""
    return [value if math.isfinite(value) else None for value in values.tolist()]


@dataclasses.dataclass
class SampleFile:
    """File that is made with the first sample: failures leave none. path: None for no file."""

    path: str | None
    file: io.FileIO | None = None
    count: int = 0

    def write(self, sample: Mapping[str, Any]) -> None:
        """Add a line, which is in the file when this returns; UserError where that fails."""
        if self.path is None:
            return
        line = json.dumps(sample, ensure_ascii=False, allow_nan=False).encode() + b'\n'
        left = f'; it has {self.count} samples'
        with os_errors_as(f'--output {self.path} cannot be written', left):
            if self.file is None:
                self.file = open(self.path, 'xb', buffering=0)
            storage.append(self.file, line, sync=False)
        self.count += 1
