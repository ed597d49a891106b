"""Directories and checkpoints of the reward models of a run."""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

from lm_human_preferences import shell, storage
from lm_human_preferences.datasets import registry
from lm_human_preferences.errors import OptionError, UserError
from lm_human_preferences.hparams.policy_options import HParams
from lm_human_preferences.language.adapters import peft_files
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.runs import run_files, run_settings

SCOPE = 'reward_model'  # of its names in checkpoints


class Location(NamedTuple):
    """Directory of a reward model, and scope of its names in the checkpoint."""

    directory: str
    scope: str = SCOPE


def locations_of(path: str, members: int | None = None) -> list[Location]:
    """Return locations of `members` reward models (None: all) at `path`; UserError for fewer."""
    first = reward_model_dir(path).rstrip('/')
    if members is None:
        members = recorded_members(path)
    if members == 1:
        return [Location(first)]
    directories = [run_files.member_name(first, number) for number in range(members)]
    missing = [each for each in directories if not storage.exists(f'{each}/hparams.json')]
    if not missing:
        return [Location(directory) for directory in directories]
    scopes = [run_files.member_name(SCOPE, number) for number in range(members)]
    if os.path.basename(first) == run_files.POLICY.network:
        there = TrainedModel(first).open_weights().scopes()
        missing = [f'{scope} in {first}' for scope in scopes if scope not in there]
    if missing:
        raise OptionError('--rewards.ensemble', f'{members}: there is no {missing[0]}')
    return [Location(first, scope) for scope in scopes]


def recorded_members(path: str) -> int:
    """Return the number of reward models at `path`, a run or a model's directory; 1 if none yet."""
    run, name = os.path.split(path.rstrip('/'))
    if name == run_files.POLICY.network and storage.exists(storage.join(path, 'hparams.json')):
        return run_settings.members_of(run or '.', run_files.POLICY)
    if not storage.exists(storage.join(path, run_files.REWARD.more_settings)):
        return 1  # also offline, where the original's runs lack it
    return run_settings.members_of(path, run_files.REWARD)


def reward_model_of(save_dir: str, hparams: HParams) -> str:
    """Return the directory of a run's reward model, else of the policy with a copy, or 'mock'."""
    policy = storage.join(save_dir, run_files.POLICY.network)
    if hparams.rewards.online is not None:
        return policy
    if hparams.new_reward_model is not None:
        own = storage.join(save_dir, run_files.REWARD.network)
        return own if storage.exists(storage.join(own, 'hparams.json')) else policy
    name = hparams.rewards.trained_model
    assert name is not None
    if name == 'mock':
        return name
    if hparams.rewards.class_name is not None:
        return f'{name}#{hparams.rewards.class_name}'
    is_there = storage.is_remote(name) or os.path.exists(name)
    return name if is_there and name != 'test' else policy


def local_reward_model(hparams: HParams) -> str:
    """Return the reward model of a training: a local directory of its own, or a name."""
    name = hparams.rewards.trained_model
    assert name is not None
    if hparams.new_reward_model is not None:
        name = storage.staging_dir(name)
    if hparams.rewards.class_name is not None:
        return f'{name}#{hparams.rewards.class_name}'
    return name


def label_source(hparams: HParams) -> str | None:
    """Return --labels.source of a policy's reward if it may stand in for queries, and is known."""
    if not registry.info(hparams.task.query_dataset).labels_stand_in:
        return None
    if hparams.new_reward_model is not None:
        return hparams.new_reward_model.labels.source
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


def reward_model_dir(path: str) -> str:
    """Return the directory of a reward model: `path`, or its reward_model/; else UserError."""
    if storage.exists(storage.join(path, 'hparams.json')):
        return path
    network = storage.join(path, run_files.REWARD.network)
    if storage.exists(storage.join(network, 'hparams.json')):
        return network
    if peft_files.is_peft(storage.model_path(path) or path):
        raise OptionError(
            '--rewards.trained_model',
            f'{path} is an adapter, which no reward is read from: merge it into its classifier'
            " (PEFT's merge_and_unload; `export` without --as adapter) and give that",
        )
    advice = f'train one with {shell.typed("./launch.py train_reward")}'
    policy = storage.join(path, run_files.POLICY.network)
    if storage.exists(storage.join(policy, 'hparams.json')):
        reward = policy
        with contextlib.suppress(UserError):
            hparams = run_settings.load_run_hparams(path)
            if hparams.new_reward_model is None and hparams.rewards.trained_model:
                reward = reward_model_of(path, hparams)
        advice = f'the reward of that run is {reward}'
    raise OptionError(
        '--rewards.trained_model',
        f'{path}: neither it nor its reward_model/ has an hparams.json, nor is it a sequence'
        f' classifier of transformers; {advice}',
    )
