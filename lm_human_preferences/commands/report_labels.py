"""The report on a folder of labels, and their export."""

from __future__ import annotations

import json
import statistics
from collections.abc import Collection, Sequence
from typing import Any

import click

from lm_human_preferences.commands.advice import training_command
from lm_human_preferences.errors import about_option
from lm_human_preferences.label_types import TIE
from lm_human_preferences.labels.folder import LabelFolder
from lm_human_preferences.labels.folder_labels import parse_names, training_labels
from lm_human_preferences.labels.report.label_report import report
from lm_human_preferences.labels.texts import token_ids
from lm_human_preferences.labels.texts.export_labels import (
    NO_TIES,
    PREFERENCES,
    TEXT,
    TOKENS,
    TextExport,
    as_file,
)
from lm_human_preferences.storage import outputs
from lm_human_preferences.utils.terminal import printable

MOST_REMARKS = 20  # that are printed
COLUMNS = {
    'answers': 'answers',
    'ties': 'ties',  # in a folder that allows them
    'skipped': 'skipped',
    'taken_back': 'taken back',
    'median_seconds': 'median s',
    'under_a_second': 'under 1 s',
    'agreement': 'agreement',
    'gold': 'gold',
    'positions': 'positions',
    'positions_p_value': 'p',
}


def report_labels(
    folder: str,
    export: str | None = None,
    export_as: str = TOKENS,
    output: str | None = None,
    without: str | None = None,
    reward: str | None = None,
    learning_curve: int = 0,
    picture: str | None = None,
) -> None:
    """Print the report on a folder, and write what is asked for.

    For the arguments see hparams.labelling.ReportHParams.
    """
    for option, path in (('--export', export), ('--output', output), ('--picture', picture)):
        if path is not None:
            with about_option(option):
                outputs.check_new_file(path)
    opened = LabelFolder(folder)
    names = parse_names(without)
    found = report(opened, names)
    if reward is not None:
        found |= _on_reward_model(opened, reward, names, learning_curve, without)
    for line in [*opened.notes(), *_lines(folder, found)]:
        click.echo(printable(line))  # policies have the names that the folder gives them
    if output is not None:
        text = json.dumps(found, indent=2) + '\n'
        with about_option('--output'):
            outputs.write_file(output, text.encode())
        click.echo(f'The report is in {output}')
    if picture is not None:
        from lm_human_preferences.evaluation import label_picture

        label_picture.draw(found, picture)
        click.echo(f'The picture is in {picture}')
    if export is not None:
        _export(opened, names, export, export_as)
    if found['training_labels']:
        command = training_command(
            folder, opened.task['label_type'], found['training_labels'], without
        )
        click.echo(f'To train on them: {command}')


def _on_reward_model(
    folder: LabelFolder,
    run: str,
    names: Collection[str],
    repetitions: int,
    without: str | None,
) -> dict[str, Any]:
    """The parts of the report that need a reward model."""
    # They load torch, which the rest of the report does without.
    from lm_human_preferences.commands.sample_policy import warnings_only
    from lm_human_preferences.evaluation import reward_on_labels
    from lm_human_preferences.reproduction import learning_curve

    with warnings_only():
        found: dict[str, Any] = {'reward': reward_on_labels.report(folder, run, names)}
        if repetitions:
            found['learning_curve'] = learning_curve.learning_curve(
                folder.path, run, repetitions, without
            )
    return found


def _export(folder: LabelFolder, without: Collection[str], path: str, form: str) -> None:
    """Write the labels that count for training."""
    labels = list(training_labels(folder, without, in_full=form == TEXT))
    ties = inexact = 0
    if form != TEXT:
        choices = [label for label in labels if label[folder.label_type.field] != TIE]
        ties, labels = len(labels) - len(choices), choices
    if form == TOKENS:
        encoding = folder.task['encoding']
        text, count = as_file((token_ids.marked(label, encoding) for label in labels), path)
    else:
        encoder = folder.encoding().get_encoder()
        texts = TextExport(folder.label_type, encoder)
        written = texts.labels(labels) if form == TEXT else texts.preferences(labels)
        text, count = as_file(written, path)
        inexact = texts.inexact
    with about_option('--export'):
        outputs.write_file(path, text.encode())
    click.echo(f'{count} {"preferences" if form == PREFERENCES else "labels"} are in {path}')
    if ties:
        name = 'a label file' if form == TOKENS else 'a preference'
        click.echo(f'{NO_TIES.format(count=ties, form=name)}; --export_as text keeps them')
    if inexact:
        click.echo(
            f'note: {inexact} texts would be read as other tokens than these samples have; only'
            ' --export_as tokens keeps them as they are'
        )


def _lines(folder: str, found: dict[str, Any]) -> list[str]:
    """The report as text."""
    questions = found['questions']
    lines = [
        f'{folder}: {questions["all"]} questions, {questions["answered"]} answered,'
        f' {questions["retired"]} retired; {found["training_labels"]} labels to train on',
        *_agreement_lines(found['agreement']),
    ]
    if found['labellers']:
        lines += ['', *_table(found['labellers'])]
    if 'review' in found:
        lines += ['', *_review_lines(found['review'])]
    for comparison in found['comparisons']:
        lines += ['', *_comparison_lines(comparison)]
    if 'remarks' in found:
        lines += ['', *_remark_lines(found['remarks'])]
    if 'reward' in found:
        lines += ['', *_reward_lines(found['reward'])]
    if 'learning_curve' in found:
        lines += ['', *_curve_lines(found['learning_curve'])]
    return lines


def _review_lines(review: dict[str, Any]) -> list[str]:
    by = ', '.join(f'{count} by {name}' for name, count in sorted(review['decided'].items()))
    line = f'decided where labellers disagree, and counted instead of their answers: {by}'
    return [f'{line}; {review["disputed"]} left to decide']


def _remark_lines(remarks: Sequence[dict[str, Any]]) -> list[str]:
    """The latest remarks."""
    shown = remarks[-MOST_REMARKS:]
    lines = [f'remarks ({len(remarks)}):']
    if len(shown) < len(remarks):
        lines = [f'the last {len(shown)} of {len(remarks)} remarks (all of them: --output FILE):']
    for remark in shown:
        about = f'{remark["question"][:8]}, {json.dumps(remark["said"])}'
        lines.append(f'  {remark["labeller"]}, {about}: {remark["remark"]}')
    return lines


def _reward_lines(reward: dict[str, Any]) -> list[str]:
    """How well a reward model predicts each kind of answers, and each labeller."""
    rows = {
        'held out of its training': reward['held_out'],
        'others, which it may have learned': reward['trained_on'],
        'comparisons of policies': reward['comparisons'],
        **{f'of {name}': found for name, found in sorted(reward['labellers'].items())},
    }
    lines = [f'{reward["run"]} predicts these labels:']
    return lines + [f'  {name}: {_prediction(found)}' for name, found in rows.items() if found]


def _prediction(found: dict[str, Any]) -> str:
    if found['accuracy'] is None:
        return (
            f'correlation {found["agreement"]:.3f} with {found["labels"]} (95 % interval'
            f' {found["low"]:.3f} to {found["high"]:.3f})'
        )
    right = round(found['accuracy'] * found['labels'])
    return (
        f'{right} of {found["labels"]}, {100 * found["accuracy"]:.1f} % (95 % interval'
        f' {100 * found["low"]:.1f} to {100 * found["high"]:.1f});'
        f' chance is {100 * found["chance"]:.1f} %'
    )


def _curve_lines(curve: list[dict[str, Any]]) -> list[str]:
    name = 'correlation' if curve[0]['chance'] is None else 'accuracy'
    held_out = curve[0]['held_out']
    lines = [f'{name} on {held_out} labels held out, by the number of labels learned from:']
    for row in curve:
        values = row['agreement' if name == 'correlation' else 'accuracy']
        line = f'  {row["labels"]:>6}: {statistics.mean(values):.3f}'
        if len(values) > 1:
            line += f' +- {statistics.stdev(values):.3f}'
        low, high = statistics.mean(row['low']), statistics.mean(row['high'])
        lines.append(f'{line}, 95 % interval {low:.3f} to {high:.3f}')
    return lines


def _agreement_lines(agreement: dict[str, Any]) -> list[str]:
    if not agreement['pairs']:
        return ['agreement: no question has two answers yet; see --repeated of ask']
    if agreement['raw'] is None:
        return [
            f'agreement: {agreement["pairs"]} pairs of answers to {agreement["questions"]}'
            f" questions; Krippendorff's alpha for intervals {_text(agreement['alpha'])}"
        ]
    return [
        f'agreement: {100 * agreement["raw"]:.1f} % of {agreement["pairs"]} pairs of answers to'
        f' {agreement["questions"]} questions (95 % interval {100 * agreement["low"]:.1f} to'
        f' {100 * agreement["high"]:.1f}); chance is {100 * agreement["chance"]:.1f} %;'
        f" Krippendorff's alpha {_text(agreement['alpha'])}"
    ]


def _comparison_lines(comparison: dict[str, Any]) -> list[str]:
    """How often a policy was preferred."""
    lines = [
        f'{comparison["against"]} was preferred to {comparison["policy"]} in'
        f' {comparison["wins_of_against"]} of {comparison["n"]} answers to'
        f' {comparison["questions"]} questions: {100 * comparison["win_rate"]:.1f} %, 95 % interval'
        f' {100 * comparison["low"]:.1f} to {100 * comparison["high"]:.1f}'
    ]
    if comparison.get('ties'):
        lines.append(f'  {comparison["ties"]} more answers prefer neither, and are left out')
    half = comparison['samples'] // 2
    if half > 1:
        lines += [
            f'  The best of {half} + {half} is further from 50 % than the better of 1 + 1, which'
            ' would be',
            f'  {100 * comparison["pairwise"]:.1f} %, interval'
            f' {100 * comparison["pairwise_low"]:.1f} to {100 * comparison["pairwise_high"]:.1f},'
            ' if quality is normally distributed',
        ]
    return lines


def _table(labellers: dict[str, dict[str, Any]]) -> list[str]:
    """A line for each labeller below a heading."""
    columns = [column for column in COLUMNS if all(column in row for row in labellers.values())]
    rows = [['labeller', *(COLUMNS[column] for column in columns)]]
    for name, row in sorted(labellers.items()):
        rows.append([name, *(_text(row[column]) for column in columns)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [_aligned(row, widths) for row in rows]


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = row
    cells = [first.ljust(widths[0])]
    cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
    return '  '.join(cells).rstrip()


def _text(value: float | Sequence[int] | dict[str, int] | None) -> str:
    """A value of the report in a few characters."""
    if value is None:
        return '-'
    if isinstance(value, float):
        return f'{value:.3f}'
    if isinstance(value, int):
        return str(value)
    if isinstance(value, dict):
        return f'{value["right"]} of {value["answers"]}' if value['answers'] else '-'
    return ' '.join(map(str, value))
