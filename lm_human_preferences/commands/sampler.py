"""Models to sample from, best-of-n sampling, and the rewards that score the samples."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from lm_human_preferences import lm_tasks, storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.policy_options import HParams
from lm_human_preferences.language.encodings import Encoder
from lm_human_preferences.language.texts import tokenisers
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.policy import Policy
from lm_human_preferences.reward_sources import loading
from lm_human_preferences.reward_sources.frozen_head.reward import FrozenReward
from lm_human_preferences.reward_sources.sources import source_of_run
from lm_human_preferences.rewards import ScoringModel, make_score_fn
from lm_human_preferences.runs.run_settings import load_run_hparams
from lm_human_preferences.utils.core import TokenIds, token_ids
from lm_human_preferences.utils.streams import note

OF_CHOICE = ('rank', 'mean_score', 'choice_kl')  # fields of a sample about the best-of-n choice
SCORES = ('score', 'score_std', 'kl', *OF_CHOICE)
# Fields that `sample --output` writes besides texts and the columns of the query file
OF_SAMPLES = ('query_tokens', 'response_tokens', *SCORES)


@dataclasses.dataclass(frozen=True)
class Source:
    """Model to sample from, with the settings of its run or, without a run, only a task.

    run: directory of the run, or None. scopes: networks in the run's checkpoint.
    """

    model: TrainedModel
    settings: HParams
    run: str | None = None
    scopes: Sequence[str] = ()

    @classmethod
    def of_run(cls, run: str, scope: str) -> Source:
        """Return a Source with the network named `scope`, such as 'policy', of a train_policy run.

        run: path or URL. UserError if the run's checkpoint does not have this network.
        """
        settings, directory = load_run_hparams(run), storage.join(run, 'policy')
        model = TrainedModel(run, directory, scope)
        # Hide warnings, which are printed again when the model is built.
        with contextlib.redirect_stdout(io.StringIO()):
            scopes = model.scopes()
        if scopes and scope not in scopes:
            raise UserError(
                f'--savescope {scope}: the checkpoint in {directory} has {" and ".join(scopes)}'
            )
        return cls(model, settings, run, scopes)

    @classmethod
    def of_task(cls, task: lm_tasks.TaskHParams) -> Source:
        """Return the initial model of a task as a Source."""
        return cls(lm_tasks.initial_model(task.policy.initial_model), HParams(task=task))

    def policy(
        self,
        temperature: float | None = None,
        best_of: int = 1,
        reward: ScoringModel | None = None,
    ) -> Policy:
        """Load the policy; with best_of, it returns the best of several responses by `reward`.

        temperature: None for that of the task.
        """
        task, scope = self.settings.task, self.model.scope or 'policy'
        settings = lm_tasks.policy_settings(task, self.model.encoding.get_encoder())
        if temperature is not None:
            settings['temperature'] = temperature
        settings |= {'scope': scope, 'only_samples': True}
        if best_of > 1:
            assert reward is not None
            return BestOfN(self.model, reward, task, best_of, **settings)
        return Policy(self.model, **settings)

    def reference(self) -> Policy | None:
        """Load the initial model of the run; None, with a note, if the run has not saved it."""
        if self.run is None:
            return None
        if 'ref_policy' in self.scopes:
            with warnings_only():
                return Source.of_run(self.run, 'ref_policy').policy()
        note(f'note: {self.model.savedir} has no ref_policy, so kl is null')
        return None

    def reward(
        self,
        judge: str | None,
        function: str | None,
        reference: Policy | None = None,
        *,
        is_needed: bool = True,
    ) -> ScoringModel | None:
        """Load the reward named by `judge`; without `judge`, the reward that the run learned from.

        function: see source_of_run. reference: the run's initial model, if it is loaded. is_needed:
        if False, return None (with a note for a run) if no reward is named or found.
        """
        encoding = self.model.encoding
        if judge is not None:
            return loading.load_judge(judge, encoding, self.settings.task)
        if self.run is None:
            if is_needed:
                raise UserError('a model that no run trained has no reward: give --judge REWARD')
            return None
        try:
            source = source_of_run(self.settings, self.run, function)
            return source.for_evaluation(self.run, encoding, reference)
        except UserError as e:
            if is_needed or function is not None:
                raise
            note(f'note: no reward model could be loaded, so score is null: {e}')
            return None


class Choice(NamedTuple):
    """Best of n responses to each query; every field is a tensor (queries,)."""

    best: torch.Tensor  # index of the best response, the first if several are equally good
    rank: torch.Tensor  # rank of `best`: 1, or with ties the mean of the tied ranks, such as 1.5
    mean_score: torch.Tensor  # mean score of the n responses
    kl: torch.Tensor  # KL divergence of best-of-n sampling, see `choose`


def choose(scores: torch.Tensor, is_valid: torch.Tensor | None = None) -> Choice:
    """Choose the response with the highest score for each query; NaN counts as the lowest score.

    scores: (queries, n). is_valid: bool (queries, n), False without the end that the task requires.
    Invalid responses rank last: their score, the penalty, may be above the scores of valid ones.

    Best-of-n sampling has the KL divergence E log((F^n - G^n) / (F - G)) from the sampled model,
    where F is the probability that a response scores at most as high as the best one, and G that
    it scores less. Here F is 1, and G is the fraction of the n responses that score less. KL is
    bounded by log n - (n - 1) / n, its value without ties; it is 0 if all are equally good.
    """
    n = scores.shape[1]
    comparable = scores.double().nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    if is_valid is not None:
        comparable = comparable.masked_fill(~is_valid, -math.inf)
    highest, best = comparable.max(1)
    equal = (comparable == highest.unsqueeze(1)).sum(1)
    fraction = equal.double() / n
    kl = torch.log((1 - (1 - fraction) ** n) / fraction)
    return Choice(
        best=best,
        rank=(equal + 1) / 2,
        mean_score=scores.double().mean(1),
        kl=kl.clamp(max=math.log(n) - (n - 1) / n),
    )


class BestOfN(Policy):
    """Policy that samples `n` responses, scores them as in training, and returns the best."""

    def __init__(
        self,
        model: TrainedModel,
        reward: ScoringModel,
        task: lm_tasks.TaskHParams,
        n: int,
        **settings: Any,
    ) -> None:
        """Build the policy. settings: keyword arguments of Policy."""
        super().__init__(model, **settings)
        self.reward, self.n = reward, n
        self.score_fn = make_score_fn(task, reward)
        self.is_valid = lm_tasks.filter_fn_from_hparams(task, self.encoder)

    def respond(
        self, queries: TokenIds, length: int, samples_per_query: int = 1
    ) -> dict[str, torch.Tensor]:
        """Return the best of n responses to each query, and fields about their scores.

        The fields are those of Policy.respond, 'score', OF_CHOICE and, from a head, 'score_std'.
        The n responses to each of `queries (batch, query_length)` are sampled in one batch.
        """
        rows = token_ids(queries).repeat_interleave(self.n, 0)
        drawn = super().respond(rows, length, self.n * samples_per_query)
        rows, responses = rows.to(self.device), drawn['responses']
        given = {}
        if isinstance(self.reward, FrozenReward):  # the states of a query are computed only once
            blocks = self.reward.blocks
            given['states'] = self.reward.reference.states(rows, responses, self.n, blocks)
        drawn |= self.score_fn(rows, responses, **given)[2]
        of_queries = (-1, self.n)
        choice = choose(
            drawn['score'].unflatten(0, of_queries).cpu(),
            self.is_valid(responses).unflatten(0, of_queries).cpu(),
        )
        chosen = choice.best + torch.arange(0, len(rows), self.n)
        best = {name: values[chosen] for name, values in drawn.items()}
        return best | dict(zip(OF_CHOICE, choice[1:], strict=True))


class Sampler:
    """Sampler of responses, with their scores by a reward and their KL from the initial model.

    Scores are computed as in training: a response is cut after the truncate token, and gets the
    penalty if it lacks this token. The KL of a sample is log pi - log rho, summed over its tokens,
    in nats: pi is the model sampled from, at the sampling temperature, and rho the initial model,
    at the task's temperature. The score is None without a reward, the KL without a reference.
    """

    def __init__(
        self,
        policy: Policy,
        task: lm_tasks.TaskHParams,
        reward: ScoringModel | None = None,
        reference: Policy | None = None,
    ) -> None:
        self.policy, self.task, self.reference = policy, task, reference
        self.score_fn = None if reward is None else make_score_fn(task, reward)
        self.encoder = policy.encoder
        self.reader = tokenisers.for_people(self.encoder, task.chat)
        self.truncate = lm_tasks.postprocess_fn_from_hparams(
            task, policy.padding_token, self.encoder
        )

    def answered(self, queries: torch.Tensor, wanted: int) -> list[dict[str, Any]]:
        """Answer all `queries (batch, query_length)`; return the first `wanted` samples.

        Only these are scored, unless the policy itself has scored all, as BestOfN does.
        """
        if not wanted:
            return []
        drawn = self.policy.respond(queries, self.task.response_length)
        drawn = {name: values[:wanted] for name, values in drawn.items()}
        queries, responses = queries[:wanted], drawn['responses']
        if 'score' not in drawn:
            drawn |= self._scores(queries, responses)
        drawn['kl'] = self._kl(queries, drawn)
        columns: dict[str, list[Any]] = {
            'query': _texts(queries, self.encoder),
            'response': _texts(self.truncate(responses), self.reader),
            'query_tokens': queries.tolist(),
            'response_tokens': responses.tolist(),
        }
        for name in SCORES:
            if name in drawn:
                columns[name] = _numbers(drawn[name])
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def _scores(self, queries: torch.Tensor, responses: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return 'score' (batch,), NaN if there is no reward, and a reward head's 'score_std'."""
        if self.score_fn is None:
            return {'score': torch.full([len(queries)], math.nan)}
        return self.score_fn(queries.to(responses.device), responses)[2]

    def _kl(self, queries: torch.Tensor, drawn: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the KL of each response, (batch,) in nats; NaN without a reference."""
        if self.reference is None:
            return torch.full([len(queries)], math.nan)
        analyzed = self.reference.analyze_responses(queries, drawn['responses'])
        return (drawn['logprobs'].double() - analyzed['logprobs'].double()).sum(1)


def _texts(rows: torch.Tensor, encoder: Encoder) -> list[str]:
    return [encoder.decode(encoder.without_padding(tokens)) for tokens in rows.tolist()]


def _numbers(values: torch.Tensor) -> list[float | None]:
    """Return numbers for JSON, with None instead of NaN and infinities."""
    numbers = []
    for value in values.tolist():
        numbers.append(value if math.isfinite(value) else None)
    return numbers


@contextlib.contextmanager
def warnings_only() -> Iterator[None]:
    """Drop what the block prints, except lines that begin with WARNING; print these to stderr."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    finally:
        for line in printed.getvalue().splitlines():
            if line.startswith('WARNING'):
                print(line, file=sys.stderr)
