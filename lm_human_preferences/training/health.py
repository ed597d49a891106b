"""Alarms for a training that goes wrong, and what --run.on_anomaly does then.

Alarms are rules on the statistics of steps. These are means over all ranks, so that all ranks come
to the same decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.policy_options import HParams
from lm_human_preferences.training.loop import Hook
from lm_human_preferences.utils.core import weighted_mean
from lm_human_preferences.utils.logging import ALARMS, log_line

if TYPE_CHECKING:
    import torch

    from lm_human_preferences.checkpointing.checkpointer import Checkpointer
    from lm_human_preferences.distributed.comm import Comm
    from lm_human_preferences.training.loop import Trainer
    from lm_human_preferences.training.trainers import PolicyTrainer, Prediction, RewardTrainer

PENALIZED = 'share of penalties'
MOST_PENALIZED = 0.95
KL_TARGETS = 10  # the limit of the KL divergence, in multiples of its target
KL_PER_TOKEN = 2  # the same without a target, in nats for each token of a response
LEAST_ENTROPY = 0.02  # nats for each token
SIGNIFICANT = 2  # standard deviations of chance
FAR_ABOVE_GUESSING = (
    1.5  # the limit of a reward model's last loss, in multiples of that of guessing
)
LEAST_SKILL = 0.2  # of a useful reward model: how far it is on the way from chance to perfection
# The limit of the spread of an ensemble's members, in multiples of that of the first step: in the
# small world it grew by 1.4 up to the KL that 192 labels are good for, and by 2 far beyond
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
    'the members of the ensemble disagree far more than at the start: the policy has left what its'
    ' labels tell them; raise --rewards.kl_coef or lower --rewards.adaptive_kl.target, or collect'
    ' labels on its own samples (--rewards.online)'
)
COLLAPSED = (
    'the policy gives the same response every time: lower --ppo.lr or raise --rewards.kl_coef'
)
WORSE_THAN_CHANCE = (
    'the reward model is worse than chance on labels that it has not seen: is their sign the wrong'
    ' way round, or the learning rate too high?'
)


NOT_ABOVE_CHANCE = (
    'the reward model predicts labels that it has not seen no better than chance: look at the'
    ' agreement of labellers (./launch.py labels), or collect more labels before the first episode'
)


class Alarm(NamedTuple):
    """A `statistic` whose `value` is beyond its `limit`; `text` says what it means and may help.

    interval: the 95 % confidence interval of an estimate.
    """

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
    """An alarm for the first of `names` whose statistic is NaN or infinite."""
    for name in names:
        if not math.isfinite(stats[name]):
            return [Alarm(name, stats[name], math.inf, NOT_FINITE)]
    return []


def policy_alarms(
    stats: Mapping[str, float],
    first: Mapping[str, float],
    hparams: HParams,
) -> list[Alarm]:
    """The alarms of a PPO step.

    stats: what PPOTrainer.step returned, and PENALIZED; first: those of the first step.
    """
    alarms = not_finite(stats, ['ppo/loss/total', 'objective/kl', 'objective/score'])
    task = hparams.task
    adaptive = hparams.rewards.adaptive_kl
    kl = stats['objective/kl']
    entropy = stats['ppo/policy/entropy']
    penalized = stats[PENALIZED]
    score_rises = stats['objective/score'] > first['objective/score']
    most_kl = KL_TARGETS * adaptive.target if adaptive else KL_PER_TOKEN * task.response_length
    if kl > most_kl:
        alarms.append(Alarm('objective/kl', kl, most_kl, FAR_FROM_START))
    elif kl > most_kl / 2 and score_rises:
        alarms.append(Alarm('objective/kl', kl, most_kl / 2, EXPLOITING))
    if 'objective/score_std' in stats:
        spread = stats['objective/score_std']
        most_spread = SPREAD_GROWTH * first['objective/score_std']
        if spread > most_spread:
            alarms.append(Alarm('objective/score_std', spread, most_spread, BEYOND_LABELS))
    if entropy < LEAST_ENTROPY:
        alarms.append(Alarm('ppo/policy/entropy', entropy, LEAST_ENTROPY, COLLAPSED))
    if penalized > MOST_PENALIZED:
        option, what = 'truncate_token', f'token {task.truncate_token}'
        if task.truncate_text:
            option, what = 'truncate_text', repr(task.truncate_text)
        text = (
            f'hardly any response has {what} at or after position'
            f' {task.truncate_after}, so they score {task.penalty_reward_value}; see'
            f' --task.{option}, --task.truncate_after and --task.penalty_reward_value'
        )
        alarms.append(Alarm(PENALIZED, penalized, MOST_PENALIZED, text))
    return alarms


def reward_alarms(
    stats: Mapping[str, float],
    agreements: Sequence[float],
    losses: Sequence[float],
    *,
    labels: Sequence[int],
    guessing_loss: float,
) -> list[Alarm]:
    """The alarms of a step of reward training. stats: what RewardTrainer.step returned.

    agreements, losses, labels: of each of the last quarter of all steps, once they are done, else
    empty: how far rewards agreed with the labels (see label_types.agreement) and the loss, both
    before the batch was learned, and its number of labels. guessing_loss: the loss of a model that
    does not look at the responses.
    """
    alarms = not_finite(stats, ['loss'])
    if not agreements or alarms:
        return alarms
    agreement = weighted_mean(agreements, labels)
    least_agreement = -SIGNIFICANT / math.sqrt(sum(labels))
    if agreement < least_agreement:
        alarms.append(Alarm('agreement', agreement, least_agreement, WORSE_THAN_CHANCE))
    loss = weighted_mean(losses, labels)
    most_loss = FAR_ABOVE_GUESSING * guessing_loss
    if loss > most_loss:
        text = (
            'the loss of the reward model ended far above that of guessing, '
            f'{guessing_loss:.4g}: lower its learning rate'
        )
        alarms.append(Alarm('loss', loss, most_loss, text))
    return alarms


def retraining_alarms(model: int, prediction: Prediction) -> list[Alarm]:
    """The alarm of the `model`-th reward model of an online run, if there is one.

    It rings where the model may be no better than chance and is surely not much better. prediction:
    of labels that it has not learned from.
    """
    value, chance, name = prediction.accuracy, prediction.chance, 'accuracy'
    if value is None or chance is None:
        value, chance, name = prediction.agreement, 0.0, 'agreement'
    interval = low, high = prediction.interval()
    useful = chance + LEAST_SKILL * (1 - chance)
    if low > chance or high >= useful:  # the second: so few labels cannot tell
        return []
    statistic = f'{name} of reward model {model} on {prediction.labels} labels'
    return [Alarm(statistic, value, chance, NOT_ABOVE_CHANCE, interval)]


class HealthMonitor(Hook):
    """Warns of alarms, or stops the training, as --run.on_anomaly says.

    trainer: what is saved, by `checkpointer`, before a stop.
    """

    def __init__(self, mode: str, trainer: Trainer, checkpointer: Checkpointer, comm: Comm) -> None:
        self.mode = mode
        self.trainer = trainer
        self.checkpointer = checkpointer
        self.comm = comm
        self.quiet_until: dict[str, int] = {}  # {statistic: step}

    def alarms(self, step: int, stats: Mapping[str, float]) -> list[Alarm]:
        """The alarms after `step` steps; stats: of the last one."""
        raise NotImplementedError

    def after_step(self, step: int, stats: Mapping[str, float]) -> None:
        """Warn of the alarms, of each at most once in REPEAT_AFTER steps.

        Or, if the mode is 'stop', save and raise UserError.
        """
        self.raise_alarms(step, self.alarms(step, stats))

    def raise_alarms(self, step: int, alarms: Sequence[Alarm]) -> None:
        """Do what the mode asks for; see after_step."""
        if not alarms or self.mode == 'off':
            return
        if self.mode == 'stop':
            self._log(step, alarms)
            self.checkpointer.save_on_error(self.trainer)
            reasons = '; '.join(map(str, alarms))
            raise UserError(f'stopped at step {step} by --run.on_anomaly stop: {reasons}')
        for alarm in alarms:
            if step >= self.quiet_until.get(alarm.statistic, 0) and self.comm.rank == 0:
                log_line(f'WARNING: step {step}: {alarm}')
                self._log(step, [alarm])
                self.quiet_until[alarm.statistic] = step + REPEAT_AFTER

    def _log(self, step: int, alarms: Sequence[Alarm]) -> None:
        """Have TensorBoard show the alarms with the last of `step` steps."""
        text = '\n'.join(f'    {alarm}' for alarm in alarms)  # indented: nothing in it is markup
        self.trainer.logger.log_text(ALARMS, text, max(step - 1, 0))


class PolicyHealth(HealthMonitor):
    """Watches the training of a policy; see policy_alarms."""

    trainer: PolicyTrainer

    def __init__(
        self,
        mode: str,
        trainer: PolicyTrainer,
        checkpointer: Checkpointer,
        comm: Comm,
        is_valid: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """is_valid: tells of responses (batch, response_length) which score without penalty."""
        super().__init__(mode, trainer, checkpointer, comm)
        self.is_valid = is_valid
        # Of the first step with the present reward model: the scores of two models do not compare.
        self.first: Mapping[str, float] | None = None
        self.reward_version = trainer.reward_version

    def alarms(self, step: int, stats: Mapping[str, float]) -> list[Alarm]:
        """Compare the last step with the limits, and with the first step of this process."""
        if self.reward_version != self.trainer.reward_version:
            self.reward_version, self.first = self.trainer.reward_version, None
        self.first = self.first or stats
        everything = {**stats, PENALIZED: self._penalized_share()}
        return policy_alarms(everything, self.first, self.trainer.hparams)

    def _penalized_share(self) -> float:
        """Share over all ranks of the last responses that score the penalty."""
        rollout = self.trainer.rollout
        assert rollout is not None
        valid = self.is_valid(rollout.responses).float().mean().item()
        return 1 - self.comm.all_reduce_mean({'valid': valid})['valid']


class RewardHealth(HealthMonitor):
    """Watches the training of a reward model; see reward_alarms.

    It can judge the outcome only by the batches of this process: those before an interruption are
    not known.
    """

    trainer: RewardTrainer

    def __init__(
        self, mode: str, trainer: RewardTrainer, checkpointer: Checkpointer, comm: Comm
    ) -> None:
        super().__init__(mode, trainer, checkpointer, comm)
        self.guessing_loss = trainer.guessing_loss()
        self.agreements: list[float] = []
        self.losses: list[float] = []
        self.labels: list[int] = []

    def alarms(self, step: int, stats: Mapping[str, float]) -> list[Alarm]:
        """Compare the last batch with the limits; after the last step, the last quarter of all."""
        assert self.trainer.agreement is not None
        self.agreements.append(self.trainer.agreement)
        self.losses.append(stats['loss'])
        self.labels.append(self.trainer.labels_after(step) - self.trainer.labels_after(step - 1))
        judged = slice(0)
        if step == self.trainer.total_steps:
            judged = slice(-self.trainer.judged_steps, None)
        return reward_alarms(
            stats,
            self.agreements[judged],
            self.losses[judged],
            labels=self.labels[judged],
            guessing_loss=self.guessing_loss,
        )


class RetrainingHealth(HealthMonitor):
    """Watches the reward models that are retrained while a policy trains.

    See retraining_alarms.
    """

    def alarms(self, step: int, stats: Mapping[str, float]) -> list[Alarm]:
        """None: a step of the policy tells nothing about its reward model."""
        return []

    def check(self, step: int, model: int, prediction: Prediction | None) -> None:
        """Judge the `model`-th reward model, trained before `step`, by how it predicts labels."""
        if prediction is not None:
            self.raise_alarms(step, retraining_alarms(model, prediction))
