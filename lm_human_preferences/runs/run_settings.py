"""Settings of a run: what is recorded of them, and which may change when it is resumed."""

from __future__ import annotations

import contextlib
import copy
import os
import secrets
import shlex
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeVar

from lm_human_preferences import shell, storage
from lm_human_preferences.checkpointing import names
from lm_human_preferences.errors import OptionError, UserError
from lm_human_preferences.hparams import policy_options, reward_options
from lm_human_preferences.hparams.policy_options import Training
from lm_human_preferences.runs import recorded_paths, reward_function, run_files, run_record
from lm_human_preferences.runs.fixed_settings import NEW_MODEL, is_fixed
from lm_human_preferences.runs.recorded_paths import INITIAL_MODEL
from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.streams import note

AnyTraining = TypeVar('AnyTraining', bound=Training)


def write(
    hparams: Training,
    directory: str,
    *,
    experiment: str | None,
    ranks: int,
    commands: Collection[str] | None = None,
) -> None:
    """Write the settings of a run that begins or goes on; commands: of which trainings, None: all.

    First run.json, then the files of the original: where these are, there is a run.
    """
    hparams = _with_initial_model_as_begun(hparams)
    additions = _lasting_additions(hparams)
    settings: dict[str, tuple[Training, dict[str, Any]]] = {hparams.command: (hparams, additions)}
    if hparams.policy is not None and hparams.reward_training is not None:  # in the same run
        prefix = f'{NEW_MODEL}.'
        of_reward: dict[str, Any] = {'ensemble': hparams.members}
        for name, value in additions.items():
            if name.startswith(prefix):
                of_reward[name.removeprefix(prefix)] = value
        settings[run_files.REWARD.command] = (hparams.reward_training, of_reward)
    if commands is not None:
        settings = {command: settings[command] for command in commands}
    resume = hparams.run.resume
    digests = recorded_paths.digests(_given_settings(hparams))
    if hparams.policy is not None and hparams.policy.rewards.function is not None:
        code = reward_function.read(hparams.policy.rewards.function)
        digests['rewards.function'] = code.digest
        storage.write_bytes(os.path.join(directory, run_files.FUNCTION), code.text.encode())
    entries = {}
    for command, (of_command, additions) in settings.items():
        before = run_record.training(directory, command) if resume else {}
        unknown = {k: v for k, v in before.get('settings', {}).items() if not of_command.has(k)}
        entries[command] = {
            'experiment': experiment,
            'ranks': before.get('ranks', ranks),
            'settings': {**unknown, **additions},
            'digests': digests,
        }
    run_record.write_trainings(directory, entries, resume=resume)
    for command, (of_command, _) in settings.items():
        content = of_command.to_nested_dict(original_only=True, with_unknown=True)
        storage.write_json(os.path.join(directory, run_files.COMMANDS[command].settings), content)


def use_own_model(hparams: policy_options.HParams) -> None:
    """Let a run that goes on take its own model for the initial one, if that is not here."""
    model, save_dir = hparams.task.policy.initial_model, hparams.run.save_dir
    path = storage.model_path(model) or model
    is_blob = storage.is_remote(path) and not storage.is_hub(path)
    unfinished = os.path.join(str(hparams.run.directory), run_files.POLICY.unfinished)
    if not (is_blob or storage.is_here(path)) and names.resumable(unfinished):
        note(f'note: {model} is not on this machine; the run has what it needs of it')
        base = storage.join(str(save_dir), run_files.BASE)
        _set_initial_model(hparams, base if storage.exists(base) else str(save_dir))


def _with_initial_model_as_begun(hparams: Training) -> Training:
    """Return `hparams` with the recorded initial model where `use_own_model` has set another."""
    directory = hparams.run.directory
    save_dir = hparams.run.save_dir
    if directory is None or save_dir is None:
        return hparams
    if hparams.task.policy.initial_model not in (save_dir, storage.join(save_dir, run_files.BASE)):
        return hparams
    begun = as_recorded(hparams)
    if begun is hparams:
        return hparams
    hparams = copy.deepcopy(hparams)
    _set_initial_model(hparams, begun.task.policy.initial_model)
    return hparams


def _set_initial_model(hparams: Training, model: str) -> None:
    """Set it for a policy and for the reward model that is trained with it."""
    hparams.task.policy.initial_model = model
    if hparams.new_reward_model is not None:
        hparams.new_reward_model.task.policy.initial_model = model


def as_recorded(hparams: AnyTraining) -> AnyTraining:
    """Return the settings that a run in the directory has recorded; `hparams` for none."""
    recorded = type(hparams)()
    try:
        read_settings(recorded, str(hparams.run.directory))
    except storage.NotFound:
        return hparams
    return recorded


def read_settings(hparams: Training, directory: str) -> None:
    """Override `hparams` from what a run in `directory` has recorded; NotFound if there is none."""
    files = run_files.COMMANDS[hparams.command]
    hparams.override_from_json_file(storage.join(directory, files.settings))
    settings = run_record.training(directory, hparams.command)['settings']
    known = {name: value for name, value in settings.items() if hparams.has(name)}
    path = storage.join(directory, run_files.RECORD)
    with hyperparams.reading(path):
        hparams.override_from_dict(known)
        hparams.check_values()
    hyperparams.note_unknown(path, tuple(name for name in settings if name not in known))


def load_run_hparams(save_dir: str) -> policy_options.HParams:
    """Return the hyperparameters of the run of train_policy in `save_dir`, local or remote."""
    hparams = policy_options.HParams()
    try:
        read_settings(hparams, save_dir)
    except storage.NotFound as e:
        raise OptionError(
            '--save_dir',
            f'{save_dir} is not a run of train_policy: it has no {run_files.POLICY.settings}',
        ) from e
    return hparams


def reward_settings_of(run: str) -> reward_options.HParams | None:
    """Return the settings of a reward model's training, or only its task; None if unknown.

    run: its directory, or that of its network.
    """
    for directory in (run.rstrip('/'), os.path.dirname(run.rstrip('/'))):
        settings = reward_options.HParams()
        with contextlib.suppress(storage.NotFound):
            read_settings(settings, directory)
            return settings
        if storage.exists(storage.join(directory, run_files.POLICY.settings)):
            of_policy = load_run_hparams(directory)
            return of_policy.new_reward_model or reward_options.HParams(task=of_policy.task)
    return None


def experiment_of(directory: str, command: str) -> str | None:
    """Return the experiment of the run of `command` in `directory`; None if not recorded."""
    return run_record.training(directory, command)['experiment']


def ranks_of(directory: str) -> int | None:
    """Return the number of ranks that a run in `directory` began with; None if not recorded."""
    found = _recorded(directory, 'ranks')
    return found if found is not None and found > 0 else None


def _recorded(directory: str, name: str) -> Any:
    """Return what a run has recorded under `name`, of its policy if it has one; None if nothing."""
    for files in (run_files.POLICY, run_files.REWARD):
        found = run_record.training(directory, files.command).get(name)
        if found:
            return found
    return None


def members_of(directory: str, files: run_files.CommandFiles) -> int:
    """Return the number of reward models that a command has trained, or its policy learned from."""
    option = 'ensemble' if files is run_files.REWARD else 'rewards.ensemble'
    members = run_record.training(directory, files.command)['settings'].get(option)
    return members if isinstance(members, int) and members > 0 else 1


def _lasting_additions(hparams: Training) -> dict[str, Any]:
    """Return the options that only this port has, and a resumed run goes on with."""
    fields = hyperparams.fields(type(hparams))
    return {
        name: value
        for name, value in hparams.additions().items()
        if fields[name].metadata.get('lasting', True)
    }


def check_settings(hparams: Training, explicitly_set: Collection[str]) -> None:
    """Raise UserError where a resumed run's settings differ, unless they are `explicitly_set`."""
    directory = hparams.run.directory
    assert directory is not None
    function = None if hparams.policy is None else hparams.policy.rewards.function
    if function is not None:
        named = function if 'rewards.function' in explicitly_set else None
        reward_function.check_named(directory, function, named)
    recorded = as_recorded(hparams)
    if recorded is hparams:
        return
    hparams.keep_unknown_of(recorded)
    changes = _changes(_settings(recorded), _settings(hparams), _seed_of_ensemble(hparams))
    _refuse_ineffective(hparams, changes, explicitly_set)
    implicit = [text for key, text in changes.items() if not _covers(explicitly_set, key)]
    if implicit:
        raise UserError(
            f'{hparams.run.save_dir} was started with other settings than {", ".join(implicit)}:'
            ' pass the options that are to change, or keep all settings with'
            f' `{resume_command(hparams)}`'
        )
    for text in changes.values():
        note(f'note: going on with {text}')
    settings = _given_settings(hparams)
    digests = _recorded(directory, 'digests') or {}
    for name in recorded_paths.changed(digests, settings):
        if not _covers(explicitly_set, name):
            raise UserError(
                f'{settings[name]} is not what it was when this run began: restore it, or give'
                f' {shlex.join(shell.option_words(name, settings[name]))} to go on with what it is'
                ' now'
            )


def resume_command(hparams: Training) -> str:
    """Return the command that goes on with a run, which has to name a function of the user's."""
    words = [str(hparams.run.save_dir)]
    if hparams.policy is not None and hparams.policy.rewards.function is not None:
        words += shell.option_words('rewards.function', hparams.policy.rewards.function)
    return shell.typed('./launch.py resume', *words)


def _given_settings(hparams: Training) -> dict[str, Any]:
    """Return the settings of a run, but for the path of the reward model that it trains itself."""
    settings = _settings(hparams)
    if settings.get(NEW_MODEL) == 'on':
        del settings['rewards.trained_model']
    return settings


def note_on_queries(save_dir: str, hparams: policy_options.HParams) -> str | None:
    """Return a note where the queries of a run have another content than when it began."""
    digests = _recorded(save_dir, 'digests') or {}
    if recorded_paths.QUERIES not in recorded_paths.changed(digests, _given_settings(hparams)):
        return None
    return f'note: {hparams.task.query_dataset} is not what it was when this run began'


def pins(hparams: Training, *, ask: bool = True) -> dict[str, Any]:
    """Return {setting: value} of commits and drawn seeds; ask: False for commits in the cache."""
    recorded: dict[str, Any] = {}
    if hparams.run.resume and hparams.run.directory is not None:
        before = as_recorded(hparams)
        recorded = {} if before is hparams else _settings(before)
    found = {}
    seed = _seed_of_ensemble(hparams)
    if seed is not None:
        found[seed] = recorded.get(seed) or secrets.randbits(31)
    for key, value in _settings(hparams).items():
        if storage.is_pin_of(recorded.get(key), value):
            found[key] = recorded[key]
            continue
        path = _path_on_hub(hparams, key, value)
        if path is not None and (ask or storage.is_here(path)):
            found[key] = storage.pinned(value, ask=ask)
            if key.endswith(INITIAL_MODEL):
                found[key] = found[key].removeprefix(path.removesuffix(value))  # as it was given
    return found


def _seed_of_ensemble(hparams: Training) -> str | None:
    """Return the name of the seed of an ensemble to be trained, if it is None; else None."""
    training = hparams.reward_training
    if training is None or hparams.members == 1 or training.run.seed is not None:
        return None
    return 'run.seed' if hparams.policy is None else f'{NEW_MODEL}.run.seed'


def _path_on_hub(hparams: Training, key: str, value: Any) -> str | None:
    """Return the hf:// path that a setting names, if any; a model also as ORG/NAME."""
    if not isinstance(value, str):
        return None
    # The directory of a reward model that the run is yet to train may be called like a model.
    is_given_model = key == 'rewards.trained_model' and hparams.new_reward_model is None
    if key.endswith(INITIAL_MODEL) or is_given_model:
        return storage.model_path(value)
    return value if storage.is_hub(value) else None


def _changes(before: Mapping[str, Any], now: Mapping[str, Any], seed: str | None) -> dict[str, str]:
    """Return {dotted name: text on its change}. seed: see _seed_of_ensemble."""
    changes = {}
    for key in {**before, **now}:
        if before.get(key) == now.get(key) or key.endswith('run.save_dir'):
            continue
        is_own = key in ('rewards.trained_model', 'rewards.ensemble', seed)
        if is_own and now.get(key, key) is None:
            continue  # recorded is what the run has trained, found or drawn itself
        if storage.is_pin_of(before.get(key), now.get(key)):
            continue  # a run that has begun stays at the commit
        changes[key] = f'--{key} {now.get(key, "off")} (before: {before.get(key, "off")})'
    return changes


def _settings(hparams: Training) -> dict[str, Any]:
    """Return {dotted name: value} of all that a resumed run goes on with."""
    original = _leaves(hparams.to_nested_dict(original_only=True))
    settings = {**dict(original), **_lasting_additions(hparams)}
    if hparams.policy is not None:
        # A group that is off has no values: all of them would differ, and not the group itself.
        settings[NEW_MODEL] = 'off' if hparams.new_reward_model is None else 'on'
    return settings


def _covers(explicitly_set: Collection[str], key: str) -> bool:
    """Return whether the user has given the setting `key`, or a group that it is in."""
    return any(f'{key}.'.startswith(f'{name}.') for name in explicitly_set)


def _refuse_ineffective(
    hparams: Training, changes: Mapping[str, str], explicitly_set: Collection[str]
) -> None:
    """Raise UserError for one of the `changes` that a resumed run would ignore."""
    directory = hparams.run.directory
    assert directory is not None
    is_finished = run_files.has_reward_model(directory)
    fixed = {key for key in changes if is_fixed(hparams, key, has_reward_model=is_finished)}
    if 'rewards.function' in changes and not run_files.has_reward_function(directory):
        fixed.add('rewards.function')
    for key in fixed:
        raise UserError(
            f'--{key} cannot change: a run that has begun goes on with its own: start another one'
            f' by {shell.typed(f"./launch.py {hparams.command}")}'
        )
    if not is_finished:
        return
    for key in changes:
        is_of_policy = key.removeprefix(f'{NEW_MODEL}.') in changes  # and copied from there
        if not is_of_policy and key.startswith(NEW_MODEL) and _covers(explicitly_set, key):
            raise UserError(
                f'--{key} cannot change: the reward model of this run is finished; to train another'
                f' one: {shell.typed("./launch.py train_policy")}'
            )


def _leaves(nested: Mapping[str, Any], prefix: str = '') -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of every setting in nested dicts."""
    for key, value in nested.items():
        if isinstance(value, dict):
            yield from _leaves(value, f'{prefix}{key}.')
        else:
            yield prefix + key, value
