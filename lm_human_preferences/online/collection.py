"""Collection of labels during the training of a policy, as in section 2.3 of the paper.

Rank 0 has the folder of labels. A resumed run learns from the same answers, although people may
have added others: used.jsonl in the folder gets a line for each reward model before it learns:

    {"model": 5, "step": 130, "wanted": 512, "labels": 530, "answers": {"anna": 3}, "digest": ""}
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lm_human_preferences import errors, storage
from lm_human_preferences.errors import UserError, about_option, option_renamed
from lm_human_preferences.hparams.reward_options import COLLECTED
from lm_human_preferences.labels import json_lines, label_files, simulated, training_data
from lm_human_preferences.labels.answers import Answer
from lm_human_preferences.labels.folder import TRAIN, LabelFolder, QuestionWriter
from lm_human_preferences.labels.held_out import Labels, Prediction, split
from lm_human_preferences.labels.labeller import Labeller, names_in
from lm_human_preferences.labels.task_file import new_task
from lm_human_preferences.online.questions import QuestionSource, label_command
from lm_human_preferences.online.retraining import retrainer_of
from lm_human_preferences.plan.phases import TrainPolicy
from lm_human_preferences.runs import run_record
from lm_human_preferences.runs.run_files import LABELS, USED
from lm_human_preferences.storage.schema import COUNT, matches_schema
from lm_human_preferences.synthetic.known_reward import KnownReward
from lm_human_preferences.trainers.policy_trainer import PPOTrainer
from lm_human_preferences.trainers.reward_trainer import label_counts
from lm_human_preferences.training.loop import Hook
from lm_human_preferences.utils.logging import announce

if TYPE_CHECKING:
    from lm_human_preferences.checkpointing.checkpointer import Checkpointer

POLL_SECONDS = 1.0  # seconds between two checks for new answers
REPORT_SECONDS = 60.0  # seconds between two messages about missing labels
HOUR = 3600.0
TAG = 'online/'  # prefix of the statistics' names in TensorBoard
_USED = {'step': COUNT, 'answers': dict, 'digest': str}  # required fields of each used.jsonl line


class Collection(Hook):
    """Hook to collect labels while `trainer` trains; a context manager, entered on every rank."""

    def __init__(self, trainer: PPOTrainer, phase: TrainPolicy, checkpointer: Checkpointer) -> None:
        online = phase.settings.rewards.online
        assert online is not None and checkpointer.seed is not None
        self.trainer, self.phase, self.checkpointer = trainer, phase, checkpointer
        self.comm, self.patience, self.seed = trainer.comm, online.patience, checkpointer.seed
        self.schedule = online.schedule(trainer.total_steps)
        self.retrainer = retrainer_of(trainer, phase, checkpointer.seed)
        self._stack = contextlib.ExitStack()
        self._labels: RunLabels | None = None  # None on all ranks but rank 0

    def __enter__(self) -> Collection:
        if self.comm.rank == 0:
            with contextlib.ExitStack() as stack:
                self._labels = RunLabels(self.trainer, self.phase, self.seed, stack)
                self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def _on_rank_0(self) -> RunLabels:
        assert self._labels is not None
        return self._labels

    def before_step(self, step: int) -> None:
        """Ask questions, wait for the labels that `step` needs, and retrain if that is due.

        UserError if labels are missing after --rewards.online.patience hours.
        """
        self.comm.on_rank_0(lambda: self._on_rank_0.ask(step))
        self._wait(step)
        if self.schedule.is_trained_at(step):
            self._learn(step)
        elif not self.retrainer.is_trained:  # Checkpoints do not contain reward heads.
            last = max(each for each in self.schedule.training_steps() if each < step)
            self.retrainer.train(self._labels_of(last), last)

    def _wait(self, step: int) -> None:
        begin = time.monotonic()
        while True:
            missing = self.comm.on_rank_0(lambda: self._on_rank_0.missing(step))
            if missing <= 0:
                return
            # After a stop signal, the checkpointer saves the run and raises an exception.
            self.checkpointer.after_step(self.trainer)
            waited = self.comm.all_gather_object(time.monotonic() - begin)[0]
            if self.patience is not None and waited >= self.patience * HOUR:
                self._give_up(missing, step)
            time.sleep(POLL_SECONDS)

    def _give_up(self, missing: int, step: int) -> None:
        """Save a checkpoint, and raise a UserError that says how to resume."""
        self.checkpointer.save(self.trainer)
        self.checkpointer.wait()
        self.comm.barrier()
        run = self.phase.run
        folder = os.path.join(str(run.directory), LABELS)
        raise UserError(
            f'--rewards.online.patience {self.patience:g}: the time to wait is over, but {missing}'
            f' of {self.schedule.labels_at(step)} labels are still missing; step {step} is saved.'
            f' Answer questions with `{label_command(folder)}`, then continue with'
            f' `{errors.typed("./launch.py resume", str(run.save_dir))}`'
        )

    def _labels_of(self, step: int) -> Labels:
        """Return, on every rank, the labels that the reward model learns before `step`."""
        return self.comm.on_rank_0(lambda: self._on_rank_0.learned_at(step))

    def _learn(self, step: int) -> None:
        """Retrain the reward model, and log how it went."""
        labels = self._labels_of(step)
        loss, prediction = self.retrainer.train(labels, step)
        if self._labels is not None:
            used = self._labels.used[step]
            self.trainer.logger.log(statistics(used, loss, prediction), step, tag_prefix=TAG)
            announce(line(used, self.schedule.retrainings + 1, loss, prediction))


class RunLabels:
    """Label folder of an online run, on rank 0; `stack` closes the files and the labelling page."""

    def __init__(
        self, trainer: PPOTrainer, phase: TrainPolicy, seed: int, stack: contextlib.ExitStack
    ) -> None:
        encoding = trainer.policy.trained_model.encoding
        online = phase.settings.rewards.online
        assert online is not None and phase.retraining is not None
        self.online, self.phase, self.encoder = online, phase, trainer.policy.encoder
        self.reward_settings = phase.retraining.settings
        self.schedule = online.schedule(trainer.total_steps)
        text = None
        if online.instructions is not None:
            with about_option(online.option_name('instructions')):
                text = storage.read_text(online.instructions).strip()
        label_type = self.reward_settings.labels.type
        task = new_task(label_type, phase.settings.task.to_nested_dict(), text, online.ties)
        directory = phase.run.directory or stack.enter_context(tempfile.TemporaryDirectory())
        writer = QuestionWriter(os.path.join(directory, LABELS), task, encoding)
        stack.enter_context(writer)
        self.folder = writer.folder
        path = os.path.join(self.folder.path, USED)
        self._writer = stack.enter_context(json_lines.Writer(path, 'another run writes to it'))
        self.used = read_used(path)
        self.source = QuestionSource(policy=trainer.policy, writer=writer, phase=phase, seed=seed)
        self.labeller: Labeller | None = None  # simulated labeller, unless people answer
        if not online.asks_people:
            self.labeller = Labeller(self.folder, online.source)
            stack.enter_context(self.labeller)
        self.score = training_data.score_small_tokens
        if online.source == 'mock':
            self.score = KnownReward(encoding).score
        serve(self.folder.path, phase, stack)
        self.answered = 0  # number of answered questions at the last count
        self.reported = -REPORT_SECONDS  # time of the last message about missing labels

    def ask(self, step: int) -> None:
        """Ask the questions due before `step`; a simulated labeller, if any, answers them."""
        is_new = self.source.ask(step, self.schedule.questions_at(step))
        is_first = self.answered == 0  # a kill may have left questions without an answer
        if self.labeller is not None and (is_new or is_first):
            simulated.simulate(self.labeller, self.score, error=self.online.error)

    def missing(self, step: int) -> int:
        """Return how many labels `step` still lacks; ask new questions in place of skipped ones."""
        wanted = self.schedule.labels_at(step)
        if self.answered >= wanted:
            return 0
        self.folder.refresh()
        self.answered, skipped = count_answered(self.folder)
        missing = wanted - self.answered
        if missing > 0:
            self.source.ask(step, self.schedule.questions_at(step) + skipped)
            if time.monotonic() - self.reported >= REPORT_SECONDS:
                self.reported = time.monotonic()
                command = label_command(self.folder.path)
                announce(f'waiting for {missing} of {wanted} labels; to answer: {command}')
        return missing

    def learned_at(self, step: int) -> Labels:
        """Return labels to train on before `step`; used.jsonl records which answers were used."""
        before = self.used.get(step)
        lines = before['answers'] if before else self.folder.lines_read()
        folder = LabelFolder(self.folder.path, lines)
        answers = collected(folder)
        about = {**label_files.about_answers(answers), 'answers': lines}
        labels = training_data.LoadedLabels(label_files.tensors_of(folder, answers), [], about)
        used = {
            'model': self.schedule.models_at(step),
            'step': step,
            'wanted': self.schedule.labels_at(step),
            'labels': len(answers),
            'answers': lines,
            'digest': labels.digest,
        }
        if before is None:
            self._writer.append([used])
            self.used[step] = used
        elif before['digest'] != used['digest']:
            raise UserError(
                f'{folder.path}: answers from which a reward model has learned were changed;'
                ' restore the files, or start a new run under another NAME'
            )
        if (directory := self.phase.run.directory) is not None:
            learned, held_out, _ = split(labels.tensors, self.reward_settings, self.encoder)
            found = {'source': COLLECTED, 'found': len(answers), 'digest': labels.digest}
            record = {**found, **about, **label_counts(learned, held_out)}
            run_record.write_labels(directory, self.phase.command.command, record)
        return labels.tensors


def serve(folder: str, phase: TrainPolicy, stack: contextlib.ExitStack) -> None:
    """Serve the labelling page of a folder until `stack` is closed, if the run's options say so."""
    options = phase.run.serve
    if options is None:
        return
    # Import the libraries of the page only in a run that serves the page.
    from lm_human_preferences.labels.page.server import LabelServer

    with option_renamed(options.option_name('labellers')):
        names = names_in(options.labellers)
    server = stack.enter_context(LabelServer(folder, names, options, note=announce))
    announce(*(f'answer as {name}: {link}' for name, link in server.links.items()))


def read_used(path: str) -> dict[int, dict[str, Any]]:
    """Return {step: line} of used.jsonl; UserError if the file is damaged."""
    found = {}
    for where, record in json_lines.Reader(path).new_records():
        if not matches_schema(record, _USED):
            raise UserError(f'{where} does not say from which answers a reward model has learned')
        found[record['step']] = record
    return found


def count_answered(folder: LabelFolder) -> tuple[int, int]:
    """Return how many training questions have an answer, and how many are retired without one."""
    answered = retired = 0
    for question in folder.questions.values():
        answers = folder.answers_to(question)
        if question.kind != TRAIN:
            continue
        if any(answer.value is not None for answer in answers):
            answered += 1
        elif question.is_retired(answers):
            retired += 1
    return answered, retired


def collected(folder: LabelFolder) -> list[Answer]:
    """Return the answers to learn from, in the order of their questions."""
    found: list[Answer] = []
    for question in folder.questions.values():
        if question.kind == TRAIN:
            found += folder.answers_that_count(question)
    return found


def statistics(
    used: Mapping[str, Any], loss: float, prediction: Prediction | None
) -> dict[str, float]:
    """Return statistics {name without TAG: number} of a reward model's training for TensorBoard."""
    found = {'model': used['model'], 'wanted': used['wanted'], 'labels': used['labels']}
    found['loss'] = loss
    if prediction is not None:
        way = 'cross_validated' if prediction.is_cross_validated else 'held_out'
        measured = prediction.statistics()
        found |= {f'{way}_{name}': number for name, number in measured.items()}
    return found


def line(used: Mapping[str, Any], models: int, loss: float, prediction: Prediction | None) -> str:
    """Return the console line about training one of the run's `models` reward models."""
    found = (
        f'reward model {used["model"]} of {models}, before step {used["step"] + 1}:'
        f' {used["labels"]} labels ({used["wanted"]} wanted); loss {loss:.3f}'
    )
    if prediction is None:
        return found
    way = 'cross-validated' if prediction.is_cross_validated else 'held out'
    return f'{found}; {way}: {prediction}'
