"""Where a run came from: its commands, machines, versions, digests and settings."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.run_story import commands
from lm_human_preferences.run_story.commands import Experiments
from lm_human_preferences.run_story.facts import RunFacts
from lm_human_preferences.runs import command_record, run_files
from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.hyperparams import group_class

_DAMAGED = (UserError, OSError, ValueError, KeyError, TypeError, AttributeError)
_UNKNOWN = 'not known'
# What decides the last digits of a training, of what is recorded of a command.
_SAME = (
    'launcher',
    'ranks',
    'processor',
    'threads',
    'gpu',
    'python',
    'lm-human-preferences',
    *command_record.PACKAGES,
    'commit',
    'commit_is_clean',
)
_RESUMES = {'--run.resume', '--run.resume=on', 'on'}


@dataclasses.dataclass(frozen=True)
class Command:
    """A command that worked on a run, in the words of the page."""

    line: str
    began: str
    end: str
    machine: str
    versions: str


@dataclasses.dataclass(frozen=True)
class Provenance:
    """All that is known of it.

    settings: (option, its value, the experiment's value). again: the command that repeats the run;
    None where that is not known. is_exact: whether that gives the same curves. digests: (what,
    digest).
    """

    commands: list[Command]
    settings: list[tuple[str, str, str]]
    experiment: str
    again: str | None
    is_exact: bool
    digests: list[tuple[str, str]]


def provenance(facts: RunFacts, experiments: Experiments, *, has_names: bool) -> Provenance:
    """That of a run. has_names: whether labellers are named in commands and settings."""
    recorded: list[dict[str, Any]] = []
    with contextlib.suppress(*_DAMAGED):
        recorded = command_record.read(facts.directory)
    again = None
    with contextlib.suppress(*_DAMAGED):
        again = commands.again(facts, experiments)
    name, settings = _settings(facts, experiments)
    told = [_command(each) for each in recorded]
    if not has_names:
        told = [dataclasses.replace(each, line=commands.without_names(each.line)) for each in told]
        again = None if again is None else commands.without_names(again)
        settings = [
            (key, commands.NAMES if commands.is_of_names(key) else value, usual)
            for key, value, usual in settings
        ]
    return Provenance(
        told,
        settings,
        name,
        again,
        _is_uniform(recorded),
        _digests(facts.directory),
    )


def _is_uniform(recorded: Sequence[dict[str, Any]]) -> bool:
    """Whether all trainings of a run had the same settings, machine and versions."""
    trainings = [each for each in recorded if _words(each)[1:2] != ['evaluate']]
    if not trainings:
        return True
    first, *later = trainings
    return all(
        all(each.get(key) == first.get(key) for key in _SAME) and _goes_on(each, first)
        for each in later
    )


def _goes_on(record: dict[str, Any], first: dict[str, Any]) -> bool:
    """Whether a command goes on with what the first one began, and changes no setting."""
    words = _words(record)
    if words[1:2] == ['resume']:
        return len(words) == 3
    return {*words} - _RESUMES == {*_words(first)} - _RESUMES


def _words(record: dict[str, Any]) -> list[str]:
    """The words of a recorded command; none where they are not known."""
    return commands.words_of(str(record.get('command') or '')) or []


def _command(record: dict[str, Any]) -> Command:
    ranks, threads = record.get('ranks'), record.get('threads')
    machine = [str(record.get('processor') or _UNKNOWN)]
    if record.get('gpu'):
        machine = [str(record['gpu'])]
    machine += [_count(ranks, 'rank'), _count(threads, 'thread')]
    for key, unit in (('peak_gigabytes', 'GB at most'), ('peak_gpu_gigabytes', 'GB of the GPU')):
        if isinstance(record.get(key), int | float):
            machine.append(f'{record[key]:.1f} {unit}')
    versions = [
        f'{name} {record[name]}'
        for name in ('lm-human-preferences', 'python', *command_record.PACKAGES)
        if record.get(name)
    ]
    if record.get('commit'):
        state = '' if record.get('commit_is_clean') else ', with changes that were not committed'
        versions.append(f'commit {str(record["commit"])[:12]}{state}')
    return Command(
        str(record.get('command') or 'a program of its own'),
        str(record.get('began')).replace('T', ' ').removesuffix('Z'),
        _end(record),
        ', '.join(each for each in machine if each),
        ', '.join(versions),
    )


def _count(value: Any, unit: str) -> str:
    if not isinstance(value, int):
        return ''
    return f'{value} {unit}' if value == 1 else f'{value} {unit}s'


def _end(record: dict[str, Any]) -> str:
    if 'ended' not in record:
        return 'has not ended, or was killed'
    seconds = record.get('seconds')
    took = f' after {duration(seconds)}' if isinstance(seconds, int | float) else ''
    return f'{record.get("how", "ended")}{took}'


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f'{hours} h {minutes} min'
    return f'{minutes} min {rest} s' if minutes else f'{seconds:.1f} s'


def _settings(facts: RunFacts, experiments: Experiments) -> tuple[str, list[tuple[str, str, str]]]:
    """(the experiment, by which settings the run differs from it)."""
    hparams = facts.policy if facts.policy is not None else facts.reward
    if hparams is None:
        return _UNKNOWN, []
    command = hparams.writes()[-1]
    name = facts.experiments.get(command)
    binds = experiments.get(f'{command}/{name}')
    if binds is None:
        return name or _UNKNOWN, []
    usual = type(hparams)()
    usual.override_from_dict(dict(binds))
    return str(name), [
        (f'--{key}', str(value), _value(usual, key))
        for key, value in commands.differences(hparams, binds).items()
    ]


def _value(hparams: Any, key: str) -> str:
    """What the option `key` is; off for a group, and what is in a group, that is."""
    value: Any = hparams
    for name in key.split('.'):
        value = getattr(value, name, None)
    if value is None:
        return 'off'
    is_group = group_class(hyperparams.fields(type(hparams))[key].type) is not None
    return 'on' if is_group else str(value)


def _digests(run: str) -> list[tuple[str, str]]:
    """(what, SHA-256) of what the run learned from and what it made."""
    found = []
    learned = _object(storage.join(run, run_files.LEARNED))
    if isinstance(learned.get('digest'), str):
        found.append(('the labels', learned['digest']))
    function = _object(storage.join(run, run_files.FUNCTION_RECORD))
    for key, value in function.items():
        if key in ('digest', 'sha256') and isinstance(value, str):
            found.append(("the reward's file", value))
    if storage.is_remote(run):
        return found
    for files in run_files.COMMANDS.values():
        index = _last_index(os.path.join(run, files.finished))
        if index is not None:
            with contextlib.suppress(OSError), open(index, 'rb') as file:
                digest = hashlib.sha256(file.read()).hexdigest()
                name = f'{files.network}, the index of its last checkpoint'
                found.append((f'{name} (it has a checksum of each tensor)', digest))
    return found


def _last_index(directory: str) -> str | None:
    """The newest checkpoint's index, as its state file says."""
    with contextlib.suppress(OSError, UnicodeError):
        names = [name for name in os.listdir(directory) if name.endswith('.index')]
        paths = [os.path.join(directory, name) for name in names]
        return max(paths, key=os.path.getmtime, default=None)
    return None


def _object(path: str) -> dict[str, Any]:
    with contextlib.suppress(UserError, OSError, UnicodeError, json.JSONDecodeError):
        value = storage.read_json(path)
        if isinstance(value, dict):
            return value
    return {}
