"""Adding questions to a folder: queries of a task's data set and samples of one policy or two."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import click
import torch

from lm_human_preferences import lm_tasks, storage
from lm_human_preferences.commands.sample_policy import load_run_hparams, warnings_only
from lm_human_preferences.distributed.comm import LocalComm
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.task import TaskHParams
from lm_human_preferences.hparams.train_reward import HParams
from lm_human_preferences.labels.answers import (
    INSTRUCTIONS,
    answer_field,
    question_id,
    sample_names,
)
from lm_human_preferences.labels.folder import (
    ANSWERS,
    EVERYBODY,
    GOLD,
    QUESTIONS,
    TASK,
    TRAIN,
    VALIDATION,
    QuestionWriter,
    check_same_task,
    is_folder,
    read_task,
)
from lm_human_preferences.labels.texts import into_folder, records, tokenise
from lm_human_preferences.language.encodings import Encoding
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.policy import Policy
from lm_human_preferences.utils.core import set_seed
from lm_human_preferences.utils.logging import progress

INITIAL = 'initial'  # the model that an experiment begins with
PARTS = {TRAIN: 'train', VALIDATION: 'test'}  # of the data set, for each kind of question
IDLE_BATCHES = 20  # without a new question, after which there is none to be expected
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
) -> None:
    """Add `count` questions to a folder; the whole of `./launch.py ask`.

    reward_hparams: the experiment's, of which the task and the type of labels are used. The other
    arguments: see hparams.labelling.AskHParams.
    """
    task = reward_hparams.task
    check_folder(folder)
    _check_options(reward_hparams, policy, against)
    record = task_record(reward_hparams, folder, instructions=instructions)
    if questions is not None or gold is not None:
        _ask_given(reward_hparams, folder, record, questions, gold, repeated, labellers)
        return
    names = [policy] if against is None else [policy, against]
    with warnings_only():
        policies = {name: _load_policy(name, task) for name in names}
    encoding = _one_encoding(policies)
    lm_tasks.check_task(task, encoding, min(_n_ctx(policy) for policy in policies.values()))
    with _writer(folder, {**record, 'encoding': encoding.name}) as writer:
        asker = Asker(reward_hparams, policies, writer, batch_size)
        set_seed(seed + len(writer.folder.questions))
        asker.ask(count, repeated, labellers)
        total = len(writer.folder.questions)
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
    option = '--questions' if gold is None else '--gold'
    encoding = lm_tasks.initial_encoding(hparams.task.policy.initial_model)
    try:
        given, notes = tokenise.tokenise(
            records.read(path), hparams, encoding, needs_answer=gold is not None
        )
    except UserError as e:
        raise UserError(f'{option} {e}') from e
    fields = sample_names(hparams.labels.type)
    new = [
        (label, tokens) for label, tokens in given if not _are_equal([tokens[f] for f in fields])
    ]
    with _writer(folder, {**record, 'encoding': encoding.name}) as writer:
        if gold is None:
            added = into_folder.add_questions(
                new,
                writer,
                [os.path.basename(path)] * len(fields),
                labellers=lambda number: _labellers(number, repeated, labellers),
            )
        else:
            names = ['gold'] * len(fields)
            added = into_folder.add_questions(
                new, writer, names, kind=GOLD, labellers=lambda _: EVERYBODY
            )
        total = len(writer.folder.questions)
    _report_added(folder, added, total, equal=len(given) - len(new), known=len(new) - added)
    for note in notes:
        click.echo(note)


def _labellers(number: int, repeated: float, labellers: int) -> int:
    """How many people are to answer question `number` of those added.

    One more is for several whenever the share of all so far has come to a whole number.
    """
    return labellers if int((number + 1) * repeated) > int(number * repeated) else 1


def _are_equal(samples: Sequence[list[int]]) -> bool:
    """Whether there is nothing to choose from."""
    return len(samples) > 1 and all(sample == samples[0] for sample in samples)


def _writer(folder: str, record: dict[str, Any]) -> QuestionWriter:
    writer = QuestionWriter(folder, record)
    if writer.dropped:
        click.echo(f'note: an unfinished question of {writer.dropped} bytes was dropped', err=True)
    return writer


def task_record(
    hparams: HParams, folder: str, encoding: str | None = None, instructions: str | None = None
) -> dict[str, Any]:
    """What task.json of a folder is to hold; UserError where the folder has another task.

    hparams: train_reward's. encoding: None where it is not known yet. instructions: a file.
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
    if is_folder(folder):
        there = read_task(folder)
        check_same_task(folder, there, record)
        if there['instructions'] != record.get('instructions', there['instructions']):
            raise UserError(
                f'--instructions {instructions}: {folder} has other instructions already, by which'
                ' people have answered; take another folder'
            )
    record.setdefault('instructions', INSTRUCTIONS[answer_field(hparams.labels.type)])
    return record


def _report(asker: Asker, folder: str, count: int, total: int) -> None:
    """Say what was added to `folder`. count: of the questions wanted; total: of all that it has."""
    _report_added(folder, asker.added, total, asker.equal, asker.known)
    if asker.added < count:
        click.echo(
            f'WARNING: only {asker.added} of {count} questions were found:'
            f' {IDLE_BATCHES} batches had nothing new',
            err=True,
        )


def _report_added(folder: str, added: int, total: int, equal: int, known: int) -> None:
    click.echo(f'{folder}: {added} questions added, {total} in all')
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
    samples = len(sample_names(hparams.labels.type))
    if against is not None and samples % 2:
        raise UserError(
            f'--against {against}: --labels.type {hparams.labels.type} shows {samples} sample(s),'
            ' which two policies cannot share equally'
        )


def _read_instructions(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return storage.read_text(path).strip()
    except UserError as e:
        raise UserError(f'--instructions {e}') from e


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
    )


def _task_of_run(name: str, task: TaskHParams) -> TaskHParams:
    """The task of a run; UserError where it is not the one of the questions."""
    try:
        run_task = load_run_hparams(name).task
    except storage.NotFound as e:
        raise UserError(f'--policy {name}: {e}') from e
    except UserError as e:
        text = str(e).removeprefix(f'--save_dir {name} ')
        raise UserError(f'--policy or --against {name} {text}') from e
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
        if encoding != first[1]:
            raise UserError(
                f'{first[0]} and {name} have different encodings, {first[1].name!r} and'
                f' {encoding.name!r}: they cannot be compared'
            )
    return first[1]


def _n_ctx(policy: Policy) -> int:
    return policy.trained_model.hparams().n_ctx


class Asker:
    """Draws questions until there are enough of them.

    policies: by name, one or two. added, equal, known: questions that were added; not asked, as
    their samples are all equal; and not asked, as they are in the folder.
    """

    def __init__(
        self,
        hparams: HParams,
        policies: dict[str, Policy],
        writer: QuestionWriter,
        batch_size: int,
    ) -> None:
        self.task, self.writer, self.policies = hparams.task, writer, policies
        self.kind = TRAIN if len(policies) == 1 else VALIDATION
        self.fields = sample_names(hparams.labels.type)
        share = len(self.fields) // len(policies)
        self.names = [name for name in policies for _ in range(share)]
        encoder = next(iter(policies.values())).encoder
        self.postprocess = lm_tasks.postprocess_fn_from_hparams(hparams.task, encoder.padding_token)
        self.batch_size = batch_size
        self.sampler = lm_tasks.make_query_sampler(
            hparams=hparams.task,
            encoder=encoder,
            batch_size=1,
            mode=PARTS[self.kind],
            labels=hparams.labels.source,
        )
        # Go on in the data set after the question that was added last.
        read = [
            question.texts_read
            for question in writer.folder.questions.values()
            if question.part == PARTS[self.kind]
        ]
        if read:
            self.sampler.seek((read[-1], 0))
        self.added = self.equal = self.known = 0

    def ask(self, count: int, repeated: float, labellers: int) -> None:
        """Add `count` questions, of which a share `repeated` are for so many labellers."""
        idle = 0
        bar = progress(total=count, comm=LocalComm(), desc='asking', unit='question')
        with bar:
            while self.added < count and idle < IDLE_BATCHES:
                before = self.added
                new = list(self._new_questions(min(self.batch_size, count - before)))
                self._add(new, repeated, labellers)
                bar.update(self.added - before)
                idle = idle + 1 if self.added == before else 0

    def _add(
        self, new: list[tuple[dict[str, list[int]], int]], repeated: float, labellers: int
    ) -> None:
        headers = []
        for _, texts_read in new:
            headers.append(
                {
                    'kind': self.kind,
                    'labellers': _labellers(self.added, repeated, labellers),
                    'policies': self.names,
                    'part': PARTS[self.kind],
                    'texts_read': texts_read,
                }
            )
            self.added += 1
        self.writer.add([tokens for tokens, _ in new], headers)

    def _new_questions(self, count: int) -> Iterator[tuple[dict[str, list[int]], int]]:
        """Yield those of the next `count` questions that are to be asked.

        With each, how many texts of the data set had been read for it.
        """
        drawn = [(self.sampler()['tokens'], self.sampler.position[0]) for _ in range(count)]
        queries = torch.cat([query for query, _ in drawn])
        samples = self._samples(queries)
        seen = set(self.writer.folder.questions)
        for row, (query, texts_read) in enumerate(drawn):
            shown = [sample[row].tolist() for sample in samples]
            tokens = {'query': query[0].tolist(), **dict(zip(self.fields, shown, strict=True))}
            id = question_id(tokens)
            if _are_equal(shown):
                self.equal += 1
            elif id in seen:
                self.known += 1
            else:
                seen.add(id)
                yield tokens, texts_read

    def _samples(self, queries: torch.Tensor) -> list[torch.Tensor]:
        """The responses of each field to `queries (batch, query_length)`.

        Each (batch, response_length), as the reward model will see them.
        """
        found = []
        for name in self.names:
            responses = self.policies[name].respond(queries, self.task.response_length)['responses']
            found.append(self.postprocess(responses).cpu())
        return found
