"""Alarms and --run.on_anomaly: rules on means over all ranks, so that all decide the same."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.algorithm_options import AdaptiveKLParams
from lm_human_preferences.hparams.task_options import TaskHParams
from lm_human_preferences.labels.held_out import Prediction
from lm_human_preferences.trainers.policy_trainer import PPOTrainer
from lm_human_preferences.trainers.reward_trainer import (
    LearnedBatch,
    RewardModelTrainer,
    mean_loss,
)
from lm_human_preferences.training.loop import Hook, Trainer
from lm_human_preferences.utils.core import weighted_mean
from lm_human_preferences.utils.logging import ALARMS, VALID, announce, console_is

if TYPE_CHECKING:
    from lm_human_preferences.checkpointing.checkpointer import Checkpointer

PENALIZED = 'share of penalties'
MOST_PENALIZED = 0.95
KL_TARGETS = 10  # the limit of the KL divergence, in multiples of its target
KL_PER_TOKEN = 2  # the same without a target, in nats for each token of a response
LEAST_ENTROPY = 0.02  # nats for each token
SIGNIFICANT = 2  # standard deviations of chance
FAR_ABOVE_GUESSING = 1.5  # the limit of a reward model's last loss, in multiples of guessing's
LEAST_SKILL = 0.2  # of a useful reward model, from 0 at chance to 1 at perfection
# The limit of the spread of an ensemble, in multiples of that of the first step: in the small world
# it grew by 1.4 up to the KL that 192 labels are good for, and by 2 far beyond
SPREAD_GROWTH = 1.75
REPEAT_AFTER = 100  # steps until an alarm is reported again

NOT_FINITE = 'the loss is NaN or infinite: lower the learning rate'
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
WORSE_THAN_CHANCE = (
    'the reward model is worse than chance on the labels of its last batches: is their sign the'
    ' wrong way round, or the learning rate too high?'
)

NOT_ABOVE_CHANCE = (
    'the reward model predicts labels that it has not seen no better than chance: look at the'
    ' agreement of labellers (./launch.py labels), or collect more labels before the first episode'
)


class Alarm(NamedTuple):
    """Statistic beyond its limit, and advice; interval: 95 % confidence of an estimate."""

    statistic: str
    value: float
    limit: float
    text: str
    interval: tuple[float, float] | None = None

    def __str__(self) -> str:
        found = f'{self.statistic} is {self.value:.4g}, the limit {self.limit:.4g}'
        if self.interval is not None:
            low, high = self.interval
            found += f', the 95 % interval {low:.3f} to {high:.3f}'
        return f'{self.text} ({found})'


def not_finite(stats: Mapping[str, float], names: Iterable[str]) -> list[Alarm]:
    """Return an alarm for the first of `names` whose statistic is NaN or infinite."""
    for name in names:
        if not math.isfinite(stats[name]):
            return [Alarm(name, stats[name], math.inf, NOT_FINITE)]
    return []


class PolicyLimits(NamedTuple):
    """Limits of a policy's training, and the advice where nearly all responses are penalised."""

    kl: float
    if_penalized: str


def policy_limits(task: TaskHParams, adaptive_kl: AdaptiveKLParams | None) -> PolicyLimits:
    """Return the limits of a policy for `task`."""
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


def reward_alarms(
    stats: Mapping[str, float], judged: Sequence[LearnedBatch], guessing_loss: float
) -> list[Alarm]:
    """Return the alarms of a step; judged: the last quarter of batches, after the last step."""
    alarms = not_finite(stats, ['loss'])
    if not judged or alarms:
        return alarms
    labels = [batch.labels for batch in judged]
    agreement = weighted_mean([batch.agreement for batch in judged], labels)
    least_agreement = -SIGNIFICANT / math.sqrt(sum(labels))
    if agreement < least_agreement:
        alarms.append(Alarm('agreement', agreement, least_agreement, WORSE_THAN_CHANCE))
    loss = mean_loss(judged)
    most_loss = FAR_ABOVE_GUESSING * guessing_loss
    if loss > most_loss:
        text = (
            'the loss of the reward model ended far above that of guessing, '
            f'{guessing_loss:.4g}: lower its learning rate'
        )
        alarms.append(Alarm('loss', loss, most_loss, text))
    return alarms


def retraining_alarms(model: int, prediction: Prediction) -> list[Alarm]:
    """Return an alarm if the model may be no better than chance, and surely not much better."""
    value, chance, name = prediction.accuracy, prediction.chance, 'accuracy'
    if value is None or chance is None:
        value, chance, name = prediction.agreement, 0.0, 'agreement'
    interval = low, high = prediction.interval()
    useful = chance + LEAST_SKILL * (1 - chance)
    if low > chance or high >= useful:  # the second: too few labels to judge by
        return []
    statistic = f'{name} of reward model {model} on {prediction.labels} labels'
    return [Alarm(statistic, value, chance, NOT_ABOVE_CHANCE, interval)]


class HealthMonitor(Hook):
    """Warns of alarms, or saves `trainer` and stops. mode: --run.on_anomaly."""

    def __init__(self, mode: str, trainer: Trainer, checkpointer: Checkpointer) -> None:
        self.mode = mode
        self.trainer = trainer
        self.checkpointer = checkpointer
        self.quiet_until: dict[str, int] = {}  # {statistic: step}

    def raise_alarms(self, step: int, alarms: Sequence[Alarm]) -> None:
        """Warn of `alarms` after `step` steps; in mode 'stop', save and raise UserError."""
        if not alarms or self.mode == 'off':
            return
        if self.mode == 'stop':
            self._log(step, alarms)
            self.checkpointer.save_on_error(self.trainer)
            reasons = '; '.join(map(str, alarms))
            raise UserError(f'stopped at step {step} by --run.on_anomaly stop: {reasons}')
        for alarm in alarms:
            if step >= self.quiet_until.get(alarm.statistic, 0) and self.trainer.comm.rank == 0:
                announce(f'WARNING: step {step}: {alarm}')
                self._log(step, [alarm])
                self.quiet_until[alarm.statistic] = step + REPEAT_AFTER

    def _log(self, step: int, alarms: Sequence[Alarm]) -> None:
        """Write the alarms to TensorBoard with the last of `step` steps."""
        text = '\n'.join(f'    {alarm}' for alarm in alarms)  # indented: nothing in it is markup
        self.trainer.logger.log_text(ALARMS, text, max(step - 1, 0))


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


class RewardHealth(HealthMonitor):
    """Watches the training of a reward model in this process; see reward_alarms."""

    trainer: RewardModelTrainer

    def after_step(self, step: int, stats: Mapping[str, float]) -> None:
        """Compare the last batch with the limits; after the last step, the last quarter of all."""
        trainer = self.trainer
        judged = trainer.judged_batches() if step == trainer.total_steps else []
        guessing_loss = trainer.label_type.guessing_loss(trainer.labels)
        alarms = reward_alarms(stats, judged, guessing_loss)
        self.raise_alarms(step, alarms)
        # The original's lines are as they were recorded, and of labels made up nothing is learned.
        is_left_out = console_is('original') or trainer.settings.labels.source == 'test'
        is_shown = self.mode != 'off' and trainer.comm.rank == 0 and not is_left_out
        if judged and not alarms and is_shown and (loss := mean_loss(judged)) >= guessing_loss:
            # No alarm: labels on which people disagree allow little more.
            announce(
                f'WARNING: the reward model ended no better than by guessing (loss {loss:.4g}, of'
                f' guessing {guessing_loss:.4g}): change its learning rate or epochs'
            )
