"""Labels while a policy trains: before each of its steps, ask, wait for answers, and retrain the
reward model when it is time to (paper, section 2.3).

Rank 0 writes questions, reads answers and decides. While it waits, it tells the other ranks every
second, so that none of them is in one collective for hours, which would time out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from lm_human_preferences import label_types, plans, shell, storage
from lm_human_preferences.errors import UserError, about_option
from lm_human_preferences.hparams.online_options import PEOPLE
from lm_human_preferences.labels import label_files, simulated_labeller
from lm_human_preferences.labels.folder import TRAIN, VALIDATION, LabelFolder, QuestionWriter
from lm_human_preferences.labels.labeller import Labeller, check_name
from lm_human_preferences.labels.task_file import TIES
from lm_human_preferences.online import collected_answers as online_answers
from lm_human_preferences.online import progress
from lm_human_preferences.online.decisions import Batch, Decisions
from lm_human_preferences.online.questions import QuestionSource
from lm_human_preferences.online.retraining import Labels, retrainer_of
from lm_human_preferences.reward_models.places import label_source
from lm_human_preferences.rewards import RewardModel
from lm_human_preferences.runs.run_files import LABELS
from lm_human_preferences.synthetic.known_judge import known_judge
from lm_human_preferences.training.health import RetrainingHealth
from lm_human_preferences.training.loop import Hook
from lm_human_preferences.training.trainers import PolicyTrainer
from lm_human_preferences.utils.logging import announce, log_line

if TYPE_CHECKING:
    from lm_human_preferences.checkpointing.checkpointer import Checkpointer
    from lm_human_preferences.hparams.online_options import ServeHParams
    from lm_human_preferences.policy import Policy
    from lm_human_preferences.training.kl_control import KLController
    from lm_human_preferences.training.networks import Network
    from lm_human_preferences.training.time_left import TimeLeft

POLL_SECONDS = 1.0  # between two looks for answers
REPORT_SECONDS = 60.0  # between two lines about them
HOUR = 3600.0
# Steps from a training of the reward model until the KL divergence shows its effect: the samples of
# the first are from before, and it learns from the new scores; those of the second are from after.
STEPS_TO_REACT = 2


class CollectingTrainer(PolicyTrainer, Protocol):
    """A policy's training, of which people judge what `policy` and `ref_policy` write."""

    policy: Policy
    ref_policy: Policy
    kl_ctl: KLController

    @property
    def networks(self) -> Mapping[str, Network | None]:
        """{scope of its variables: network}"""
        ...


@dataclasses.dataclass(frozen=True)
class _Known:
    """What rank 0 knows before a training of the reward model; every rank gets it.

    labels: to learn from, {field: (labels, ...)}. new: those of them, about the policy's samples,
    that came since the last training; None if there are none. wins: see answers.policy_wins, of the
    comparisons since then.
    """

    batch: Batch
    labels: Labels
    new: Labels | None
    wins: online_answers.Wins

    def to_message(self) -> dict[str, Any]:
        """This as what ranks can send each other, see distributed.messages."""
        return {
            'batch': dataclasses.asdict(self.batch),
            'labels': self.labels,
            'new': self.new,
            'wins': dataclasses.asdict(self.wins),
        }

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> _Known:
        """What `to_message` was called on."""
        return cls(
            batch=Batch(**message['batch']),
            labels=message['labels'],
            new=message['new'],
            wins=online_answers.Wins(**message['wins']),
        )


def hooks(trainer: CollectingTrainer, checkpointer: Checkpointer, clock: TimeLeft) -> list[Hook]:
    """The hook that collects labels while a policy trains; none without --rewards.online.

    clock: of the whole command.
    """
    hparams = trainer.hparams
    if hparams.rewards.online is None:
        return []
    reward_models = []
    for scope in plans.policy_networks(hparams).retrained:
        reward_model = trainer.networks[scope]
        assert isinstance(reward_model, RewardModel)
        reward_models.append(reward_model)
    return [Collection(trainer, reward_models, checkpointer, clock, label_source(hparams))]


@contextlib.contextmanager
def serve(folder: str, options: ServeHParams) -> Iterator[None]:
    """Within the block, people answer the questions of a folder on a page; prints their links."""
    # Its libraries are for those who want a page.
    from lm_human_preferences.labels.page.server import LabelServer, missing_tls

    names = [name.strip() for name in options.labellers.split(',')]
    with about_option(options.option_name('labellers')):
        for name in names:
            check_name(name)
    with LabelServer(folder, names, options, note=log_line) as server:
        if warning := missing_tls(options):
            announce(warning)
        announce(*(f'answer as {name}: {link}' for name, link in server.links.items()))
        yield


class Collection(Hook):
    """Collects labels while `trainer` trains a policy; entered on every rank.

    reward_models: what the policy learns from, several for an ensemble. checkpointer: saves the run
    if people do not answer in time; its seed is the run's. clock: does not count the waits for
    people. labels: source of queries that may stand in, see lm_tasks.make_query_sampler.
    """

    def __init__(
        self,
        trainer: CollectingTrainer,
        reward_models: Sequence[RewardModel],
        checkpointer: Checkpointer,
        clock: TimeLeft,
        labels: str | None,
    ) -> None:
        hparams = trainer.hparams
        online, new_model = hparams.rewards.online, hparams.rewards.train_new_model
        assert online is not None and new_model is not None and checkpointer.seed is not None
        self.trainer, self.checkpointer, self.comm = trainer, checkpointer, trainer.comm
        self.clock = clock
        self.online, self.new_model, self.source_of_queries = online, new_model, labels
        self.schedule = online.schedule(trainer.total_steps)
        self.retrainer = retrainer_of(
            reward_models,
            ref_policy=trainer.ref_policy,
            hparams=new_model,
            comm=trainer.comm,
            seed=checkpointer.seed,
        )
        self.health = RetrainingHealth(hparams.run.on_anomaly, trainer, checkpointer, trainer.comm)
        self.desk: Desk | None = None  # of rank 0
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Collection:
        if self.comm.rank == 0:
            with contextlib.ExitStack() as stack:
                self.desk = self._open(stack)
                self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _open(self, stack: contextlib.ExitStack) -> Desk:
        """What reads and writes the folder of labels, which is created if it does not exist."""
        trainer, hparams = self.trainer, self.trainer.hparams
        directory = hparams.run.directory or stack.enter_context(tempfile.TemporaryDirectory())
        folder, encoding = os.path.join(directory, LABELS), trainer.policy.trained_model.encoding
        writer = stack.enter_context(QuestionWriter(folder, self._task(encoding.name), encoding))
        decisions = stack.enter_context(contextlib.closing(Decisions(writer.folder.path)))
        assert self.checkpointer.seed is not None
        source = QuestionSource(
            policy=trainer.policy,
            ref_policy=trainer.ref_policy,
            writer=writer,
            hparams=hparams,
            seed=self.checkpointer.seed,
            labels=self.source_of_queries,
        )
        simulated = []
        if self.online.source != PEOPLE:
            count = self.online.labellers if self.online.repeated else 1
            for number in range(1, count + 1):
                labeller = Labeller(writer.folder, f'{self.online.source}{number}')
                simulated.append(stack.enter_context(labeller))
        if hparams.run.serve is not None:
            stack.enter_context(serve(writer.folder.path, hparams.run.serve))
        return Desk(self, writer.folder, source, decisions, simulated)

    def _task(self, encoding: str) -> dict[str, Any]:
        """What the folder's task.json has to hold."""
        label_type, instructions = self.new_model.labels.type, self.online.instructions
        text = label_types.get(label_type).instructions
        if instructions is not None:
            text = storage.read_text(instructions).strip()
        record = {
            'label_type': label_type,
            'task': self.trainer.hparams.task.to_nested_dict(),
            'instructions': text,
            'encoding': encoding,
        }
        return {**record, TIES: True} if self.online.ties else record

    def before_step(self, step: int) -> None:
        """Ask and wait until `step` has its labels, and train the reward model if it is time to.

        UserError, with everything saved, if people do not answer in time.
        """
        if self.desk is not None:
            self.desk.ask(step)
        with self.clock.pause():
            self._wait(step)
        if self.schedule.is_trained_at(step):
            self._train(step)

    def after_step(self, step: int, stats: Mapping[str, float]) -> None:
        """Log the KL coefficient once the controller has seen a KL divergence that a new reward
        model has influenced: that of the second step after its training."""
        begun = step - STEPS_TO_REACT
        if begun >= 0 and self.schedule.is_trained_at(begun):
            after = {'kl_coef_after': self.trainer.kl_ctl.value}
            self.trainer.logger.log(after, step - 1, tag_prefix=progress.TAG)

    def _wait(self, step: int) -> None:
        """Return when l(n) labels are there; all ranks look at the same time."""
        begin = time.monotonic()
        while True:
            missing = self.desk.missing(step) if self.desk is not None else 0
            waited = time.monotonic() - begin
            stop_requested = self.checkpointer.stop_requested
            states = self.comm.all_gather_object((missing, waited, stop_requested))
            missing, waited, _ = states[0]
            if missing <= 0:
                return
            if any(stop for _, _, stop in states):
                self.checkpointer.after_step(self.trainer)  # saves, and raises KeyboardInterrupt
            if self.online.patience is not None and waited >= self.online.patience * HOUR:
                self._give_up(missing, step)
            if self.desk is not None:
                self.desk.report_waiting(step, missing)
            time.sleep(POLL_SECONDS)

    def _give_up(self, missing: int, step: int) -> None:
        """Save, and raise the UserError that says how to go on."""
        self.checkpointer.save(self.trainer)
        self.checkpointer.wait()
        self.comm.barrier()
        run = self.trainer.hparams.run
        how = 'nothing is saved, because --save_dir is None'
        if run.directory is not None:
            folder = os.path.join(run.directory, LABELS)
            how = (
                f'step {step} is saved: {progress.label_command(folder)} answers, then'
                f' {shell.typed("./launch.py resume", str(run.save_dir))} goes on'
            )
        raise UserError(
            f'--rewards.online.patience {self.online.patience:g}: {missing} of'
            f' {self.schedule.labels_at(step)} labels are still missing; {how}'
        )

    def _train(self, step: int) -> None:
        """Retrain the reward model, and log how it went."""
        message = self.desk.known(step).to_message() if self.desk is not None else None
        message = self.comm.all_gather_object(message)[0]
        assert message is not None
        known = _Known.from_message(message)
        previous = self.retrainer.predict(known.new) if known.new is not None else None
        outcome = self.retrainer.train(known.labels, step)
        self.trainer.reward_version += 1
        report = progress.Report(
            batch=known.batch,
            loss=outcome.loss,
            held_out=outcome.held_out,
            previous=previous,
            wins=known.wins,
            kl_coef=self.trainer.kl_ctl.value,
        )
        statistics = report.statistics()
        self.trainer.logger.log(statistics, step, tag_prefix=progress.TAG)
        if self.desk is not None:
            self.desk.decisions.record_outcome(known.batch, statistics)
            log_line(report.line(self.schedule))
        if outcome.held_out is not None:
            self.health.check(step, known.batch.model, outcome.held_out)
        else:  # the labels that came since then judge the previous model
            self.health.check(step, known.batch.model - 1, previous)


class Desk:
    """Where rank 0 writes questions, reads answers and decides.

    simulated: labellers who answer at once, where nobody else does.
    """

    def __init__(
        self,
        collection: Collection,
        folder: LabelFolder,
        source: QuestionSource,
        decisions: Decisions,
        simulated: list[Labeller],
    ) -> None:
        self.schedule, self.online = collection.schedule, collection.online
        encoding = collection.trainer.policy.trained_model.encoding
        self.folder, self.source, self.decisions = folder, source, decisions
        self.simulated = simulated
        self.judge = simulated_labeller.small_tokens
        if self.online.source == 'mock':
            self.judge = known_judge(encoding)
        self.answered = 0  # questions, when they were last counted
        self.reported = -REPORT_SECONDS  # when a line was last printed

    def ask(self, step: int) -> None:
        """Ask what is due before `step`, and have simulated labellers answer."""
        counts = {
            TRAIN: self.schedule.questions_at(step) + self.decisions.asked_again(step),
            VALIDATION: self.schedule.validation_at(step),
        }
        added = self.source.ask(step, counts)
        is_first = self.answered == 0  # a kill may have left questions without an answer
        for labeller in self.simulated if added or is_first else ():
            simulated_labeller.simulate(labeller, self.judge, error=self.online.error)

    def missing(self, step: int) -> int:
        """How many labels `step` lacks; other questions are asked in place of those skipped."""
        wanted = self.schedule.labels_at(step)
        if self.answered < wanted:
            self.folder.refresh()
            self.answered = online_answers.answered(self.folder)
        if self.answered < wanted:
            skipped = online_answers.retired(self.folder) - self.decisions.asked_again(step)
            if skipped > 0:
                self.decisions.ask_again(step, skipped)
                self.ask(step)
        return wanted - self.answered

    def report_waiting(self, step: int, missing: int) -> None:
        """Print a line now and then."""
        if time.monotonic() - self.reported < REPORT_SECONDS:
            return
        self.reported = time.monotonic()
        wanted = self.schedule.labels_at(step)
        active = online_answers.active_labellers(self.folder)
        log_line(progress.waiting_line(missing, wanted, active, self.folder.path))

    def known(self, step: int) -> _Known:
        """What the reward model learns from before `step`: what was decided before an interruption,
        else all that is there."""
        decided = self.decisions.batches.get(step)
        lines = decided.answers if decided else self.folder.lines_read()
        folder = LabelFolder(self.folder.path, lines)
        answers = online_answers.collected(folder)
        batch = Batch(
            model=self.schedule.models_at(step),
            step=step,
            wanted=self.schedule.labels_at(step),
            labels=len(answers),
            answers=lines,
            digest=online_answers.digest(answers),
        )
        if decided is None:
            self.decisions.learn_from(batch)
        elif decided.digest != batch.digest:
            raise UserError(
                f'{folder.path}: answers from which a reward model has learned were changed;'
                ' restore the files, or begin again under another NAME'
            )
        before = self.decisions.last_batch_before(step)
        new, wins = None, online_answers.Wins(0, 0)
        if before is not None:
            newer = online_answers.newer(folder, answers, before.answers)
            wins = online_answers.policy_wins(folder, newer)
            of_policy = online_answers.of_kind(folder, newer, TRAIN)
            new = label_files.of_answers(folder, of_policy) if of_policy else None
        return _Known(batch, label_files.of_answers(folder, answers), new, wins)
