"""Command that repeats a training: its experiment, and the settings that differ from it."""

from __future__ import annotations

import copy
import dataclasses
import os
import re
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lm_human_preferences import shell
from lm_human_preferences.hparams import completion, policy_options
from lm_human_preferences.runs import command_record, run_settings
from lm_human_preferences.runs.run_files import COMMANDS, REWARD
from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.hyperparams import group_class, value_of

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
    facts: RunFacts, name: str, experiments: Experiments, *, is_for_others: bool = True
) -> str | None:
    """Return the command line that gives the settings of a run; None for an unknown experiment.

    name: of the new run. is_for_others: with the last part of local paths, and no name of a
    labeller.
    """
    hparams = facts.settings
    if hparams is None:
        return None
    command = hparams.command
    experiment = facts.experiments.get(command)
    binds = experiments.get(f'{command}/{experiment}')
    if experiment is None or binds is None:
        return None
    words = ['./launch.py', command, experiment, name]
    if facts.ranks is not None:
        words += ['--mpi', str(facts.ranks)]
    of_reward = experiments.get(f'{REWARD.command}/{experiment}', {})
    for key, value in differences(hparams, binds, of_reward).items():
        for each in value if isinstance(value, tuple | list) else [value]:
            words += shell.option_words(key, shown(key, each) if is_for_others else each)
    return shlex.join(words)


def again(facts: RunFacts, experiments: Experiments) -> str | None:
    """Return the command that repeats a run to the bit; None for unknown experiments."""
    recorded = facts.recorded
    seeds = command_record.seeds(recorded)
    seeded = dataclasses.replace(
        facts, policy=_with_seeds(facts.policy, seeds), reward=_with_seeds(facts.reward, seeds)
    )
    name = os.path.basename(facts.directory.rstrip('/')) + '-again'
    line = repeating(seeded, name, experiments, is_for_others=False)
    threads = recorded[0].get('threads') if recorded else None
    if line is None or not isinstance(threads, int):
        return line
    return f'OMP_NUM_THREADS={threads} {line}'


def is_of_names(option: str) -> bool:
    """Return whether the value of an option is names of labellers."""
    return option.endswith(_OF_NAMES)


def words_of(line: str) -> list[str] | None:
    """Split a command line into words; None if it is malformed, or too long to be read fast."""
    if len(line) > _LONGEST:
        return None
    try:
        return shlex.split(line)
    except ValueError:
        return None


def without_names(line: str) -> str:
    """Replace the names of labellers in a command line; all of one that cannot be read."""
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


def _with_seeds(hparams: Any, seeds: Mapping[str, int]) -> Any:
    """Return the settings of a run with `seeds` {network: seed} where it was given none."""
    if hparams is None:
        return None
    found = copy.deepcopy(hparams)
    trained = [(found.run, COMMANDS[found.command].network)]
    if found.new_reward_model is not None:
        trained.append((found.new_reward_model.run, REWARD.network))
    for run, network in trained:
        if run.seed is None:
            run.seed = seeds.get(network)
    return found


def differences(
    hparams: Any, binds: Mapping[str, Any], of_reward: Mapping[str, Any]
) -> dict[str, Any]:
    """Return {option: value} of a run's settings that differ from those of its experiment.

    of_reward: settings that the experiment of this name has in train_reward.
    """
    base = type(hparams)()
    base.override_from_dict(dict(binds))
    found = _switched(hparams, base)
    if _NEW in found and found[_NEW] == 'on':
        completion.switch_on_new_model(base, of_reward)
    now, before = _leaves(hparams), _leaves(base)
    for key, value in now.items():
        if key not in _OWN and value != before.get(key, value):
            found[key] = value
    return _as_given(found, hparams, now)


def differences_of_task(task: Mapping[str, Any], binds: Mapping[str, Any]) -> dict[str, Any]:
    """Return {option: value} of a folder's task, nested, that differ from an experiment's."""
    of_folder = policy_options.HParams()
    of_folder.override_from_dict(dict(binds))
    of_folder.task = type(of_folder.task)()
    of_folder.task.override_from_nested_dict(dict(task))
    found = differences(of_folder, binds, {})
    return {key: value for key, value in found.items() if key.startswith('task.')}


def settings(hparams: Any) -> dict[str, Any]:
    """Return {option: value} of all settings that a user decides, of groups that are on."""
    found = {key: value for key, value in _leaves(hparams).items() if key not in _OWN}
    return _as_given(found, hparams, found)


def _switched(hparams: Any, base: Any) -> dict[str, Any]:
    """Switch groups of `base` as in `hparams`; return {group: 'on' or 'off'} of those switched."""
    found = {}
    for key, field in hyperparams.fields(type(hparams)).items():
        if group_class(field.type) is None:
            continue
        is_on, was_on = (value_of(each, key) is not None for each in (hparams, base))
        if is_on != was_on:
            found[key] = 'on' if is_on else 'off'
            base.override_from_dict({key: found[key]})
    return found


def _as_given(found: dict[str, Any], hparams: Any, now: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out options that follow from others."""
    if hparams.policy is None or hparams.new_reward_model is None:
        return found
    found = {key: value for key, value in found.items() if not key.startswith(f'{_NEW}.task.')}
    found.pop('rewards.trained_model', None)
    # The reward model follows the policy in these, unless they are given for it, too.
    for key in completion.OF_BOTH & found.keys():
        found[f'{_NEW}.{key}'] = now[f'{_NEW}.{key}']
    return found


def _leaves(hparams: Any) -> dict[str, Any]:
    """Return {option: value} of lasting settings, without groups."""
    fields, found = hyperparams.fields(type(hparams)), {}
    for key, value in hyperparams.leaves(hparams).items():
        is_lasting = fields[key].metadata.get('lasting', True)
        if is_lasting and not hyperparams.is_of_another_command(key, fields[key]):
            found[key] = value
    return found


def shortened(path: str) -> str:
    """Return the last part of an absolute local path, or a URL without its key."""
    if os.path.isabs(path):
        return os.path.basename(path.rstrip('/')) or path
    if re.match('https?://', path):
        return re.sub('//[^/]*@', '//', re.split('[?#]', path)[0])
    return path


def shown(key: str, value: Any) -> str:
    """Return a value for others to read, as it is typed."""
    if value is not None and is_of_names(key):
        return NAMES
    return shortened(value) if isinstance(value, str) else str(value)
