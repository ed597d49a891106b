"""The command that repeats a training: its experiment, and what differs from that."""

from __future__ import annotations

import copy
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lm_human_preferences import shell
from lm_human_preferences.hparams import policy_options
from lm_human_preferences.runs import command_record, run_settings
from lm_human_preferences.runs.run_files import COMMANDS, REWARD
from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.hyperparams import group_class

if TYPE_CHECKING:
    from lm_human_preferences.run_story.facts import RunFacts

Experiments = Mapping[str, Mapping[str, Any]]  # {command/experiment: what it sets}
_NEW = run_settings.NEW_MODEL
_LONGEST = 20_000  # characters of a command line
NAMES = 'NAMES'  # stands for the names of labellers, which are nobody's business
_OF_NAMES = ('labels.without', 'serve.labellers')  # options whose values are such names end so
# What a run itself decides: where it is kept, and the reward model that it trains.
_OWN = {'run.save_dir', f'{_NEW}.run.save_dir'}


def repeating(
    command: str,
    hparams: Any,
    name: str,
    experiment: str,
    ranks: int | None,
    experiments: Experiments,
    *,
    in_full: bool = False,
) -> str | None:
    """The command line of `command` that gives `hparams`; None for an unknown experiment.

    name: of the run. in_full: as its user can type it again; for others, of local paths only the
    last part is told, and of labellers no name.
    """
    binds = experiments.get(f'{command}/{experiment}')
    if binds is None:
        return None
    words = ['./launch.py', command, experiment, name]
    if ranks is not None:
        words += ['--mpi', str(ranks)]
    for key, value in differences(hparams, binds).items():
        for each in value if isinstance(value, tuple | list) else [value]:
            words += shell.option_words(key, each if in_full else _told(key, each))
    return shlex.join(words)


def again(facts: RunFacts, experiments: Experiments) -> str | None:
    """The command that trains as the run of `facts` was trained, for its user to type.

    It gives the same curves to the bit, on the same kind of processor, unless the run was resumed
    with other settings. None where the experiment is not known.
    """
    hparams = facts.policy if facts.policy is not None else facts.reward
    if hparams is None:
        return None
    command = hparams.writes()[-1]
    recorded = command_record.read(facts.directory)
    name = os.path.basename(facts.directory.rstrip('/')) + '-again'
    line = repeating(
        command,
        with_seeds(hparams, command_record.seeds(recorded)),
        name,
        facts.experiments.get(command, ''),
        facts.ranks,
        experiments,
        in_full=True,
    )
    threads = recorded[0].get('threads') if recorded else None
    if line is None or not isinstance(threads, int):
        return line
    return f'OMP_NUM_THREADS={threads} {line}'


def is_of_names(option: str) -> bool:
    """Whether the value of an option is names of labellers."""
    return option.endswith(_OF_NAMES)


def words_of(line: str) -> list[str] | None:
    """The words of a command line; None where it is none, or so long that reading takes seconds."""
    if len(line) > _LONGEST:
        return None
    try:
        return shlex.split(line)
    except ValueError:
        return None


def without_names(line: str) -> str:
    """A command line without the names of labellers in it; all of it where it cannot be read."""
    words = words_of(line)
    if words is None:
        return NAMES
    for place, word in enumerate(words):
        option, equals, _ = word.partition('=')
        if not is_of_names(option):
            continue
        if equals:
            words[place] = f'{option}={NAMES}'
        elif place + 1 < len(words):
            words[place + 1] = NAMES
    return shlex.join(words)


def with_seeds(hparams: Any, seeds: Mapping[str, int]) -> Any:
    """The settings of a run, with those of `seeds` {network: seed} where it was given none."""
    found = copy.deepcopy(hparams)
    trained = [(found.run, COMMANDS[found.writes()[-1]].network)]
    if isinstance(found, policy_options.HParams) and found.rewards.train_new_model is not None:
        trained.append((found.rewards.train_new_model.run, REWARD.network))
    for run, network in trained:
        if run.seed is None:
            run.seed = seeds.get(network)
    return found


def differences(hparams: Any, binds: Mapping[str, Any]) -> dict[str, Any]:
    """{option: value} by which the settings of a run differ from those of its experiment.

    binds: what the experiment sets.
    """
    base = type(hparams)()
    base.override_from_dict(dict(binds))
    found = _switched(hparams, base)
    now, before = dict(_leaves(hparams)), dict(_leaves(base))
    for key, value in now.items():
        if key not in _OWN and value != before.get(key, value):
            found[key] = value
    return _as_given(found, hparams, now)


def settings(hparams: Any) -> dict[str, Any]:
    """{option: value} of all settings of a run that its user decides, of groups that are on."""
    found = {key: value for key, value in _leaves(hparams) if key not in _OWN}
    return _as_given(found, hparams, found)


def _switched(hparams: Any, base: Any) -> dict[str, Any]:
    """{group: 'on' or 'off'} of the groups that are not as in `base`, which gets them so."""
    found = {}
    for key, field in hyperparams.fields(type(hparams)).items():
        if group_class(field.type) is None:
            continue
        is_on, was_on = (_value(each, key) is not None for each in (hparams, base))
        if is_on != was_on:
            found[key] = 'on' if is_on else 'off'
            base.override_from_dict({key: found[key]})
    return found


def _as_given(found: dict[str, Any], hparams: Any, now: Mapping[str, Any]) -> dict[str, Any]:
    """The same as a user gives it: what follows from other options is left out."""
    if not isinstance(hparams, policy_options.HParams) or hparams.rewards.train_new_model is None:
        return found
    found = {key: value for key, value in found.items() if not key.startswith(f'{_NEW}.task.')}
    found.pop('rewards.trained_model', None)
    # The reward model follows the policy in these, unless they are given for it, too.
    for key in policy_options.OF_BOTH & found.keys():
        found[f'{_NEW}.{key}'] = now[f'{_NEW}.{key}']
    return found


def _leaves(hparams: Any) -> Iterator[tuple[str, Any]]:
    """(option, value) of all that lasts; groups are not among them."""
    fields = hyperparams.fields(type(hparams))
    for key, field in fields.items():
        if group_class(field.type) is not None or not field.metadata.get('lasting', True):
            continue
        if hyperparams.is_of_another_command(key, field) or not _is_in_a_group_that_is_on(
            hparams, key
        ):
            continue
        yield key, _value(hparams, key)


def _is_in_a_group_that_is_on(hparams: Any, key: str) -> bool:
    group = key.rpartition('.')[0]
    return not group or _value(hparams, group) is not None


def _value(hparams: Any, key: str) -> Any:
    """The value of a dotted name; None where a group before it is off."""
    for part in key.split('.'):
        hparams = getattr(hparams, part, None)
    return hparams


def shortened(path: str) -> str:
    """A path or URL for others to read.

    Of an absolute local path it is the last part; a URL is without a key that it may have.
    """
    if os.path.isabs(path):
        return os.path.basename(path.rstrip('/')) or path
    if re.match('https?://', path):
        return re.sub('//[^/]*@', '//', re.split('[?#]', path)[0])
    return path


def _told(key: str, value: Any) -> str:
    """A value as the user types it."""
    if value is not None and is_of_names(key):
        return NAMES
    return shortened(value) if isinstance(value, str) else str(value)
