"""Command `import_labels`: import labels of other tools into a folder."""

import click

from lm_human_preferences import lm_tasks
from lm_human_preferences.commands.advice import training_command
from lm_human_preferences.commands.ask import check_folder, task_record
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.command_options import ImportHParams
from lm_human_preferences.hparams.policy_options import Experiments
from lm_human_preferences.hparams.reward_options import CommandHParams as HParams
from lm_human_preferences.labels.folder import QuestionWriter, is_folder
from lm_human_preferences.labels.labeller import check_name
from lm_human_preferences.labels.task_file import SCALE, TIES, label_type_of
from lm_human_preferences.labels.texts import into_folder, records, tokenise


def import_labels(
    reward_hparams: HParams,
    experiment: str,
    experiments: Experiments,
    file: str,
    folder: str,
    options: ImportHParams,
) -> None:
    """Import the labels of `file` into a folder."""
    check_folder(folder)
    check_name(options.labeller)
    encoding = lm_tasks.initial_encoding(reward_hparams.task.policy.initial_model)
    task = task_record(reward_hparams, folder, experiment, ties=options.ties)
    found = records.read(file)
    labels, notes = tokenise.tokenise(found, reward_hparams, encoding, ties=TIES in task)
    if not labels:
        raise UserError('. '.join([f'{file} holds no label that could be imported', *notes]))
    if SCALE in task and not is_folder(folder):
        task[SCALE] = label_type_of(task).scale_of([label.answer for label in labels])
    with QuestionWriter(folder, task, encoding) as writer:
        lines = into_folder.add_labels(labels, writer, options.labeller)
    of_training = len(writer.folder.counted())
    if of_training:
        command = training_command(writer.folder, experiments, of_training)
        lines.append(f'To train on them: {command}')
    for line in (*lines, *notes):
        click.echo(line)
