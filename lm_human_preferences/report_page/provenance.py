"""Provenance of a run: commands, machines, versions, digests, settings."""

import contextlib
import hashlib
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.run_story import commands
from lm_human_preferences.run_story.commands import Experiments
from lm_human_preferences.run_story.facts import RunFacts
from lm_human_preferences.run_story.label_facts import json_object
from lm_human_preferences.runs import command_record, run_files
from lm_human_preferences.utils.hyperparams import HParams, value_of

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


def provenance(facts: RunFacts, experiments: Experiments, *, has_names: bool) -> dict[str, Any]:
    """Return the section on provenance: commands, digests, settings, how to repeat it."""
    recorded = facts.recorded
    again = None
    with contextlib.suppress(*_DAMAGED):
        again = commands.again(facts, experiments)
    experiment, settings = _settings(facts, experiments)
    lines = [str(each.get('command') or 'a program of its own') for each in recorded]
    if not has_names:
        lines = [commands.without_names(line) for line in lines]
        again = None if again is None else commands.without_names(again)
        settings = [
            (key, commands.NAMES if commands.is_of_names(key) else value, usual)
            for key, value, usual in settings
        ]
    return {
        'commands': list(zip(lines, recorded, strict=True)),
        'settings': settings,
        'experiment': experiment,
        'again': again,
        'is_exact': _is_uniform(recorded),
        'digests': _digests(facts.directory),
    }


def _is_uniform(recorded: Sequence[dict[str, Any]]) -> bool:
    """Return whether all trainings of a run had the same settings, machine and versions."""
    trainings = [each for each in recorded if _words(each)[1:2] != ['evaluate']]
    if not trainings:
        return True
    first, *later = trainings
    return all(
        all(each.get(key) == first.get(key) for key in _SAME) and _goes_on(each, first)
        for each in later
    )


def _goes_on(record: dict[str, Any], first: dict[str, Any]) -> bool:
    """Return whether a command continues the first one with the same settings."""
    words = _words(record)
    if words[1:2] == ['resume']:
        return len(words) == 3
    return {*words} - _RESUMES == {*_words(first)} - _RESUMES


def _words(record: dict[str, Any]) -> list[str]:
    """Return the words of a recorded command; none where they are not known."""
    return commands.words_of(str(record.get('command') or '')) or []


def duration(seconds: float) -> str:
    """Format seconds for people."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f'{hours} h {minutes} min'
    return f'{minutes} min {rest} s' if minutes else f'{seconds:.1f} s'


def _settings(facts: RunFacts, experiments: Experiments) -> tuple[str, list[tuple[str, str, str]]]:
    """Return the experiment, and (option, value, the experiment's value) of those that differ."""
    own = facts.settings
    if own is None:
        return _UNKNOWN, []
    name = facts.experiments.get(own.command)
    binds = experiments.get(f'{own.command}/{name}')
    if name is None or binds is None:
        return name or _UNKNOWN, []
    usual = type(own)()
    usual.override_from_dict(dict(binds))
    of_reward = experiments.get(f'{run_files.REWARD.command}/{name}', {})
    differences = commands.differences(own, binds, of_reward)
    return name, [
        (f'--{key}', str(value), _shown(value_of(usual, key))) for key, value in differences.items()
    ]


def _shown(value: Any) -> str:
    """Return a setting of an experiment; a group is on or off, and so is an option of one."""
    if isinstance(value, HParams):
        return 'on'
    return 'off' if value is None else str(value)


def _digests(run: str) -> list[tuple[str, str]]:
    """Return (name, SHA-256) of what the run learned from and made."""
    found = []
    learned = json_object(storage.join(run, run_files.LEARNED))
    if isinstance(learned.get('digest'), str):
        found.append(('the labels', learned['digest']))
    if storage.is_remote(run):
        return found
    with contextlib.suppress(OSError):
        function = pathlib.Path(run, run_files.FUNCTION).read_bytes()
        found.append(("the reward's file", hashlib.sha256(function).hexdigest()))
    for files in run_files.COMMANDS.values():
        indices = pathlib.Path(run, files.finished).glob('*.index')
        with contextlib.suppress(OSError, ValueError):  # where there is none, or no longer one
            newest = max(filter(os.path.isfile, indices), key=os.path.getmtime)
            digest = hashlib.sha256(newest.read_bytes()).hexdigest()
            name = f'{files.network}, the index of its last checkpoint'
            found.append((f'{name} (it has a checksum of each tensor)', digest))
    return found
