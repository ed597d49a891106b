"""Hooks of a policy's training: samples, table and alarms on the console."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from lm_human_preferences.checkpointing.checkpointer import Checkpointer
from lm_human_preferences.language.encodings import Encoder
from lm_human_preferences.plan.phases import TrainPolicy
from lm_human_preferences.ppo import Rollout
from lm_human_preferences.trainers.health import Alarm, HealthMonitor, not_finite
from lm_human_preferences.trainers.hooks import Checkpoints, ProgressBar
from lm_human_preferences.trainers.policy_trainer import PPOTrainer
from lm_human_preferences.training import console
from lm_human_preferences.training.loop import Hook
from lm_human_preferences.training.time_left import TimeLeft, as_text
from lm_human_preferences.utils.logging import (
    ENDED,
    LENGTH,
    VALID,
    announce,
    console_is,
    log_as_original,
)
from lm_human_preferences.utils.terminal import cut_mark

SAMPLES_SHOWN, SAMPLES_IN_SUMMARY = 3, 2

PENALIZED = 'share of penalties'
MOST_PENALIZED = 0.95
KL_TARGETS = 10  # the limit of the KL divergence, in multiples of its target
KL_PER_TOKEN = 2  # the same without a target, in nats for each token of a response
LEAST_ENTROPY = 0.02  # nats for each token
# The limit of the spread of an ensemble, in multiples of that of the first step: in the small world
# it grew by 1.4 up to the KL that 192 labels are good for, and by 2 far beyond
SPREAD_GROWTH = 1.75
FAR_FROM_START = (
    'the policy has moved far from the initial language model: lower --ppo.lr or raise'
    ' --rewards.kl_coef'
)
EXPLOITING = (
    'the score rises while the KL divergence explodes: the policy exploits blind spots of the'
    ' reward model; raise --rewards.kl_coef'
)
BEYOND_LABELS = (
    'the models of the ensemble disagree far more than at the start: the labels do not cover what'
    ' the policy writes; raise --rewards.kl_coef or lower --rewards.adaptive_kl.target, or collect'
    ' labels on its own samples (--rewards.online)'
)
COLLAPSED = (
    'the policy gives the same response every time: lower --ppo.lr or raise --rewards.kl_coef'
)


class PolicyLimits(NamedTuple):
    """Limits of a policy's training, and the advice where nearly all responses are penalised."""

    kl: float
    if_penalized: str


def policy_hooks(
    trainer: PPOTrainer,
    phase: TrainPolicy,
    checkpointer: Checkpointer,
    clock: TimeLeft,
    encoder: Encoder,
) -> list[Hook]:
    """Return the hooks of a policy's training. clock: of the whole command, with 'policy'."""
    run = phase.run
    has_spread = phase.source.members > 1 or bool(trainer.reward_blocks)
    clock.begin('policy', trainer.share_done)
    bar = ProgressBar(
        trainer,
        clock,
        name='policy',
        unit='episode',
        done=trainer.episodes_done,
        per_step=trainer.ppo.batch_size,
        shown={'score': ('objective/score', '.2f'), 'kl': ('objective/kl', '.2f')},
    )
    return [
        Samples(trainer, encoder),
        bar,
        PolicyTable(trainer, clock, has_spread=has_spread),
        PolicyHealth(run.on_anomaly, trainer, checkpointer, policy_limits(phase)),
        Checkpoints(trainer, checkpointer, run.save_interval, saves_end=True),
    ]


class Samples(Hook):
    """Shows the first few episodes of a PPO step and, as the original did, how long it took.

    In a summary only those of the first step and the last.
    """

    def __init__(self, trainer: PPOTrainer, encoder: Encoder) -> None:
        self.trainer = trainer
        self.encoder = encoder

    def after_step(self, step: int, stats: Mapping[str, float]) -> None:
        """Print samples on rank 0 if they are due; the original counts steps from 0."""
        trainer = self.trainer
        if trainer.rollout is None or trainer.comm.rank != 0:
            return
        if console_is('summary') and step in (1, trainer.total_steps):
            self._summarize(step, trainer.rollout, stats)
        if console_is('original') and trainer.logger.is_due(step - 1):
            for query, response, score, kl, _ in self._first(SAMPLES_SHOWN, trainer.rollout):
                total = score - stats['objective/kl_coef'] * kl
                numbers = {'score': score, 'kl': kl, 'total': total}
                announce(query, response, *(f'  {name} = {numbers[name]:+.2f}' for name in numbers))
        seconds = trainer.step_seconds
        episodes_per_second = trainer.ppo.batch_size / max(seconds, 1e-9)
        log_as_original(
            f'[ppo_step {step - 1}] step_time={seconds:.2f}s, eps/s={episodes_per_second:.2f}'
        )

    def _summarize(self, step: int, rollout: Rollout, stats: Mapping[str, float]) -> None:
        announce(f'samples of step {step}:')
        if LENGTH in stats:
            announce(
                f'  of all responses {stats[ENDED]:.0%} ended, {stats[VALID]:.0%} where it counts,'
                f' at a mean length of {stats[LENGTH]:.1f} tokens'
            )
        for query, response, score, kl, cut in self._first(SAMPLES_IN_SUMMARY, rollout):
            shown = f'{response} {cut_mark(cut)}'.rstrip()
            announce(f'  {query} | {shown}   (score {score:.2f}, KL {kl:.2f})')

    def _first(self, count: int, rollout: Rollout) -> Iterator[tuple[str, str, float, float, int]]:
        """Yield (query, response, score, KL, tokens cut) of the first episodes."""
        first = rollout[:count]
        kl = (first.logprobs - first.ref_logprobs).sum(1)
        cut = (first.responses != first.scored_responses).sum(1)
        numbers = zip(first.scores.tolist(), kl.tolist(), cut.tolist(), strict=True)
        for query, response, each in zip(first.queries, first.scored_responses, numbers):
            yield self._line(query), self._line(response), *each

    def _line(self, tokens: torch.Tensor) -> str:
        return self.encoder.decode(tokens).replace('\n', '⏎')


class PolicyTable(Hook):
    """Prints a line of the policy's table when one is due. clock: with a phase 'policy'."""

    def __init__(self, trainer: PPOTrainer, clock: TimeLeft, *, has_spread: bool) -> None:
        self.trainer = trainer
        self.clock = clock
        self.table = console.policy_table(has_spread=has_spread)

    def after_step(self, step: int, stats: Mapping[str, float]) -> None:
        """Print the line, on rank 0."""
        steps = self.trainer.total_steps
        is_printed = console.is_due(step, steps, self.trainer.logger.log_interval)
        if self.trainer.comm.rank != 0 or not is_printed:
            return
        share = self.trainer.share_done
        self.table.add(
            step=f'{step}/{steps}',
            episodes=self.trainer.episodes_done,
            score=stats['objective/score'],
            spread=stats.get('objective/score_std', 0.0),
            KL=stats['objective/kl'],
            KL_coef=stats['objective/kl_coef'],
            loss=stats['ppo/loss/total'],
            episodes_per_second=self.clock.per_second(share, self.trainer.total_episodes),
            time_left=as_text(self.clock.seconds(share)),
        )


def policy_limits(phase: TrainPolicy) -> PolicyLimits:
    """Return the limits of a policy by its task and its KL target."""
    task, adaptive_kl = phase.settings.task, phase.settings.rewards.adaptive_kl
    kl = KL_PER_TOKEN * task.response_length
    if adaptive_kl is not None:
        kl = KL_TARGETS * adaptive_kl.target
    option, end = 'truncate_token', f'token {task.truncate_token}'
    if task.truncate_text:
        option, end = 'truncate_text', repr(task.truncate_text)
    elif task.truncate_token is None:
        option, end = 'response_length', 'an end'
    return PolicyLimits(
        kl,
        f'hardly any response has {end} at or after position'
        f' {task.truncate_after}, so they score {task.penalty_reward_value}; see'
        f' --task.{option}, --task.truncate_after and --task.penalty_reward_value',
    )


def policy_alarms(
    stats: Mapping[str, float], first: Mapping[str, float], limits: PolicyLimits
) -> list[Alarm]:
    """Return the alarms of a PPO step by its statistics, PENALIZED and those of the first."""
    alarms = not_finite(stats, ['ppo/loss/total', 'objective/kl', 'objective/score'])
    kl = stats['objective/kl']
    entropy = stats['ppo/policy/entropy']
    penalized = stats[PENALIZED]
    score_rises = stats['objective/score'] > first['objective/score']
    if kl > limits.kl:
        alarms.append(Alarm('objective/kl', kl, limits.kl, FAR_FROM_START))
    elif kl > limits.kl / 2 and score_rises:
        alarms.append(Alarm('objective/kl', kl, limits.kl / 2, EXPLOITING))
    if 'objective/score_std' in stats:
        spread = stats['objective/score_std']
        most_spread = SPREAD_GROWTH * first['objective/score_std']
        if spread > most_spread:
            alarms.append(Alarm('objective/score_std', spread, most_spread, BEYOND_LABELS))
    if entropy < LEAST_ENTROPY:
        alarms.append(Alarm('ppo/policy/entropy', entropy, LEAST_ENTROPY, COLLAPSED))
    if penalized > MOST_PENALIZED:
        alarms.append(Alarm(PENALIZED, penalized, MOST_PENALIZED, limits.if_penalized))
    return alarms


class PolicyHealth(HealthMonitor):
    """Watches the training of a policy; see policy_alarms."""

    trainer: PPOTrainer

    def __init__(
        self, mode: str, trainer: PPOTrainer, checkpointer: Checkpointer, limits: PolicyLimits
    ) -> None:
        super().__init__(mode, trainer, checkpointer)
        self.limits = limits
        # Of the first step with the present reward model: the scores of two models do not compare.
        self.first: Mapping[str, float] | None = None
        self.reward_version = trainer.reward_version

    def after_step(self, step: int, stats: Mapping[str, float]) -> None:
        """Compare the last step with the limits, and with the first step of this process."""
        trainer = self.trainer
        if self.reward_version != trainer.reward_version:
            self.reward_version, self.first = trainer.reward_version, None
        self.first = self.first or stats
        penalized = 1 - trainer.response_means[VALID]
        alarms = policy_alarms({**stats, PENALIZED: penalized}, self.first, self.limits)
        self.raise_alarms(step, alarms)
