"""Command `import_labels`: import labels of other tools into a folder or a label file."""

from collections.abc import Sequence

import click

from lm_human_preferences import label_types, lm_tasks
from lm_human_preferences.commands.advice import training_command
from lm_human_preferences.commands.ask import check_folder, task_record
from lm_human_preferences.errors import UserError, about_option
from lm_human_preferences.hparams.differences import Experiments
from lm_human_preferences.hparams.labelling_options import ImportHParams
from lm_human_preferences.hparams.reward_options import CommandHParams as HParams
from lm_human_preferences.label_types import TIE
from lm_human_preferences.labels.answers import ID
from lm_human_preferences.labels.folder import QuestionWriter, is_folder
from lm_human_preferences.labels.labeller import check_name
from lm_human_preferences.labels.task_file import SCALE, TIES
from lm_human_preferences.labels.texts import into_folder, records, token_ids, tokenise
from lm_human_preferences.labels.texts.records import TextLabel
from lm_human_preferences.storage import outputs


def import_labels(
    reward_hparams: HParams,
    experiment: str,
    experiments: Experiments,
    file: str,
    output: str,
    options: ImportHParams,
) -> None:
    """Import labels of `file` into a folder, or into a label file if `output` ends in .json."""
    if output.endswith('.jsonl'):
        raise UserError(f'OUTPUT {output}: the name of a label file ends in .json')
    is_file = output.endswith('.json')
    if is_file:
        with about_option('OUTPUT'):
            outputs.check_new_file(output)
    else:
        check_folder(output)
    check_name(options.labeller)
    encoding = lm_tasks.initial_encoding(reward_hparams.task.policy.initial_model)
    task = None
    if not is_file:
        task = task_record(reward_hparams, output, experiment, encoding.name, ties=options.ties)
    labels, notes = tokenise.tokenise(
        records.read(file),
        reward_hparams,
        encoding,
        ties=task is None or TIES in task,
    )
    if not labels:
        why = [f'{file} holds no label that could be imported', *notes]
        raise UserError('. '.join(why))
    label_type = label_types.get(reward_hparams.labels.type)
    if task is None:
        _write_file(output, labels, label_type.field, encoding.name)
    else:
        if SCALE in task and not is_folder(output):
            task[SCALE] = label_type.scale_of([label.answer for label in labels])
        with QuestionWriter(output, task, encoding) as writer:
            lines = into_folder.add_labels(labels, writer, options.labeller)
        folder = writer.folder
        for line in lines:
            click.echo(line)
        of_training = len(folder.counted())
        if of_training:
            click.echo(f'To train on them: {training_command(folder, experiments, of_training)}')
    for note in notes:
        click.echo(note)


def _write_file(path: str, labels: Sequence[TextLabel], answer: str, encoding: str) -> None:
    written = []
    for label in labels:
        if label.answer != TIE:
            given_id = {} if label.id is None else {ID: label.id}
            fields = {**label.tokens, answer: label.answer, **given_id}
            written.append(token_ids.marked(fields, encoding))
    with about_option('OUTPUT'):
        outputs.write_file(path, token_ids.as_file(written, path).encode())
    click.echo(f'{path}: {len(written)} labels')
    ties = len(labels) - len(written)
    if ties:
        click.echo(token_ids.NO_TIES.format(count=ties, form='a label file'))
