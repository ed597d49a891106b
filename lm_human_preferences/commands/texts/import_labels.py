"""Import of labels that other tools keep as texts into a folder of labels or a label file."""

from typing import Any

import click

from lm_human_preferences import lm_tasks
from lm_human_preferences.commands.advice import training_command
from lm_human_preferences.commands.ask import check_folder, task_record
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.reward_options import HParams
from lm_human_preferences.labels.answers import LONGEST_REMARK
from lm_human_preferences.labels.folder import LabelFolder, QuestionWriter
from lm_human_preferences.labels.labeller import check_name
from lm_human_preferences.labels.report.label_report import report
from lm_human_preferences.labels.task_file import TIES
from lm_human_preferences.labels.texts import into_folder, records, tokenise
from lm_human_preferences.language.encodings import Encoding
from lm_human_preferences.run_story.commands import Experiments


def import_labels(
    reward_hparams: HParams,
    experiment: str,
    experiments: Experiments,
    file: str,
    folder: str,
    labeller: str,
    ties: bool = False,
) -> None:
    """Import labels of `file` into a folder."""
    if folder.endswith(('.json', '.jsonl')):
        raise UserError(
            f'FOLDER {folder}: give a folder; `labels FOLDER --export FILE` writes a label file'
        )
    check_folder(folder)
    check_name(labeller)
    encoding = lm_tasks.initial_encoding(reward_hparams.task.policy.initial_model)
    task = task_record(reward_hparams, folder, experiment, encoding.name, ties=ties)
    labels, notes = tokenise.tokenise(
        records.read(file), reward_hparams, encoding, ties=TIES in task
    )
    if not labels:
        why = [f'{file} holds no label that could be imported', *notes]
        raise UserError('. '.join(why))
    written = _write_folder(folder, labels, task, encoding, labeller)
    of_training = report(written, ())['training_labels']
    if of_training:
        click.echo(f'To train on them: {training_command(written, experiments, of_training)}')
    for note in notes:
        click.echo(note)


def _write_folder(
    path: str,
    labels: into_folder.Questions,
    task: dict[str, Any],
    encoding: Encoding,
    labeller: str,
) -> LabelFolder:
    samples = len(labels[0][0].samples)
    with QuestionWriter(path, task, encoding) as writer:
        lines = into_folder.add_labels(labels, writer, ['imported'] * samples, labeller)
    for line in lines:
        click.echo(line)
    cut = sum(len(' '.join(label.remark.split())) > LONGEST_REMARK for label, _ in labels)
    if cut:
        click.echo(f'{cut} remarks were cut to {LONGEST_REMARK} characters')
    return writer.folder
