"""Label files of an online run: rank 0 writes questions, and reads and selects answers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError, about_option, option_renamed
from lm_human_preferences.hparams.reward_options import COLLECTED
from lm_human_preferences.labels import label_files, simulated
from lm_human_preferences.labels.answers import Answer
from lm_human_preferences.labels.folder import TRAIN, LabelFolder, QuestionWriter
from lm_human_preferences.labels.held_out import Labels, split
from lm_human_preferences.labels.labeller import Labeller, names_in
from lm_human_preferences.labels.task_file import new_task
from lm_human_preferences.online import progress
from lm_human_preferences.online.decisions import Batch, Decisions
from lm_human_preferences.online.questions import QuestionSource
from lm_human_preferences.runs import run_record
from lm_human_preferences.runs.run_files import LABELS
from lm_human_preferences.synthetic.known_reward import KnownReward
from lm_human_preferences.trainers.policy_trainer import PPOTrainer
from lm_human_preferences.trainers.training_labels import counts
from lm_human_preferences.utils.logging import announce

if TYPE_CHECKING:
    from lm_human_preferences.plan.phases import TrainPolicy

REPORT_SECONDS = 60.0  # seconds between two lines about missing labels


class RunLabels:
    """Labels of an online run and the log of their use, on rank 0. stack: closes the files."""

    def __init__(
        self, trainer: PPOTrainer, phase: TrainPolicy, seed: int, stack: contextlib.ExitStack
    ) -> None:
        encoding = trainer.policy.trained_model.encoding
        online = phase.settings.rewards.online
        assert online is not None and phase.retraining is not None
        self.online = online
        self.phase = phase
        self.encoder = trainer.policy.encoder
        self.schedule = online.schedule(trainer.total_steps)
        path = online.instructions
        text = None
        if path is not None:
            with about_option(online.option_name('instructions')):
                text = storage.read_text(path).strip()
        label_type = phase.retraining.settings.labels.type
        task = new_task(label_type, phase.settings.task.to_nested_dict(), text, online.ties)
        task['encoding'] = encoding.name
        directory = phase.run.directory or stack.enter_context(tempfile.TemporaryDirectory())
        writer = QuestionWriter(os.path.join(directory, LABELS), task, encoding)
        self.folder = stack.enter_context(writer).folder
        self.decisions = stack.enter_context(contextlib.closing(Decisions(self.folder.path)))
        self.source = QuestionSource(policy=trainer.policy, writer=writer, phase=phase, seed=seed)
        self.labeller: Labeller | None = None  # a simulated labeller
        if not online.asks_people:
            self.labeller = stack.enter_context(Labeller(self.folder, online.source))
        self.score = simulated.score_small_tokens
        if online.source == 'mock':
            self.score = KnownReward(encoding).score
        serve(self.folder.path, phase, stack)
        self.answered = 0  # number of answered questions at the last count
        self.reported = -REPORT_SECONDS  # time of the last line

    def ask(self, step: int) -> None:
        """Ask what is due before `step`, and have a simulated labeller answer."""
        replaced = self._asked_beyond_schedule(step - 1) if step > 0 else 0
        if replaced:  # a resumed run that is longer now has a slower schedule
            _, skipped = count_answered(self.folder)
            replaced = min(replaced, skipped)
        self._ask(step, replaced)

    def _ask(self, step: int, replaced: int) -> None:
        """Ask the scheduled questions, and one more for each of `replaced` skipped questions."""
        is_new = self.source.ask(step, self.schedule.questions_at(step) + replaced)
        is_first = self.answered == 0  # a kill may have left questions without an answer
        if self.labeller is not None and (is_new or is_first):
            simulated.simulate(self.labeller, self.score, error=self.online.error)

    def _asked_beyond_schedule(self, step: int) -> int:
        """Return how many questions up to `step` were asked in place of skipped ones."""
        return max(0, self.source.asked_until(step) - self.schedule.questions_at(step))

    def missing(self, step: int) -> int:
        """Return how many labels `step` still lacks; ask new questions in place of skipped ones."""
        wanted = self.schedule.labels_at(step)
        if self.answered < wanted:
            self.folder.refresh()
            self.answered, skipped = count_answered(self.folder)
            if self.answered < wanted and skipped > self._asked_beyond_schedule(step):
                self._ask(step, replaced=skipped)
        return wanted - self.answered

    def report_waiting(self, step: int, missing: int) -> None:
        """Print, every REPORT_SECONDS, how many labels the run waits for."""
        if time.monotonic() - self.reported < REPORT_SECONDS:
            return
        self.reported = time.monotonic()
        wanted = self.schedule.labels_at(step)
        command = progress.label_command(self.folder.path)
        announce(f'waiting for {missing} of {wanted} labels; to answer: {command}')

    def learn(self, step: int) -> tuple[Labels, Labels | None]:
        """Return all labels to learn from, and those given since the last retraining, or None."""
        decided = self.decisions.batches.get(step)
        lines = decided.answers if decided else self.folder.lines_read()
        folder = LabelFolder(self.folder.path, lines)
        answers = collected(folder)
        batch = Batch(
            model=self.schedule.models_at(step),
            step=step,
            wanted=self.schedule.labels_at(step),
            labels=len(answers),
            answers=lines,
            digest=digest(answers),
        )
        if decided is None:
            self.decisions.record_batch(batch)
        elif decided.digest != batch.digest:
            raise UserError(
                f'{folder.path}: answers from which a reward model has learned were changed;'
                ' restore the files, or begin again under another NAME'
            )
        before = self.decisions.last_batch_before(step)
        new = [] if before is None else newer(folder, answers, before.answers)
        new_labels = label_files.tensors_of(folder, new) if new else None
        labels = label_files.tensors_of(folder, answers)
        self._record(labels, batch, answers)
        return labels, new_labels

    def _record(self, labels: Labels, batch: Batch, answers: Sequence[Answer]) -> None:
        """Write into the run's record which labels the reward model learns from."""
        assert self.phase.retraining is not None
        if (directory := self.phase.run.directory) is None:
            return
        learned, held_out, _ = split(labels, self.phase.retraining.settings, self.encoder)
        about = {
            'source': COLLECTED,
            'found': batch.labels,
            **label_files.about_answers(answers),
            'answers': batch.answers,
            **counts(learned, held_out),
            'digest': batch.digest,
        }
        run_record.write_labels(directory, self.phase.command.command, about)


def serve(folder: str, phase: TrainPolicy, stack: contextlib.ExitStack) -> None:
    """Serve the labelling page of a folder until `stack` is closed, if the run's options say so."""
    options = phase.run.serve
    if options is None:
        return
    # Only a run that serves a page needs its libraries.
    from lm_human_preferences.labels.page.server import LabelServer, missing_tls

    with option_renamed(options.option_name('labellers')):
        names = names_in(options.labellers)
    server = stack.enter_context(LabelServer(folder, names, options, note=announce))
    if warning := missing_tls(options):
        announce(warning)
    announce(*(f'answer as {name}: {link}' for name, link in server.links.items()))


def count_answered(folder: LabelFolder) -> tuple[int, int]:
    """Return how many training questions have a label, and how many were given up as skipped."""
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


def digest(answers: Iterable[Answer]) -> str:
    """Return the SHA-256 of (question, labeller, value) of all `answers`."""
    said = [(answer.question, answer.labeller, answer.value) for answer in answers]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def newer(folder: LabelFolder, answers: Iterable[Answer], lines: dict[str, int]) -> list[Answer]:
    """Return the `answers` that are not in the first lines {labeller: number} of their file."""
    found = []
    for answer in answers:
        if folder.logs[answer.labeller].line_of[answer.uuid] > lines.get(answer.labeller, 0):
            found.append(answer)
    return found
