"""Command `labels`: report on a folder of labels, and export them."""

import json
from collections.abc import Collection

import click

from lm_human_preferences.commands.advice import training_command
from lm_human_preferences.errors import about_option
from lm_human_preferences.hparams.differences import Experiments
from lm_human_preferences.label_types import TIE
from lm_human_preferences.labels.folder import LabelFolder, parse_names
from lm_human_preferences.labels.report import label_report
from lm_human_preferences.labels.texts import token_ids
from lm_human_preferences.labels.texts.token_ids import PREFERENCES, TEXT, TOKENS
from lm_human_preferences.storage import outputs
from lm_human_preferences.utils.terminal import printable


def report_labels(
    folder: str,
    experiments: Experiments,
    export: str | None = None,
    export_as: str = TOKENS,
    output: str | None = None,
    without: str | None = None,
    reward: str | None = None,
) -> None:
    """Print the report on a folder, and write the files that are asked for; see ReportHParams."""
    for option, path in (('--export', export), ('--output', output)):
        if path is not None:
            with about_option(option):
                outputs.check_new_file(path)
    opened = LabelFolder(folder)
    names = parse_names(without)
    found = label_report.report(opened, names)
    if reward is not None:
        from lm_human_preferences.commands.sampler import warnings_only
        from lm_human_preferences.evaluation import reward_on_labels  # these two load torch

        with warnings_only():
            found['reward'] = reward_on_labels.report(opened, reward, names)
    for line in label_report.lines(folder, found):
        click.echo(printable(line))
    if output is not None:
        text = json.dumps(found, indent=2) + '\n'
        with about_option('--output'):
            outputs.write_file(output, text.encode())
        click.echo(f'The report is in {output}')
    if export is not None:
        _export(opened, names, export, export_as)
    if found['training_labels']:
        command = training_command(opened, experiments, found['training_labels'], without)
        click.echo(f'To train on them: {command}')


def _export(folder: LabelFolder, without: Collection[str], path: str, form: str) -> None:
    answers = folder.counted(without=without)
    is_text = form == TEXT
    kept = [answer for answer in answers if is_text or answer.value != TIE]
    labels = folder.as_labels(kept, as_text=is_text)
    if form == TOKENS:
        written = [token_ids.marked(label, folder.task['encoding']) for label in labels]
    else:
        encoding = folder.encoding()
        written = [
            token_ids.as_texts(label, folder.label_type, encoding, folder.path) for label in labels
        ]
    if form == PREFERENCES:
        written = list(token_ids.preferences(written, folder.label_type))
    with about_option('--export'):
        outputs.write_file(path, token_ids.as_file(written, path).encode())
    what = 'preferences' if form == PREFERENCES else 'labels'
    click.echo(f'{len(written)} {what} are in {path}')
    if len(kept) < len(answers):
        name = 'a label file' if form == TOKENS else 'a preference'
        note = token_ids.NO_TIES.format(count=len(answers) - len(kept), form=name)
        click.echo(f'{note}; --export_as text keeps them')
