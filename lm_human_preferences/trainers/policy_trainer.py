"""Trainer of a policy by PPO (paper, section 2.2)."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from lm_human_preferences import ppo
from lm_human_preferences.checkpointing.names import VariableNames
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.hparams.policy_options import (
    MOST_KL_ERROR,
    AdaptiveKLParams,
    PpoHParams,
)
from lm_human_preferences.language.networks.scopes import (
    POLICY_NETWORKS,
    Networks,
    NetworksByScope,
)
from lm_human_preferences.machine import precision
from lm_human_preferences.policy import Policy
from lm_human_preferences.ppo import PART, Rollout, ScoreFn
from lm_human_preferences.training.loop import FailedElsewhere
from lm_human_preferences.training.optimizer import Adam
from lm_human_preferences.utils.core import as_numbers, concatenate, exact_div, micro_batches
from lm_human_preferences.utils.logging import ENDED, LENGTH, VALID, Logger

if TYPE_CHECKING:
    from lm_human_preferences.lm_tasks import QuerySampler


class FixedKLController:
    """KL coefficient that stays constant."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current: float, n_steps: int) -> None:
        """Do nothing: the coefficient is constant."""


class AdaptiveKLController:
    """KL coefficient that adapts to hold the KL divergence near a target."""

    def __init__(self, init_kl_coef: float, params: AdaptiveKLParams) -> None:
        self.value = init_kl_coef
        self.params = params

    def update(self, current: float, n_steps: int) -> None:
        """Adapt the coefficient to `current`, the KL in nats of the last `n_steps` episodes."""
        proportional_error = np.clip(
            current / self.params.target - 1, -MOST_KL_ERROR, MOST_KL_ERROR
        )
        self.value *= float(1 + proportional_error * n_steps / self.params.horizon)


KLController = FixedKLController | AdaptiveKLController


def make_kl_controller(kl_coef: float, adaptive_kl: AdaptiveKLParams | None) -> KLController:
    """Return the controller for --rewards.kl_coef and --rewards.adaptive_kl."""
    if adaptive_kl is None:
        return FixedKLController(kl_coef)
    return AdaptiveKLController(kl_coef, adaptive_kl)


class Responses(NamedTuple):
    """Rules for a task's responses; predicates map responses (batch, length) to bool (batch,)."""

    length: int
    has_end: Callable[[torch.Tensor], torch.Tensor]
    # A response is valid if it has an end token at position truncate_after or later.
    is_valid: Callable[[torch.Tensor], torch.Tensor]
    are_logged: bool = True  # whether to log how long responses are and how many have an end


def means_of_parts(of_ranks: Iterable[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Return {component of the score: its mean over all ranks' responses that have it}."""
    values: dict[str, list[float]] = {}
    for parts in of_ranks:
        for name, found in parts.items():
            values.setdefault(name, []).extend(found)
    return {name: sum(found) / len(found) for name, found in values.items()}


@dataclasses.dataclass(kw_only=True, eq=False)
class PPOTrainer:
    """Trainer of a policy by PPO; `step` samples episodes and learns from them.

    ref_policy: the paper's rho. reward_networks: networks that score_fn uses, saved in checkpoints.
    reward_blocks: blocks of ref_policy whose inputs score_fn reads, if the reward is a head on
    hidden states. relative_kl_coef: multiply the initial KL coefficient by the standard deviation
    of the first step's scores.
    """

    policy: Policy
    ref_policy: Policy
    query_sampler: QuerySampler
    score_fn: ScoreFn
    responses: Responses
    ppo: PpoHParams
    kl_ctl: KLController
    logger: Logger
    comm: Comm
    relative_kl_coef: bool = False
    roles: Networks = POLICY_NETWORKS
    reward_networks: NetworksByScope = dataclasses.field(default_factory=dict)
    reward_blocks: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.steps_done = 0
        self.rollout: Rollout | None = None  # episodes of the last PPO step
        self.step_seconds = 0.0  # duration of the last PPO step
        # `score_parts` maps a component of the score to its values for this rank's responses.
        self.score_parts: dict[str, list[float]] = {}
        self.part_means: dict[str, float] = {}  # means of the score's components over ranks
        self.is_undone = False
        self.response_means: dict[str, float] = {}  # {name: mean over the last step's responses}
        self.start_time = self.last_time = time.monotonic()
        own_networks = {'policy': self.policy, 'ref_policy': self.ref_policy}
        self.networks = {**own_networks, **self.reward_networks}
        self.optimizer = Adam(self.roles.learning_parameters(self.networks), comm=self.comm)

    def step(self) -> dict[str, float]:
        """Sample ppo.batch_size episodes and learn from them; return the logged statistics."""
        started = time.monotonic()
        samples_per_query = self.ppo.samples_per_query
        rollout = self.sample()
        if self.relative_kl_coef and self.steps_done == 0:
            self.kl_ctl.value *= self._deviation(rollout.scores)
        # Equation 2: R = r - beta log(pi / rho)
        kl_coef = self.kl_ctl.value
        rollout.rewards, non_score_reward = ppo.compute_rewards(
            rollout.scores, rollout.logprobs, rollout.ref_logprobs, kl_coef, rollout.mask
        )
        rollout.baselines = ppo.leave_one_out(rollout.rewards, samples_per_query)
        # Learn in epochs of minibatches, with whitening, GAE and a clipped loss
        train_stats = self.train(rollout)

        stats = self.record_step_stats(
            rollout, kl_coef=kl_coef, non_score_reward=non_score_reward, train_stats=train_stats
        )
        # Section 2.2: an adaptive beta holds the KL divergence near its target
        self.kl_ctl.update(stats['objective/kl'], self.ppo.batch_size)
        self.rollout = rollout
        self.step_seconds = time.monotonic() - started
        self.steps_done += 1
        return stats | self.response_means

    def sample(self) -> Rollout:
        """Sample and score responses to new queries; return the Rollout without its rewards.

        An error on any rank sets `is_undone` on all; ranks without an error raise FailedElsewhere.
        """
        # With several ranks, Ctrl-C is not caught here, and ends the training at once.
        kind = Exception if self.comm.size > 1 else BaseException
        error, rollout = None, None
        try:
            # Sample queries: x ~ D
            queries = self.query_sampler()['tokens']
            samples_per_query = self.ppo.samples_per_query
            # Sample responses y ~ pi(.|x), and compute log pi, V, log rho and r(x, y)
            repeated = queries.repeat_interleave(samples_per_query, dim=0)
            rollout = self.generate(repeated, samples_per_query)
        except kind as e:
            error = e
        of_ranks = self.comm.all_gather_object((error is not None, self.score_parts))
        self.is_undone = any(has_failed for has_failed, _ in of_ranks)
        self.part_means = means_of_parts([parts for _, parts in of_ranks])
        if rollout is None or self.is_undone:
            raise error or FailedElsewhere
        return rollout

    def generate(self, queries: torch.Tensor, samples_per_query: int = 1) -> Rollout:
        """Sample responses to `queries (batch, query_length)`; return a Rollout without rewards.

        samples_per_query: see Policy.respond.
        """
        parts = micro_batches(queries, self.ppo.micro_batch_size)
        sampled = []
        for part in parts:
            sampled.append(self.policy.respond(part, self.responses.length, samples_per_query))
        # Copy all token ids to host memory at once, because each copy waits for the device.
        responses = torch.cat([part.pop('responses') for part in sampled]).cpu()
        self.score_parts = {}
        rollouts = []
        of_parts = micro_batches(responses, self.ppo.micro_batch_size)
        for part, answers, drawn in zip(parts, of_parts, sampled, strict=True):
            rollouts.append(self._analyzed(part, answers, drawn, samples_per_query))
        return concatenate(rollouts)

    def _analyzed(
        self,
        queries: torch.Tensor,
        responses: torch.Tensor,
        sampled: dict[str, torch.Tensor],
        samples_per_query: int,
    ) -> Rollout:
        reference = self.ref_policy.analyze_responses(
            queries, responses, samples_per_query, self.reward_blocks
        )
        states = {'states': reference['states']} if self.reward_blocks else {}
        scores, scored_responses, stats = self.score_fn(queries, responses, **states)
        for name in stats:
            if name.startswith(PART):
                self.score_parts.setdefault(name, []).extend(stats[name].tolist())
        return Rollout(
            queries=queries,
            responses=responses,
            logprobs=sampled['logprobs'],
            values=sampled['values'],
            ref_logprobs=reference['logprobs'],
            scores=scores.to(self.policy.device, non_blocking=True),
            scored_responses=scored_responses,
            score_std=stats.get('score_std'),
            mask=self.policy.mask_of(responses),
        )

    def _deviation(self, scores: torch.Tensor) -> float:
        """Return the std of all ranks' `scores (batch,)`; 1 if all scores are equal."""
        return float(np.std(self.comm.all_gather_object(scores.tolist()))) or 1.0

    def train(self, rollout: Rollout) -> dict[str, list[torch.Tensor]]:
        """Learn in `noptepochs` shuffled passes; return {statistic: [scalar of each minibatch]}."""
        if precision.autocast_dtype(torch.float32) == torch.float32:
            # Free the prepacked weights, which only sampling needs.
            precision.invalidate_prepacked(self.optimizer.parameters.values())
        stats: dict[str, list[torch.Tensor]] = {}
        samples_per_query = self.ppo.samples_per_query
        queries = exact_div(len(rollout), samples_per_query)
        minibatch = exact_div(queries, self.ppo.nminibatches)
        for _ in range(self.ppo.noptepochs):
            order = torch.from_numpy(np.random.permutation(queries))
            for part in order.split(minibatch):
                firsts = part.unsqueeze(1) * samples_per_query
                rows = (firsts + torch.arange(samples_per_query)).flatten()
                for name, value in self.train_minibatch(rollout[rows]).items():
                    stats.setdefault(name, []).append(value)
        return stats

    def train_minibatch(self, rollout: Rollout) -> dict[str, torch.Tensor]:
        """Update the policy on `rollout`; return {statistic: scalar} from before the update."""
        minibatch = ppo.add_advantages(rollout, self.ppo)
        stats = ppo.return_stats(minibatch)
        parts = micro_batches(minibatch, self.ppo.micro_batch_size)
        samples_per_query = self.ppo.samples_per_query
        mean_tokens = self.comm.all_reduce_mean({'tokens': minibatch.tokens})['tokens']
        for part in parts:
            share = part.tokens / mean_tokens  # each token has the same weight on every rank
            outputs = self.policy.analyze_responses_op(
                part.queries, part.responses, samples_per_query
            )
            loss, part_stats = ppo.loss(part, outputs, self.ppo)
            self.optimizer.backward(share * loss, last=part is parts[-1])
            for name, value in part_stats.items():
                stats[name] = stats.get(name, 0) + share * value
        self.optimizer.update(lr=self.ppo.lr * (1 - self.steps_done / self.total_steps))
        return stats

    def record_step_stats(
        self,
        rollout: Rollout,
        *,
        kl_coef: float,
        non_score_reward: torch.Tensor,
        train_stats: dict[str, list[torch.Tensor]],
    ) -> dict[str, float]:
        """Log and return the statistics of this step, averaged over ranks; see ppo.step_stats."""
        stats = ppo.step_stats(rollout, kl_coef, non_score_reward, train_stats)
        of_responses = self._response_stats(rollout)
        means = self.comm.all_reduce_mean(as_numbers({**stats, **of_responses}))
        self.response_means = {name: means.pop(name) for name in of_responses} | self.part_means
        means['ppo/val/var_explained'] = ppo.explained_variance(
            means['ppo/val/error'], means['ppo/returns/var']
        )
        now = time.monotonic()
        steps = self.steps_done + 1
        tokens = self.ppo.batch_size * self.responses.length
        means |= {
            'elapsed/updates': steps,
            'elapsed/steps/serial': steps * self.responses.length,
            'elapsed/steps/total': steps * tokens,
            'elapsed/episodes': steps * self.ppo.batch_size,
            'elapsed/fps': int(tokens / max(now - self.last_time, 1e-9)),
            'elapsed/time': now - self.start_time,
        }
        self.last_time = now
        more = self.response_means if self.responses.are_logged or self.part_means else {}
        self.logger.log({**means, **more}, self.steps_done)
        return means

    def _response_stats(self, rollout: Rollout) -> dict[str, torch.Tensor]:
        """Return this rank's mean response length and fractions of ended and of valid responses."""
        real = rollout.scored_responses != self.policy.padding_token
        means = {
            LENGTH: real.sum(1).float().mean(),
            ENDED: self.responses.has_end(rollout.responses).float().mean(),
            VALID: self.responses.is_valid(rollout.responses).float().mean(),
        }
        device = self.policy.device
        return {name: mean.to(device, non_blocking=True) for name, mean in means.items()}

    @property
    def total_steps(self) -> int:
        """Return the number of steps in the whole training."""
        return self.ppo.nupdates

    @property
    def variable_names(self) -> VariableNames:
        """Return the converter from the names in `tensors` to names in checkpoints."""
        return self.policy.model.variable_names

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return a checkpoint's tensors by name: parameters, Adam's moments, step counts, times."""
        epoch = time.time() - time.monotonic()  # the original saves times as seconds since 1970
        return {
            **self.roles.parameters(self.networks),
            **self.optimizer.moments(),
            'ppo/optimizer_steps': torch.tensor(self.optimizer.steps),
            'ppo/step': torch.tensor(self.steps_done),
            'ppo/start_time': torch.tensor(epoch + self.start_time, dtype=torch.float64),
            'ppo/last_time': torch.tensor(epoch + self.last_time, dtype=torch.float64),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON values that a resumed run needs besides the tensors."""
        return {
            'step': self.steps_done,
            'kl_coef': self.kl_ctl.value,
            'optimizer_steps': self.optimizer.steps,
            'elapsed': self.last_time - self.start_time,
            'queries': self.query_sampler.position,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; the caller loads the tensors afterwards."""
        self.steps_done = state['step']
        self.kl_ctl.value = state['kl_coef']
        self.start_time = self.last_time - state['elapsed']
        self.optimizer.start_at(state['optimizer_steps'])
        self.query_sampler.seek(state['queries'])
