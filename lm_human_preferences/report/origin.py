"""Origin of a run: commands, machine, versions, events, digests, and settings of its own."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lm_human_preferences.hparams.differences import Experiments, decided, differences
from lm_human_preferences.report.run import Run
from lm_human_preferences.report.words import NOT_RECORDED, Row, Table, Text, moment, number
from lm_human_preferences.runs import run_record

MACHINE = {
    'processor': '{}',
    'gpu': '{}',
    'ranks': '{} ranks',
    'threads': '{} threads',
    'peak_gigabytes': '{} GB',
    'peak_gpu_gigabytes': '{} GB of the GPU',
}
OF_NAMES = ('labels.without', 'serve.labellers')  # endings of options whose values name labellers
OWN_MODEL = 'rewards.trained_model'  # a run that trains its own model sets it
NAMES = 'NAMES'  # shown in place of such a value
MOST_ALARMS = 8
_WORD = re.compile(r"""(?:'[^']*'|"[^"]*"|\S)+""")  # of a command line, with its quotes


def origin(run: Run, experiments: Experiments, *, has_names: bool) -> list[Table]:
    """Return facts about the origin of a run, and its settings. has_names: name labellers."""
    rows: list[Row] = []
    for command in run.commands:
        is_at_work = run.is_at_work and command is run.commands[-1]
        took = number(command.get('seconds'), 0)
        how = command.get('how', 'still at work' if is_at_work else 'killed')
        rows.append(('Command', Text(command_lines(command, has_names=has_names))))
        rows.append(('Began, seconds, end', f'{moment(command.get("began"))}, {took}, {how}'))
    rows += _machine(run.commands[0] if run.commands else {})
    log = run.logs[0]
    for step, text in log.alarms[:MOST_ALARMS]:
        rows.append((f'Alarm at step {step + 1}', ' '.join(text.split())))
    if log.resumed:
        steps = ', '.join(str(step + 1) for step in log.resumed)
        rows.append(('Resumed before step', steps))
    for name, digest in {'labels': run.labels.get('digest'), **run.digests}.items():
        if digest:
            rows.append((f'SHA-256 of {name}', str(digest)))
    return [Table((), rows), _settings(run, experiments, has_names=has_names)]


def command_lines(command: Mapping[str, Any], *, has_names: bool) -> str:
    """Return a recorded command with one option a line, which can be pasted."""
    text, is_hidden = '', False
    for word in _WORD.findall(str(command.get('command') or NOT_RECORDED)):
        option, equals, _ = word.partition('=')
        shown = NAMES if is_hidden else word
        is_hidden = option.endswith(OF_NAMES) and not has_names
        if is_hidden and equals:
            shown, is_hidden = f'{option}={NAMES}', False
        text += f' \\\n    {shown}' if option.startswith('--') else f' {shown}'
    return text.strip()


def _machine(command: Mapping[str, Any]) -> list[Row]:
    machine = [text.format(command[key]) for key, text in MACHINE.items() if command.get(key)]
    versions = [f'{name} {command[name]}' for name in run_record.versions() if command.get(name)]
    commit, changed, _ = str(command.get('commit') or NOT_RECORDED).partition('-dirty')
    return [
        ('Machine', ', '.join(machine) or NOT_RECORDED),
        ('Versions', ', '.join(versions) or NOT_RECORDED),
        ('Commit', f'{commit[:12]}, changed' if changed else commit[:12]),
    ]


def _settings(run: Run, experiments: Experiments, *, has_names: bool) -> Table:
    """Return the settings that differ from those of the experiment."""
    own, rows = run.settings, []
    binds = None if own is None else experiments.get(f'{own.command}/{run.experiment}')
    if own is not None and binds is not None:
        usual = type(own)()
        usual.override_from_dict(dict(binds))
        before = decided(usual)
        for option, value in differences(own, usual).items():
            if option != OWN_MODEL or run.given is not None:
                usually = str(before.get(option, 'off'))
                rows.append((option, _shown(option, value, has_names), usually))
    caption = 'Settings that differ from those of the experiment.'
    return Table(('Setting', 'This run', 'Experiment'), rows, caption)


def differences_between(runs: Sequence[Run], names: Sequence[str], *, has_names: bool) -> Table:
    """Return the settings that are not the same in all runs."""
    found = [{} if run.settings is None else decided(run.settings) for run in runs]
    rows = []
    for option in dict.fromkeys(option for settings in found for option in settings):
        values = [str(settings.get(option, '–')) for settings in found]
        if len(set(values)) > 1:
            rows.append((option, *(_shown(option, value, has_names) for value in values)))
    return Table(('Setting', *names), rows)


def _shown(option: str, value: object, has_names: bool) -> str:
    return NAMES if option.endswith(OF_NAMES) and not has_names else str(value)
