"""Alarms of a training that goes wrong: rules on statistics of its steps, which are means over all
ranks, so that all ranks come to the same end; and what --run.on_anomaly does then.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.train_policy import HParams
from lm_human_preferences.utils.logging import log_line

if TYPE_CHECKING:
    from lm_human_preferences.checkpointing.checkpointer import Checkpointer
    from lm_human_preferences.distributed.comm import Comm
    from lm_human_preferences.train_policy import PPOTrainer
    from lm_human_preferences.train_reward import RewardModelTrainer

PENALIZED = 'share of penalties'
MOST_PENALIZED = 0.95
KL_TARGETS = 10  # times the target that the KL divergence may be
KL_PER_TOKEN = 2  # nats of a response's tokens that it may be where there is no target
LEAST_ENTROPY = 0.02  # nats of a token
SIGNIFICANT = 2  # standard deviations of chance
FAR_ABOVE_GUESSING = 1.5  # times the loss of guessing that a reward model may end with
SELDOM = 100  # steps until an alarm is repeated


class Alarm(NamedTuple):
    """`statistic` has a `value` beyond its `limit`; `text` tells the user what that means and what
    may help."""

    statistic: str
    value: float
    limit: float
    text: str

    def __str__(self) -> str:
        return f'{self.text} ({self.statistic} is {self.value:.4g}, the limit {self.limit:.4g})'


def not_finite(stats: Mapping[str, float], names: Iterable[str]) -> list[Alarm]:
    """An alarm for the first of `names` whose statistic is NaN or infinite."""
    return [
        Alarm(name, stats[name], math.inf, 'the loss is NaN or infinite: lower the learning rate')
        for name in names
        if not math.isfinite(stats[name])
    ][:1]


def policy_alarms(
    stats: Mapping[str, float],
    first: Mapping[str, float],
    hparams: HParams,
) -> list[Alarm]:
    """The alarms of a PPO step. stats: PPOTrainer.step's and PENALIZED; first: those of the first
    step."""
    alarms = not_finite(stats, ['ppo/loss/total', 'objective/kl', 'objective/score'])
    task, adaptive = hparams.task, hparams.rewards.adaptive_kl
    kl, entropy, score, penalized = (
        stats[name] for name in ('objective/kl', 'ppo/policy/entropy', 'objective/score', PENALIZED)
    )
    most = KL_TARGETS * adaptive.target if adaptive else KL_PER_TOKEN * task.response_length
    if kl > most:
        alarms.append(
            Alarm(
                'objective/kl',
                kl,
                most,
                'the policy has left the language model behind: lower --ppo.lr '
                'or raise --rewards.kl_coef',
            )
        )
    elif kl > most / 2 and score > first['objective/score']:
        alarms.append(
            Alarm(
                'objective/kl',
                kl,
                most / 2,
                'the score rises while the KL divergence explodes: the '
                'policy finds blind spots of the reward model; raise --rewards.kl_coef',
            )
        )
    if entropy < LEAST_ENTROPY:
        alarms.append(
            Alarm(
                'ppo/policy/entropy',
                entropy,
                LEAST_ENTROPY,
                'the policy says always the same: lower --ppo.lr or raise --rewards.kl_coef',
            )
        )
    if penalized > MOST_PENALIZED:
        alarms.append(
            Alarm(
                PENALIZED,
                penalized,
                MOST_PENALIZED,
                f'hardly a response has token {task.truncate_token} at or after position'
                f' {task.truncate_after}, so they score {task.penalty_reward_value}; see'
                ' --task.truncate_token, --task.truncate_after and --task.penalty_reward_value',
            )
        )
    return alarms


def reward_alarms(
    stats: dict[str, float],
    agreements: Sequence[float],
    losses: Sequence[float],
    *,
    batch_size: int,
    guessing_loss: float,
) -> list[Alarm]:
    """The alarms of a step of reward training. stats: train_batch's.

    agreements, losses: of the last quarter of all steps, once that is over, else empty: how far
    rewards agreed with the labels of each batch (see label_types.agreement), and the loss, both
    before the batch was learned. guessing_loss: the loss without looking at the responses.
    """
    alarms = not_finite(stats, ['loss'])
    if not agreements or alarms:
        return alarms
    agreement = sum(agreements) / len(agreements)
    limit = -SIGNIFICANT / math.sqrt(batch_size * len(agreements))
    if agreement < limit:
        alarms.append(
            Alarm(
                'agreement',
                agreement,
                limit,
                'the reward model is worse than chance on labels that it has not seen: is '
                'their sign the wrong way round, or the learning rate too high?',
            )
        )
    loss = sum(losses) / len(losses)
    if loss > FAR_ABOVE_GUESSING * guessing_loss:
        alarms.append(
            Alarm(
                'loss',
                loss,
                FAR_ABOVE_GUESSING * guessing_loss,
                'the loss of the reward model ended far above that of '
                f'guessing, {guessing_loss:.4g}: lower its learning rate',
            )
        )
    return alarms


class HealthMonitor:
    """The health_monitor that stops the line. mode: that of --run.on_anomaly."""

    def __init__(self, mode: str, comm: Comm) -> None:
        self.mode, self.comm = mode, comm
        self.first: dict[str, float] | None = None  # statistics of the first step
        self.quiet_until: dict[str, int] = {}  # statistic: step

    def report(
        self,
        alarms: Sequence[Alarm],
        trainer: PPOTrainer | RewardModelTrainer,
        checkpointer: Checkpointer,
    ) -> None:
        """Warn of `alarms`, seldom; or save `trainer`, as it is now, and raise UserError."""
        if not alarms or self.mode == 'off':
            return
        step = trainer.state_dict()['step']
        if self.mode == 'stop':
            checkpointer.save_on_error(trainer)
            raise UserError(
                f'stopped at step {step} by --run.on_anomaly stop: {"; ".join(map(str, alarms))}'
            )
        for alarm in alarms:
            if step >= self.quiet_until.get(alarm.statistic, 0) and self.comm.rank == 0:
                log_line(f'WARNING: step {step}: {alarm}')
                self.quiet_until[alarm.statistic] = step + SELDOM
