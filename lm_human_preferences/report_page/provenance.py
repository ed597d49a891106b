"""Provenance of a run: commands, machines, versions, digests, settings."""

import contextlib
import hashlib
import os
import pathlib
from typing import Any

from lm_human_preferences import storage
from lm_human_preferences.hparams.differences import Experiments, differences
from lm_human_preferences.run_story import command_lines
from lm_human_preferences.run_story.facts import RunFacts
from lm_human_preferences.run_story.label_facts import recorded_labels
from lm_human_preferences.runs import run_files
from lm_human_preferences.utils.hyperparams import HParams, value_of

_UNKNOWN = 'not known'


def provenance(facts: RunFacts, experiments: Experiments, *, has_names: bool) -> dict[str, Any]:
    """Return the section on provenance: commands, digests, settings."""
    recorded = facts.recorded
    experiment, settings = _settings(facts, experiments)
    lines = [str(each.get('command') or 'a program of its own') for each in recorded]
    if not has_names:
        lines = [command_lines.without_names(line) for line in lines]
        settings = [
            (key, command_lines.NAMES if command_lines.is_of_names(key) else value, usual)
            for key, value, usual in settings
        ]
    return {
        'commands': list(zip(lines, recorded, strict=True)),
        'settings': settings,
        'experiment': experiment,
        'digests': _digests(facts.directory),
    }


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
    return name, [
        (f'--{key}', str(value), _shown(value_of(usual, key)))
        for key, value in differences(own, usual).items()
    ]


def _shown(value: Any) -> str:
    """Return a setting of an experiment; a group is on or off, and so is an option of one."""
    if isinstance(value, HParams):
        return 'on'
    return 'off' if value is None else str(value)


def _digests(run: str) -> list[tuple[str, str]]:
    """Return (name, SHA-256) of what the run learned from and made."""
    found = []
    digest = recorded_labels(run).get('digest')
    if isinstance(digest, str):
        found.append(('the labels', digest))
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
