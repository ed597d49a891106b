"""The hooks of both trainings: what the console shows, alarms, and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lm_human_preferences.training import console, health
from lm_human_preferences.training.loop import Hook, Trainer
from lm_human_preferences.training.time_left import TimeLeft, as_text
from lm_human_preferences.utils.core import weighted_mean
from lm_human_preferences.utils.logging import log_as_original, log_line, progress

if TYPE_CHECKING:
    from types import TracebackType

    import torch

    from lm_human_preferences.checkpointing.checkpointer import Checkpointer
    from lm_human_preferences.distributed.comm import Comm
    from lm_human_preferences.hparams import policy_options
    from lm_human_preferences.training.trainers import PolicyTrainer, RewardTrainer


def policy_hooks(
    trainer: PolicyTrainer,
    checkpointer: Checkpointer,
    clock: TimeLeft,
    is_valid: Callable[[torch.Tensor], torch.Tensor],
    decoder: console.Decoder,
) -> list[Hook]:
    """What happens after each step of a policy's training.

    clock: of the whole command, which has a phase 'policy'. is_valid: tells which responses score
    without penalty, see lm_tasks.filter_fn_from_hparams. decoder: of the policy's encoding.
    """
    hparams, comm = trainer.hparams, trainer.comm
    clock.begin('policy', trainer.steps_done / trainer.total_steps)
    return [
        Samples(trainer, decoder),
        ProgressBar(
            trainer,
            comm,
            clock,
            name='policy',
            unit='episode',
            per_step=hparams.ppo.batch_size,
            shown={'score': ('objective/score', '.2f'), 'kl': ('objective/kl', '.2f')},
        ),
        PolicyTable(hparams, comm, clock, steps=trainer.total_steps),
        health.PolicyHealth(hparams.run.on_anomaly, trainer, checkpointer, comm, is_valid),
        Checkpoints(
            trainer,
            checkpointer,
            interval=hparams.run.save_interval,
            save_last=True,
            save_on_error=True,
        ),
    ]


def reward_hooks(
    trainer: RewardTrainer,
    checkpointer: Checkpointer,
    on_anomaly: str,
    clock: TimeLeft,
    phase: str = 'reward model',
) -> list[Hook]:
    """What happens after each step of a reward model's training.

    on_anomaly: --run.on_anomaly. clock: of the whole command, which has this phase.
    """
    hparams, comm = trainer.hparams, trainer.comm
    in_all = trainer.labels_after(trainer.total_steps)
    clock.begin(phase, trainer.labels_after(trainer.steps_done) / in_all)
    return [
        ProgressBar(
            trainer,
            comm,
            clock,
            name=phase,
            unit='batch',
            per_step=1,
            shown={'loss': ('loss', '.3f')},
        ),
        RewardTable(trainer, clock),
        health.RewardHealth(on_anomaly, trainer, checkpointer, comm),
        HeldOut(trainer),
        # The last step is not saved here: the model is, once it is normalised.
        Checkpoints(
            trainer,
            checkpointer,
            interval=hparams.run.save_interval,
            save_last=False,
            save_on_error=False,
        ),
    ]


class Samples(Hook):
    """Shows the first few episodes of a PPO step and, as the original did, how long it took."""

    def __init__(self, trainer: PolicyTrainer, decoder: console.Decoder) -> None:
        self.trainer = trainer
        self.decoder = decoder

    def after_step(self, step: int, stats: Mapping[str, float]) -> None:
        """Print what is due, on rank 0; steps are counted from 0 there."""
        trainer = self.trainer
        rollout = trainer.rollout
        if rollout is None or trainer.comm.rank != 0:
            return
        kl = (rollout.logprobs - rollout.ref_logprobs).sum(1)
        console.show_samples(
            self.decoder,
            (rollout.queries, rollout.scored_responses, rollout.scores, kl),
            step=step - 1,
            total_steps=trainer.total_steps,
            is_logged=trainer.logger.is_due(step - 1),
            kl_coef=stats['objective/kl_coef'],
        )
        seconds = trainer.step_seconds
        episodes_per_second = trainer.hparams.ppo.batch_size / seconds
        log_as_original(
            f'[ppo_step {step - 1}] step_time={seconds:.2f}s, eps/s={episodes_per_second:.2f}'
        )


class ProgressBar(Hook):
    """A bar on the console.

    clock: whose pauses the bar's estimate leaves out. name: what is trained. A step advances the
    bar by `per_step` of `unit`. shown: the statistics beside it, {what they are called there:
    (their name, format)}.
    """

    def __init__(
        self,
        trainer: Trainer,
        comm: Comm,
        clock: TimeLeft,
        *,
        name: str,
        unit: str,
        per_step: int,
        shown: Mapping[str, tuple[str, str]],
    ) -> None:
        self.clock = clock
        self.paused_seconds = clock.paused_seconds  # that the bar knows of
        self.per_step = per_step
        self.shown = shown
        self.bar = progress(
            total=trainer.total_steps * per_step,
            initial=trainer.steps_done * per_step,
            comm=comm,
            desc=name,
            unit=unit,
        )

    def before_step(self, step: int) -> None:
        """Leave out the pauses since the last step."""
        seconds = self.clock.paused_seconds - self.paused_seconds
        self.paused_seconds = self.clock.paused_seconds
        if not self.bar.disable:
            self.bar.start_t += seconds
            self.bar.last_print_t += seconds

    def after_step(self, step: int, stats: Mapping[str, float]) -> None:
        """Advance the bar."""
        texts: dict[str, Any] = {}
        for label, (name, number_format) in self.shown.items():
            texts[label] = format(stats[name], number_format)
        self.bar.set_postfix(texts, refresh=False)
        self.bar.update(self.per_step)

    def __exit__(self, *error: object) -> None:
        self.bar.close()


class PolicyTable(Hook):
    """A line of the policy's table whenever one is due.

    steps: all that there are. clock: of the whole command, which has a phase 'policy'.
    """

    def __init__(
        self, hparams: policy_options.HParams, comm: Comm, clock: TimeLeft, *, steps: int
    ) -> None:
        self.hparams = hparams
        self.comm = comm
        self.clock = clock
        self.steps = steps
        self.table = console.policy_table(has_spread=hparams.rewards.members > 1)

    def after_step(self, step: int, stats: Mapping[str, float]) -> None:
        """Print the line, on rank 0."""
        is_printed = console.is_due(step, self.steps, self.hparams.run.log_interval)
        if self.comm.rank != 0 or not is_printed:
            return
        share = step / self.steps
        batch_size = self.hparams.ppo.batch_size
        self.table.add(
            step=f'{step}/{self.steps}',
            episodes=step * batch_size,
            score=stats['objective/score'],
            spread=stats.get('objective/score_std', 0.0),
            KL=stats['objective/kl'],
            KL_coef=stats['objective/kl_coef'],
            loss=stats['ppo/loss/total'],
            episodes_per_second=self.clock.per_second(share, self.steps * batch_size),
            time_left=as_text(self.clock.seconds(share)),
        )


class RewardTable(Hook):
    """A line of the reward model's table whenever one is due; the loss is averaged since the last.

    clock: of the whole command, in the phase of this training.
    """

    def __init__(self, trainer: RewardTrainer, clock: TimeLeft) -> None:
        self.trainer = trainer
        self.clock = clock
        self.table = console.reward_table()
        self.losses: list[float] = []
        self.labels: list[int] = []  # of each of these batches

    def after_step(self, step: int, stats: Mapping[str, float]) -> None:
        """Print the line, on rank 0."""
        trainer = self.trainer
        if trainer.comm.rank != 0:
            return
        learned = trainer.labels_after(step)
        self.losses.append(stats['loss'])
        self.labels.append(learned - trainer.labels_after(step - 1))
        if not console.is_due(step, trainer.total_steps, trainer.hparams.run.log_interval):
            return
        in_all = trainer.labels_after(trainer.total_steps)
        share = learned / in_all
        self.table.add(
            step=f'{step}/{trainer.total_steps}',
            labels=learned,
            loss=weighted_mean(self.losses, self.labels),
            labels_per_second=self.clock.per_second(share, in_all),
            time_left=as_text(self.clock.seconds(share)),
        )
        self.losses.clear()
        self.labels.clear()


class HeldOut(Hook):
    """Measures a reward model by the labels held out, after each epoch.

    In the first epoch, also after 1/8, 1/4 and 1/2 of its steps: until then each label has been
    learned once at most, so these show roughly what fewer labels would have given.
    """

    def __init__(self, trainer: RewardTrainer) -> None:
        self.trainer = trainer
        self.due = {trainer.steps_of_epoch // part for part in (2, 4, 8)}

    def after_step(self, step: int, stats: Mapping[str, float]) -> None:
        """Log what is due, and print the last; all ranks take part."""
        ends_epoch = step % self.trainer.steps_of_epoch == 0
        if step not in self.due and not ends_epoch:
            return
        prediction = self.trainer.predict_held_out()
        if prediction is None:
            return
        self.trainer.logger.log(
            prediction.statistics(), step - 1, tag_prefix='train_reward/held_out/'
        )
        if ends_epoch:
            accuracy = prediction.accuracy
            measured = prediction.agreement if accuracy is None else accuracy
            self.trainer.held_out_by_epoch.append(measured)
        if step == self.trainer.total_steps and self.trainer.comm.rank == 0:
            log_line(f'held out: {prediction}')
            if self.trainer.hparams.epochs > 1:
                log_line(f'held out, {_by_epoch(self.trainer.held_out_by_epoch)}')


def _by_epoch(measured: Sequence[float]) -> str:
    """How well labels were predicted after each epoch, and after which one best."""
    numbers = ', '.join(format(number, '.3f') for number in measured)
    best = measured.index(max(measured)) + 1
    return f'after each epoch: {numbers}; best after epoch {best}, the last is kept'


class Checkpoints(Hook):
    """Saves the trainer every `interval` steps; signals wait for the end of a step meanwhile.

    save_last: also after the last step. save_on_error: also when a step fails, as it is then.
    """

    def __init__(
        self,
        trainer: Trainer,
        checkpointer: Checkpointer,
        *,
        interval: int,
        save_last: bool,
        save_on_error: bool,
    ) -> None:
        self.trainer = trainer
        self.checkpointer = checkpointer
        self.interval = interval
        self.save_last = save_last
        self.save_on_error = save_on_error
        self.signals = checkpointer.defer_signals()

    def __enter__(self) -> Checkpoints:
        self.signals.__enter__()
        return self

    def after_step(self, step: int, stats: Mapping[str, float]) -> None:
        """Save, if it is time to; KeyboardInterrupt if a signal has come."""
        self.checkpointer.after_step(self.trainer)
        is_last = step == self.trainer.total_steps
        if step % self.interval == 0 or (self.save_last and is_last):
            self.checkpointer.save(self.trainer)

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.signals.__exit__(error_type, error, traceback)
        if error is not None and self.save_on_error:
            self.checkpointer.save_on_error(self.trainer)
