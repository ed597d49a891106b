"""Which directories and checkpoints hold the reward models of a run."""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

from lm_human_preferences import shell, storage
from lm_human_preferences.datasets import registry
from lm_human_preferences.errors import OptionError, UserError
from lm_human_preferences.hparams.policy_options import HParams
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.runs import run_files, run_settings

SCOPE = 'reward_model'  # what its names in checkpoints begin with


class Place(NamedTuple):
    """Where a reward model is. scope: what its names in the checkpoint begin with."""

    directory: str
    scope: str = SCOPE


def places_of(path: str, members: int | None = None) -> list[Place]:
    """Where the reward models are that `path` means: a run, or the directory of one model.

    members: how many of them; None: as many as the run has recorded. A run has a directory for each
    that it has trained, and the checkpoint of a policy has a copy of each that it learned from.
    UserError where there are fewer.
    """
    first = reward_model_dir(path).rstrip('/')
    if members is None:
        members = recorded_members(path)
    if members == 1:
        return [Place(first)]
    directories = [run_files.member_name(first, number) for number in range(members)]
    missing = [each for each in directories if not storage.exists(f'{each}/hparams.json')]
    if not missing:
        return [Place(directory) for directory in directories]
    scopes = [run_files.member_name(SCOPE, number) for number in range(members)]
    if os.path.basename(first) == run_files.POLICY.network:
        there = TrainedModel(first).open_weights().scopes()
        missing = [f'{scope} in {first}' for scope in scopes if scope not in there]
    if missing:
        raise OptionError('--rewards.ensemble', f'{members}: there is no {missing[0]}')
    return [Place(first, scope) for scope in scopes]


def recorded_members(path: str) -> int:
    """How many reward models there are at `path`: a run, or the directory of one model.

    The directory of a policy has those that it learned from. One, where nothing is there yet.
    """
    run, name = os.path.split(path.rstrip('/'))
    if name == run_files.POLICY.network and storage.exists(storage.join(path, 'hparams.json')):
        return run_settings.members_of(run or '.', run_files.POLICY)
    if not storage.exists(storage.join(path, run_files.REWARD.more_settings)):
        return 1  # also offline, where the original's runs lack it
    return run_settings.members_of(path, run_files.REWARD)


def reward_model_of(save_dir: str, hparams: HParams) -> str:
    """The directory of the reward model that the run in `save_dir` learned from, or 'mock'.

    It is the policy's own directory, whose checkpoint has a copy of the weights, if that of the
    reward model is gone, or if the reward model was retrained while the policy learned.
    hparams: train_policy's.
    """
    policy = storage.join(save_dir, run_files.POLICY.network)
    if hparams.rewards.online is not None:
        return policy
    if hparams.rewards.train_new_model is not None:
        own = storage.join(save_dir, run_files.REWARD.network)
        if storage.exists(storage.join(own, 'hparams.json')):
            return own
        return policy
    name = hparams.rewards.trained_model
    assert name is not None
    if name == 'mock':
        return name
    if hparams.rewards.class_name is not None:
        return f'{name}#{hparams.rewards.class_name}'
    is_there = storage.is_remote(name) or os.path.exists(name)
    if name == 'test' or not is_there:
        return policy
    return name


def local_reward_model(hparams: HParams) -> str:
    """Where a training of a policy reads its reward model: a directory, or 'mock' or 'test'.

    One that the run trained itself may not be uploaded yet.
    """
    name = hparams.rewards.trained_model
    if hparams.rewards.train_new_model is not None:
        name = storage.staging_dir(name)
    assert name is not None
    if hparams.rewards.class_name is not None:
        return f'{name}#{hparams.rewards.class_name}'
    return name


def label_source(hparams: HParams) -> str | None:
    """--labels.source of the reward model, whose queries can stand in for the task's.

    None if the task has other queries, or if the reward model's directory has no record of it.
    hparams: train_policy's.
    """
    if not registry.info(hparams.task.query_dataset).labels_stand_in:
        return None
    if hparams.rewards.train_new_model is not None:
        return hparams.rewards.train_new_model.labels.source
    if hparams.rewards.trained_model is None:  # but a function, which has no labels
        return None
    run = hparams.rewards.trained_model.rstrip('/')
    for directory in (run, os.path.dirname(run)):
        try:
            record = storage.read_json(storage.join(directory, run_files.REWARD.settings))
            return str(record['labels']['source'])
        except (storage.StorageError, KeyError, TypeError):
            continue
    return None


def _reward_without_own_directory(run: str, policy: str) -> str:
    """What a run learned from that has no reward_model/, as commands take it.

    policy: its directory, whose checkpoint has a copy of a reward model.
    """
    with contextlib.suppress(UserError):
        hparams = run_settings.load_run_hparams(run)
        given = hparams.rewards
        if given.train_new_model is None and given.trained_model is not None:
            return reward_model_of(run, hparams)
    return policy


def reward_model_dir(path: str) -> str:
    """`path`, or its reward_model/ if `path` is a run directory; UserError if neither is one."""
    if storage.exists(storage.join(path, 'hparams.json')):
        return path
    network = storage.join(path, run_files.REWARD.network)
    if storage.exists(storage.join(network, 'hparams.json')):
        return network
    advice = f'train one with {shell.typed("./launch.py train_reward")}'
    policy = storage.join(path, run_files.POLICY.network)
    if storage.exists(storage.join(policy, 'hparams.json')):
        advice = f'the reward of that run is {_reward_without_own_directory(path, policy)}'
    raise OptionError(
        '--rewards.trained_model',
        f'{path}: neither it nor its reward_model/ has an hparams.json, nor is it a sequence'
        f' classifier of transformers; {advice}',
    )
