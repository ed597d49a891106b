"""The labels of a folder as a label file has them, for training and for export."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.reward_options import HParams
from lm_human_preferences.labels.answers import LABELLER, REMARK, Answer
from lm_human_preferences.labels.folder import LabelFolder, are_line_counts, is_folder
from lm_human_preferences.language.encodings import Encoding

if TYPE_CHECKING:
    from lm_human_preferences.distributed.comm import Comm  # it loads torch

__all__ = [
    'is_folder',
    'labels_of',
    'open_folder',
    'parse_names',
    'recorded_answers',
    'to_record',
    'training_labels',
]


def parse_names(names: str | None) -> tuple[str, ...]:
    """The labellers in a value of --without or --labels.without."""
    if not names:
        return ()
    return tuple(name.strip() for name in names.split(','))


def training_labels(
    folder: LabelFolder, without: Collection[str] = (), in_full: bool = False
) -> Iterator[dict[str, Any]]:
    """The labels that count for training as objects of a label file, the oldest first.

    in_full: whether they also have who gave them, and the remark of those with one.
    """
    return as_objects(folder, folder.counted(without=without), in_full)


def as_objects(
    folder: LabelFolder, answers: Iterable[Answer], in_full: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield each answer and what was asked as an object of a label file; see training_labels."""
    for answer in answers:
        tokens = folder.tokens(folder.questions[answer.question])
        label = {**tokens, folder.label_type.field: answer.value}
        if in_full:
            label[LABELLER] = answer.labeller
        if in_full and answer.remark is not None:
            label[REMARK] = answer.remark
        yield label


def open_folder(
    source: str, comm: Comm, lines: Mapping[str, int] | None = None
) -> LabelFolder | None:
    """The folder of labels at `source` as rank 0 sees it; None if it is no folder.

    All ranks see the same of it, even if people are answering now. lines: {labeller: how many lines
    of the answers count}; None: all that there are.
    """
    if not is_folder(source):
        return None
    folder = LabelFolder(source, lines) if comm.rank == 0 else None
    seen = lines
    if seen is None:
        seen = comm.all_gather_object(folder.lines_read() if folder is not None else None)[0]
    return folder if folder is not None else LabelFolder(source, seen)


def to_record(folder: LabelFolder, hparams: HParams) -> dict[str, Any]:
    """How far the answers of a folder have been read, and which of them are learned: `ids`.

    Each is [question, labeller, id of the answer], in the order of labels_of. hparams:
    train_reward's.
    """
    answers = folder.counted(without=parse_names(hparams.labels.without))
    ids = [[answer.question, answer.labeller, answer.uuid] for answer in answers]
    return {'answers': folder.lines_read(), 'ids': ids[: hparams.labels.num_train]}


def recorded_answers(record: Mapping[str, Any]) -> dict[str, int] | None:
    """{labeller: how many lines of the answers count} of what `to_record` returned, or None.

    Earlier versions had it in the trainer's state of a checkpoint.
    """
    answers = record.get('answers')
    return answers if are_line_counts(answers) else None


def labels_of(folder: LabelFolder, hparams: HParams, encoding: Encoding) -> list[dict[str, Any]]:
    """The labels of a folder for train_reward's hparams.

    UserError where the labels are of another task, and where there are fewer lines of answers than
    the folder is to have.
    """
    source = f'{hparams.labels.option_name("source")} {folder.path}'
    there_are = folder.lines_read()
    for name, count in (folder.lines or {}).items():
        if there_are.get(name, 0) < count:
            raise UserError(
                f'{source} has fewer answers of {name} than when the run was begun:'
                ' restore them, or begin again with --overwrite'
            )
    where = f'{source} is a folder of another task: its'
    if folder.label_type.name != hparams.labels.type:
        raise UserError(f'{where} labels are {folder.label_type.name}, not {hparams.labels.type}')
    if folder.task['encoding'] != encoding.name:
        raise UserError(f'{where} encoding is {folder.task["encoding"]!r}, not {encoding.name!r}')
    for name in ('query_length', 'response_length'):
        there, here = folder.task['task'].get(name), getattr(hparams.task, name)
        if there != here:
            raise UserError(f'{where} --task.{name} is {there}, not {here}')
    return list(training_labels(folder, parse_names(hparams.labels.without)))
