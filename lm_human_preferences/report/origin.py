"""Origin of a run: commands, machine, versions, events, digests, and settings of its own."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from lm_human_preferences.hparams.differences import Experiments, decided, differences
from lm_human_preferences.report.run import Run
from lm_human_preferences.report.words import (
    DIFFERENCES,
    NOT_RECORDED,
    Row,
    Table,
    Text,
    moment,
    number,
)
from lm_human_preferences.runs import run_lock
from lm_human_preferences.runs.run_record import PACKAGES

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
LONGEST = 20_000  # most characters of a command, as splitting takes long
MOST_ALARMS = 8


def origin(run: Run, experiments: Experiments, *, has_names: bool) -> list[Table]:
    """Return facts about the origin of a run, and its settings. has_names: name labellers."""
    rows = [
        *_commands(run, has_names),
        *_machine(run.commands[0] if run.commands else {}),
        *_events(run),
        *_digests(run),
    ]
    return [Table((), rows), _settings(run, experiments, has_names=has_names)]


def command_lines(command: Mapping[str, Any], *, has_names: bool) -> list[str]:
    """Return a recorded command with one option a line, which can be pasted."""
    line = str(command.get('command') or NOT_RECORDED)
    try:
        words = shlex.split(line[:LONGEST])
    except ValueError:
        words = [line if has_names else NAMES]
    lines, is_hidden = [''], False
    for word in words:
        option, equals, _ = word.partition('=')
        names = option.endswith(OF_NAMES) and not has_names
        shown = f'{option}={NAMES}' if names and equals else NAMES if is_hidden else word
        is_hidden = names and not equals
        if option.startswith('--'):
            lines.append('')
        lines[-1] = f'{lines[-1]} {shlex.quote(shown)}'.strip()
    return lines


def _commands(run: Run, has_names: bool) -> list[Row]:
    rows = []
    is_held = run_lock.is_held(run.directory)
    for command in run.commands:
        line = ' \\\n    '.join(command_lines(command, has_names=has_names))
        without_end = 'still at work' if is_held and command is run.commands[-1] else 'killed'
        took, how = number(command.get('seconds'), 0), command.get('how', without_end)
        rows.append(('Command', Text(line)))
        rows.append(('Began, seconds, end', f'{moment(command.get("began"))}, {took}, {how}'))
    return rows


def _machine(command: Mapping[str, Any]) -> list[Row]:
    machine = [text.format(command[key]) for key, text in MACHINE.items() if command.get(key)]
    packages = ('lm-human-preferences', 'python', *PACKAGES)
    versions = [f'{name} {command[name]}' for name in packages if command.get(name)]
    is_clean = command.get('commit_is_clean', True)
    commit = [str(command.get('commit') or NOT_RECORDED)[:12], *(('changed',) * (not is_clean))]
    rows = {'Machine': machine, 'Versions': versions, 'Commit': commit}
    return [(name, ', '.join(values) or NOT_RECORDED) for name, values in rows.items()]


def _events(run: Run) -> list[Row]:
    log = run.logs[0]
    rows = [(f'Alarm at step {step + 1}', ' '.join(text.split())) for step, text in log.alarms]
    steps = ', '.join(str(step + 1) for step in log.resumed)
    return [*rows[:MOST_ALARMS], *([('Resumed before step', steps)] if steps else [])]


def _digests(run: Run) -> list[Row]:
    found = {'labels': run.labels.get('digest'), **run.digests}
    return [(f'SHA-256 of {name}', str(digest)) for name, digest in found.items() if digest]


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
    return Table(('Setting', 'This run', 'Experiment'), rows, DIFFERENCES)


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
