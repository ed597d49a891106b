"""Command `labels`: report on a folder of labels, and export them."""

import json
from collections.abc import Collection

import click

from lm_human_preferences import storage
from lm_human_preferences.commands.advice import training_command
from lm_human_preferences.errors import about_option
from lm_human_preferences.hparams.policy_options import Experiments
from lm_human_preferences.label_types import TIE
from lm_human_preferences.labels.folder import LabelFolder, parse_names
from lm_human_preferences.labels.report import label_report
from lm_human_preferences.labels.texts import token_ids
from lm_human_preferences.labels.texts.token_ids import PREFERENCES, TEXT, TOKENS
from lm_human_preferences.language.texts import tokenisers
from lm_human_preferences.utils.streams import printable


def report_labels(
    folder: str,
    experiments: Experiments,
    export: str | None = None,
    export_as: str = TOKENS,
    output: str | None = None,
    without: str | None = None,
    reward: str | None = None,
) -> None:
    """Print the report on a folder, and write the files that are asked for; see LabelsHParams."""
    for option, path in (('--export', export), ('--output', output)):
        if path is not None:
            with about_option(option):
                storage.check_new_file(path)
    opened = LabelFolder(folder)
    names = parse_names(without)
    found = label_report.report(opened, names)
    if reward is not None:
        from lm_human_preferences.commands.sampler import warnings_only
        from lm_human_preferences.evaluation import reward_on_labels  # both modules load torch

        with warnings_only():
            found['reward'] = reward_on_labels.report(opened, reward, names)
    for line in label_report.lines(folder, found):
        click.echo(printable(line))
    if output is not None:
        text = json.dumps(found, indent=2) + '\n'
        with about_option('--output'):
            storage.write_file(output, text.encode())
        click.echo(f'The report is in {output}')
    if export is not None:
        _export(opened, names, export, export_as)
    if found['training_labels']:
        command = training_command(opened, experiments, found['training_labels'], without)
        click.echo(f'To train on them: {command}')


def _export(folder: LabelFolder, without: Collection[str], path: str, form: str) -> None:
    answers = folder.counted(without=without)
    kept = [answer for answer in answers if form == TEXT or answer.value != TIE]
    written = list(folder.as_labels(kept, as_text=form == TEXT))
    label_type, encoding = folder.label_type, folder.encoding()
    if form != TOKENS:
        written = [token_ids.as_texts(each, label_type, encoding, folder.path) for each in written]
    elif encoding.name.startswith(tokenisers.PREFIX):  # exported token ids name their tokeniser
        written = [{**label, token_ids.FIELD: encoding.name} for label in written]
    if form == PREFERENCES:
        written = list(token_ids.preferences(written, label_type))
    lines = [json.dumps(label, ensure_ascii=False) for label in written]
    text = '[' + ',\n'.join(lines) + ']\n'
    if path.endswith('.jsonl'):
        text = ''.join(f'{line}\n' for line in lines)
    with about_option('--export'):
        storage.write_file(path, text.encode())
    what = 'preferences' if form == PREFERENCES else 'labels'
    click.echo(f'{len(written)} {what} are in {path}')
    if len(kept) < len(answers):
        click.echo(
            f'note: {len(answers) - len(kept)} answers without a preference are left out;'
            ' --export_as text keeps them'
        )
