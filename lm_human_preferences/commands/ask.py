"""Adding questions to a folder: queries of a task's data set and samples of one policy or two."""

from __future__ import annotations

import os
from collections.abc import Sized
from dataclasses import dataclass
from typing import Any

import click

from lm_human_preferences import label_types, lm_tasks, storage
from lm_human_preferences.commands.advice import training_command
from lm_human_preferences.commands.sample_policy import warnings_only
from lm_human_preferences.distributed.comm import LocalComm
from lm_human_preferences.errors import OptionError, UserError, about_option
from lm_human_preferences.hparams.reward_options import HParams
from lm_human_preferences.hparams.task_options import TaskHParams
from lm_human_preferences.labels.folder import (
    EVERYBODY,
    GOLD,
    TRAIN,
    VALIDATION,
    QuestionWriter,
    is_folder,
)
from lm_human_preferences.labels.task_file import TIES, check_same_task, read_task
from lm_human_preferences.labels.texts import into_folder, records, tokenise
from lm_human_preferences.language.encodings import Encoding
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.online.progress import label_command
from lm_human_preferences.online.question_sampler import (
    IDLE_BATCHES,
    Queries,
    Query,
    QuestionSampler,
    Tokens,
    are_equal,
    labellers_wanted,
)
from lm_human_preferences.policy import Policy
from lm_human_preferences.runs.run_files import ANSWERS, QUESTIONS, TASK
from lm_human_preferences.runs.run_settings import load_run_hparams, pins
from lm_human_preferences.training import precision
from lm_human_preferences.utils.core import set_seed
from lm_human_preferences.utils.logging import progress

INITIAL = 'initial'  # the model that an experiment begins with
PARTS = {TRAIN: 'train', VALIDATION: 'test'}  # of the data set, for each kind of question
MAY_DIFFER = ('query_dataset', 'policy', 'penalty_reward_value')  # of a run's task


def ask(
    reward_hparams: HParams,
    folder: str,
    count: int,
    repeated: float,
    labellers: int,
    policy: str,
    against: str | None,
    instructions: str | None,
    batch_size: int,
    seed: int,
    questions: str | None = None,
    gold: str | None = None,
    ties: bool = False,
) -> None:
    """Add `count` questions to a folder; the whole of `./launch.py ask`.

    reward_hparams: the experiment's, of which the task and the type of labels are used. The other
    arguments: see hparams.labelling.AskHParams.
    """
    task = reward_hparams.task
    check_folder(folder)
    _check_options(reward_hparams, policy, against)
    if INITIAL in (policy, against):
        reward_hparams.override_from_dict(pins(reward_hparams))
    record = task_record(reward_hparams, folder, instructions=instructions, ties=ties)
    if questions is not None or gold is not None:
        _ask_given(reward_hparams, folder, record, questions, gold, repeated, labellers)
        return
    names = [policy] if against is None else [policy, against]
    lm_tasks.check_offline(task, mode=PARTS[_kind(names)])
    with warnings_only():
        policies = {name: _load_policy(name, task) for name in names}
    encoding = _one_encoding(policies)
    sizes = [each.trained_model.hparams() for each in policies.values()]
    lm_tasks.check_task(task, encoding, min(sizes, key=lambda each: each.n_ctx))
    precision.configure_for(max(size.n_embd for size in sizes), 'fp32')
    for note in lm_tasks.query_notes(task, encoding.get_encoder(), PARTS[_kind(names)]):
        click.echo(note)
    with _writer(folder, record, encoding) as writer:
        asker = Asker(reward_hparams, policies, writer, batch_size)
        set_seed(seed + len(writer.folder.questions))
        asker.ask(count, repeated, labellers)
        total = _Total.of(writer)
    _report(asker, folder, count, total)


def _ask_given(
    hparams: HParams,
    folder: str,
    record: dict[str, Any],
    questions: str | None,
    gold: str | None,
    repeated: float,
    labellers: int,
) -> None:
    """Add the questions in a file, or gold ones; see hparams.labelling.AskHParams."""
    path = questions if gold is None else gold
    assert path is not None
    encoding = lm_tasks.initial_encoding(hparams.task.policy.initial_model)
    with about_option('--questions' if gold is None else '--gold'):
        given, notes = tokenise.tokenise(
            records.read(path),
            hparams,
            encoding,
            needs_answer=gold is not None,
            ties=bool(record.get(TIES)),
        )
    fields = label_types.get(hparams.labels.type).samples
    new = [(label, tokens) for label, tokens in given if not are_equal([tokens[f] for f in fields])]
    with _writer(folder, record, encoding) as writer:
        there = _count(writer, TRAIN)
        if gold is None:
            added = into_folder.add_questions(
                new,
                writer,
                [os.path.basename(path)] * len(fields),
                labellers=lambda number: labellers_wanted(there + number, repeated, labellers),
            )
        else:
            names = ['gold'] * len(fields)
            added = into_folder.add_questions(
                new, writer, names, kind=GOLD, labellers=lambda _: EVERYBODY
            )
        total = _Total.of(writer)
    _report_added(folder, added, total, equal=len(given) - len(new), known=len(new) - added)
    for note in notes:
        click.echo(note)


@dataclass(frozen=True)
class _Total:
    """How many questions a folder has, how many of them will be trained on, and of which type."""

    questions: int
    of_training: int
    label_type: str

    @classmethod
    def of(cls, writer: QuestionWriter) -> _Total:
        folder = writer.folder
        return cls(len(folder.questions), _count(writer, TRAIN), folder.task['label_type'])


def _count(writer: QuestionWriter, kind: str) -> int:
    """How many questions of a kind a folder has."""
    return sum(question.kind == kind for question in writer.folder.questions.values())


def _writer(folder: str, record: dict[str, Any], encoding: Encoding) -> QuestionWriter:
    writer = QuestionWriter(folder, {**record, 'encoding': encoding.name}, encoding)
    if writer.dropped:
        click.echo(f'note: an unfinished question of {writer.dropped} bytes was dropped', err=True)
    return writer


def task_record(
    hparams: HParams,
    folder: str,
    encoding: str | None = None,
    instructions: str | None = None,
    ties: bool = False,
) -> dict[str, Any]:
    """What task.json of a folder is to hold; UserError where the folder has another task.

    hparams: train_reward's. encoding: None where it is not known yet. instructions: a file. ties:
    whether to allow them; a folder that does goes on to.
    """
    record: dict[str, Any] = {
        'label_type': hparams.labels.type,
        'task': hparams.task.to_nested_dict(),
    }
    if encoding is not None:
        record['encoding'] = encoding
    text = _read_instructions(instructions)
    if text is not None:
        record['instructions'] = text
    if ties:
        _check_ties(hparams.labels.type)
        record[TIES] = True
    if is_folder(folder):
        there = read_task(folder)
        check_same_task(folder, there, record)
        if there['instructions'] != record.get('instructions', there['instructions']):
            raise UserError(
                f'--instructions {instructions}: {folder} has other instructions already, by which'
                ' people have answered; take another folder'
            )
        if there.get(TIES):
            record[TIES] = True
    record.setdefault('instructions', label_types.get(hparams.labels.type).instructions)
    return record


def _check_ties(label_type: str) -> None:
    if not label_types.get(label_type).can_tie:
        raise UserError(
            f'--ties on: labels of the type {label_type} have no ties; give --labels.type best_of_2'
            ' or best_of_4'
        )


def _report(asker: Asker, folder: str, count: int, total: _Total) -> None:
    """Say what was added to `folder`. count: of the questions wanted."""
    _report_added(folder, asker.added, total, asker.sampler.equal, asker.sampler.known)
    if asker.added < count:
        click.echo(
            f'WARNING: only {asker.added} of {count} questions were found:'
            f' {IDLE_BATCHES} batches had nothing new',
            err=True,
        )


def _report_added(folder: str, added: int, total: _Total, equal: int, known: int) -> None:
    click.echo(f'{folder}: {added} questions added, {total.questions} in all')
    if total.questions:
        click.echo(f'To answer them: {label_command(folder)}')
    if total.of_training:
        command = training_command(folder, total.label_type, total.of_training)
        click.echo(f'To train on the answers: {command}')
    if equal:
        click.echo(f'{equal} questions whose samples are all equal were not asked')
    if known:
        click.echo(f'{known} questions that are there already were not asked again')


def check_folder(folder: str) -> None:
    """UserError unless `folder` is a folder of labels, or can become one."""
    if storage.is_remote(folder):
        raise UserError(f'FOLDER {folder} is remote; give a local directory')
    if os.path.isdir(folder) and os.listdir(folder) and not is_folder(folder):
        # A killed `ask` may have left these before it had written task.json.
        own = (ANSWERS, QUESTIONS, TASK)
        if not all(name.startswith(own) for name in os.listdir(folder)):
            raise UserError(f'{folder} is not empty, and no folder of labels: take another folder')


def _check_options(hparams: HParams, policy: str, against: str | None) -> None:
    """UserError for what cannot work, before a model is loaded."""
    if against is not None and against.rstrip('/') == policy.rstrip('/'):
        raise UserError(f'--against {against} is --policy {policy}: name another policy')
    samples = len(label_types.get(hparams.labels.type).samples)
    if against is not None and samples % 2:
        raise UserError(
            f'--against {against}: --labels.type {hparams.labels.type} shows {samples} sample(s),'
            ' which two policies cannot share equally'
        )


def _read_instructions(path: str | None) -> str | None:
    if path is None:
        return None
    with about_option('--instructions'):
        return storage.read_text(path).strip()


def _load_policy(name: str, task: TaskHParams) -> Policy:
    """A policy by the name that the user gave it: 'initial', or the directory of a run."""
    temperature = task.policy.temperature
    if name == INITIAL:
        scope = 'ref_policy'
        model = lm_tasks.initial_model(task.policy.initial_model)
    else:
        scope = 'policy'
        run_task = _task_of_run(name, task)
        temperature = run_task.policy.temperature
        model = TrainedModel(name, storage.join(name, 'policy'), scope)
    return Policy(
        model,
        scope=scope,
        embed_queries=lm_tasks.query_formatter(task, model.encoding.get_encoder()),
        temperature=temperature,
        only_samples=True,
    )


def _task_of_run(name: str, task: TaskHParams) -> TaskHParams:
    """The task of a run; UserError where it is not the one of the questions."""
    try:
        run_task = load_run_hparams(name).task
    except OptionError as e:
        raise OptionError('--policy or --against', e.text) from e
    except UserError as e:
        raise OptionError('--policy or --against', f'{name} {e}') from e
    there = run_task.to_nested_dict()
    for key, value in task.to_nested_dict().items():
        if key not in MAY_DIFFER and there[key] != value:
            raise UserError(
                f'the run {name} was trained on another task: its --task.{key} is {there[key]!r},'
                f' not {value!r}'
            )
    return run_task


def _one_encoding(policies: dict[str, Policy]) -> Encoding:
    """The encoding that all policies share."""
    encodings = {name: policy.trained_model.encoding for name, policy in policies.items()}
    first, *others = encodings.items()
    for name, encoding in others:
        if encoding.name != first[1].name:
            raise UserError(
                f'{first[0]} and {name} have different encodings, {first[1].name!r} and'
                f' {encoding.name!r}: they cannot be compared'
            )
    return first[1]


def _kind(policies: Sized) -> str:
    """Of the questions about one policy, or two that are compared."""
    return TRAIN if len(policies) == 1 else VALIDATION


class Asker:
    """Draws questions until there are enough of them.

    policies: by name, one or two. added: how many questions were added.
    """

    def __init__(
        self,
        hparams: HParams,
        policies: dict[str, Policy],
        writer: QuestionWriter,
        batch_size: int,
    ) -> None:
        self.writer, self.batch_size = writer, batch_size
        self.kind = _kind(policies)
        self.part = PARTS[self.kind]
        self.sampler = QuestionSampler(policies, hparams.task, writer.folder.label_type, batch_size)
        self.names = self.sampler.share(list(policies))
        encoder = next(iter(policies.values())).encoder
        self.queries = Queries.of_task(hparams.task, encoder, self.part, hparams.labels.source)
        # Go on in the data set after the question that was added last.
        questions = writer.folder.questions.values()
        read = [question.texts_read for question in questions if question.part == self.part]
        if read:
            self.queries.seek(read[-1])
        self.added = 0

    def ask(self, count: int, repeated: float, labellers: int) -> None:
        """Add `count` questions, of which a share `repeated` are for so many labellers."""
        idle = 0
        bar = progress(total=count, comm=LocalComm(), desc='asking', unit='question')
        with bar:
            while self.added < count and idle < IDLE_BATCHES:
                queries = self.queries.take(min(self.batch_size, count - self.added))
                seen = set(self.writer.folder.questions)
                new = list(self.sampler.new_questions(queries, self.names, seen))
                self._add(new, repeated, labellers)
                bar.update(len(new))
                idle = 0 if new else idle + 1

    def _add(self, new: list[tuple[Query, Tokens]], repeated: float, labellers: int) -> None:
        headers = []
        there = _count(self.writer, self.kind)
        for number, (query, _) in enumerate(new, start=there):
            headers.append(
                {
                    'kind': self.kind,
                    'labellers': labellers_wanted(number, repeated, labellers),
                    'policies': self.names,
                    'part': self.part,
                    'texts_read': query.texts_read,
                }
            )
        self.writer.add([tokens for _, tokens in new], headers)
        self.added += len(new)
