"""Settings of a run: writing and reading them, and the changes allowed when it is resumed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Collection
from typing import Any, TypeVar

from lm_human_preferences import errors, storage
from lm_human_preferences.datasets import jsonl
from lm_human_preferences.errors import OptionError, UserError
from lm_human_preferences.hparams import policy_options, reward_options
from lm_human_preferences.hparams.policy_options import NEW_MODEL, OF_ONE_START, Training, decided
from lm_human_preferences.runs import reward_function, run_files, run_record
from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.streams import note

AnyTraining = TypeVar('AnyTraining', bound=Training)
INITIAL_MODEL = 'task.policy.initial_model'
OWN_REWARD = 'rewards.trained_model'  # the program sets this option to a run's own reward model
_GIVEN_FILES = ('task.query_dataset', OWN_REWARD)  # options whose files a resumed run reads again
_MODEL_FILES = ('.json', '.safetensors')  # endings of the names of a model's files
LENGTH = 'ppo.total_episodes'
# A resumed run may change these options, --run.serve.*, and the path of an unchanged file.
# tests/faults/test_resume_settings.py shows what changing an option of a resumed run does.
MAY_CHANGE = {
    LENGTH,
    'ppo.micro_batch_size',
    'micro_batch_size',
    f'{NEW_MODEL}.micro_batch_size',
    'rewards.function',
    'rewards.online.patience',
    'run.allreduce',
    'run.allreduce_timeout',
    'run.evaluate',
    'run.gradient_checkpointing',
    f'{NEW_MODEL}.run.gradient_checkpointing',
    'run.keep_checkpoints',
    'run.log_interval',
    'run.on_anomaly',
    'run.save_interval',
    'run.stop_timeout',
}


def write(hparams: Training, directory: str, *, experiment: str | None, ranks: int) -> None:
    """Write a run's settings into its directory, when the run begins or is resumed.

    run.json is written first, since a run exists once it has the original's files of settings.
    """
    digests = _digests(hparams)
    if hparams.policy is not None and hparams.policy.rewards.function is not None:
        code = reward_function.read(hparams.policy.rewards.function)
        digests[reward_function.NAME] = code.digest
        storage.write_bytes(os.path.join(directory, run_files.FUNCTION), code.text.encode())
    additions = hparams.additions()
    # Record the options that the original lacks, except those that each start of a run sets anew.
    settings = {name: additions[name] for name in additions if name not in OF_ONE_START}
    trainings: dict[str, hyperparams.HParams] = {hparams.command: hparams}
    about = {'experiment': experiment, 'ranks': ranks, 'digests': digests}
    entries = {hparams.command: {**about, 'settings': settings}}
    if hparams.policy is not None and hparams.reward_training is not None:
        of_reward = {'ensemble': hparams.members}
        for name, value in settings.items():
            if name.startswith(f'{NEW_MODEL}.'):
                of_reward[name.removeprefix(f'{NEW_MODEL}.')] = value
        entries[run_files.REWARD.command] = {**about, 'settings': of_reward}
        trainings[run_files.REWARD.command] = hparams.reward_training
    run_record.write_trainings(directory, entries, resume=hparams.run.resume)
    for command, training in trainings.items():
        content = training.to_nested_dict(original_only=True, with_unknown=True)
        path = os.path.join(directory, run_files.COMMANDS[command].settings)
        storage.write_json(path, content)


def as_recorded(hparams: AnyTraining) -> AnyTraining:
    """Return the recorded settings of the run in the directory; `hparams` if there is no run."""
    try:
        return read_settings(type(hparams)(), str(hparams.run.directory))
    except storage.NotFound:
        return hparams


def read_settings(hparams: AnyTraining, directory: str) -> AnyTraining:
    """Return `hparams` overridden by a run's recorded settings; NotFound if there is no run."""
    files = run_files.COMMANDS[hparams.command]
    hparams.override_from_json_file(storage.join(directory, files.settings))
    run_record.check_present(directory)
    settings = run_record.training(directory, hparams.command)['settings']
    known = {name: value for name, value in settings.items() if hparams.has(name)}
    path = storage.join(directory, run_files.RECORD)
    with hyperparams.reading(path):
        hparams.override_from_dict(known)
        hparams.check_values()
    # Runs of earlier versions may have options that no longer exist.
    hyperparams.note_unknown(path, tuple(name for name in settings if name not in known))
    return hparams


def load_run_hparams(save_dir: str) -> policy_options.HParams:
    """Return the hyperparameters of the run of train_policy in `save_dir`, local or remote."""
    try:
        return read_settings(policy_options.HParams(), save_dir)
    except storage.NotFound as e:
        raise OptionError(
            f'--save_dir {save_dir} is not a run of train_policy: it has no'
            f' {run_files.POLICY.settings}'
        ) from e


def reward_settings_of(run: str) -> reward_options.HParams | None:
    """Return the settings with which a reward model was trained; None if there are none.

    run: directory of the run, or of the reward model in it. A run of train_policy that trained no
    reward model gives only the task.
    """
    for directory in (run.rstrip('/'), os.path.dirname(run.rstrip('/'))):
        with contextlib.suppress(storage.NotFound):
            return read_settings(reward_options.CommandHParams(), directory)
        if storage.exists(storage.join(directory, run_files.POLICY.settings)):
            of_policy = load_run_hparams(directory)
            return of_policy.new_reward_model or reward_options.HParams(task=of_policy.task)
    return None


def members_of(directory: str, files: run_files.CommandFiles) -> int:
    """Return the number of reward models that a run trained, or from which a policy learned."""
    option = 'ensemble' if files is run_files.REWARD else 'rewards.ensemble'
    members = run_record.training(directory, files.command)['settings'].get(option)
    return members if isinstance(members, int) and members > 0 else 1


def check_settings(hparams: Training, explicitly_set: Collection[str]) -> None:
    """Raise UserError for settings that a resumed run cannot change; print the changed ones."""
    directory = str(hparams.run.directory)
    function = None if hparams.policy is None else hparams.policy.rewards.function
    if function is not None:
        named = function if reward_function.NAME in explicitly_set else None
        reward_function.check_named(directory, function, named)
    recorded = as_recorded(hparams)
    if recorded is hparams:
        return
    hparams.keep_unknown_of(recorded)
    before, now = decided(recorded), decided(hparams)
    files = run_record.training(directory, hparams.command)['digests']
    same = _digests(hparams)
    read_again = files.keys() & same.keys()
    for option in read_again:
        if same[option] != files[option]:
            raise UserError(f'{now[option]} has changed since this run began: restore it')
    may_change = MAY_CHANGE | read_again
    if now.get('rewards.online') == 'on':  # the training's length decides when labels are collected
        may_change -= {LENGTH}
    set_by_program = {'rewards.ensemble', _seed_of_ensemble(hparams)}
    for option in {**before, **now}:
        was, value = before.get(option, 'off'), now.get(option, 'off')
        is_own = option in set_by_program and now.get(option) is None
        is_own = is_own or (option == OWN_REWARD and now.get(NEW_MODEL) == 'on')
        if was == value or is_own or storage.is_pin_of(was, value):
            continue
        is_free = option in may_change or option.startswith('run.serve')
        # The user has given this option, or a group that contains it.
        is_given = any(f'{option}.'.startswith(f'{name}.') for name in explicitly_set)
        if is_free and is_given:
            note(f'note: going on with --{option} {value} (before: {was})')
            continue
        fix = 'give that option to change it' if is_free else 'start another run'
        raise UserError(
            f'--{option} {value}: the run in {hparams.run.save_dir} began with {was}:'
            f' resume the run with all its settings by `{resume_command(hparams)}`, or {fix}'
        )


def resume_command(hparams: Training) -> str:
    """Return the command that resumes a run; it names the user's reward function, if any."""
    words = [str(hparams.run.save_dir)]
    if hparams.policy is not None and hparams.policy.rewards.function is not None:
        words += errors.option_words(reward_function.NAME, hparams.policy.rewards.function)
    return errors.typed('./launch.py resume', *words)


def _digests(hparams: Training) -> dict[str, str]:
    """Return {option: SHA-256 of its files} for query files and classifiers on this machine.

    Labels and a reward function are recorded where they are read, and the base of adapters beside
    the adapters. Other weights are in the checkpoints.
    """
    settings = decided(hparams)
    if hparams.policy is not None and hparams.new_reward_model is not None:
        del settings[OWN_REWARD]  # the run itself trains this reward model
    found = {}
    for option in _GIVEN_FILES:
        path = settings.get(option)
        if not isinstance(path, str) or not os.path.isabs(path):  # local paths are absolute
            continue
        files = [name for name in (path, jsonl.file_of_test_part(path)) if name is not None]
        if os.path.exists(os.path.join(path, 'config.json')):
            names = filter(lambda name: name.endswith(_MODEL_FILES), sorted(os.listdir(path)))
            files = [os.path.join(path, name) for name in names]
        if all(map(os.path.isfile, files)):
            digest = hashlib.sha256()
            for name in files:
                with open(name, 'rb') as file:
                    digest.update(hashlib.file_digest(file, 'sha256').digest())
            found[option] = digest.hexdigest()
    return found


def pins(hparams: Training, *, ask: bool = True) -> dict[str, Any]:
    """Return {option: hub path with a commit, or random seed}. ask: whether to query the hub."""
    recorded: dict[str, Any] = {}
    if hparams.run.resume and hparams.run.directory is not None:
        recorded = decided(as_recorded(hparams))
    found = {}
    for key, value in decided(hparams).items():
        if storage.is_pin_of(recorded.get(key), value):
            found[key] = recorded[key]
            continue
        # ORG/NAME is a model on the hub, unless it is the path of a reward model yet to be trained.
        is_model = key == INITIAL_MODEL or (key == OWN_REWARD and hparams.new_reward_model is None)
        path = None
        if isinstance(value, str):
            path = storage.model_path(value) if is_model else value
        if path is not None and storage.is_hub(path) and (ask or storage.is_here(path)):
            found[key] = storage.pinned(value, ask=ask)
            if key == INITIAL_MODEL:
                # The name of the initial model keeps the form in which the user typed it.
                found[key] = found[key].removeprefix(path.removesuffix(value))
    if hparams.policy is not None and hparams.new_reward_model is not None:
        # A policy and its new reward model have the same task.
        found |= {f'{NEW_MODEL}.{key}': found[key] for key in found if key.startswith('task.')}
    seed = _seed_of_ensemble(hparams)
    if seed is not None:
        found[seed] = recorded.get(seed) or secrets.randbits(31)
    return found


def _seed_of_ensemble(hparams: Training) -> str | None:
    """Return the name of an ensemble's seed option if that seed must still be set, or else None."""
    training = hparams.reward_training
    if training is None or hparams.members == 1 or training.run.seed is not None:
        return None
    return 'run.seed' if hparams.policy is None else f'{NEW_MODEL}.run.seed'
