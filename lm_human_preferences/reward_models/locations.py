"""Directories of a run's reward models, and their scopes in checkpoints."""

from __future__ import annotations

import os
from typing import NamedTuple

from lm_human_preferences import shell, storage
from lm_human_preferences.errors import OptionError
from lm_human_preferences.language.adapters import peft_files
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.runs import run_files, run_settings
from lm_human_preferences.training.model_sizes import is_model

SCOPE = 'reward_model'  # prefix of a reward model's parameter names in a checkpoint


class Location(NamedTuple):
    """Directory of a reward model, and prefix of its parameter names in the checkpoint."""

    directory: str
    scope: str = SCOPE


def scopes_of(members: int) -> tuple[str, ...]:
    """Return the scopes that an ensemble's models have in checkpoints, one per member."""
    return tuple(run_files.member_name(SCOPE, number) for number in range(members))


def locations_of(path: str, members: int | None = None) -> list[Location]:
    """Return locations of `members` reward models (None: all) at `path`; else UserError."""
    first = reward_model_dir(path).rstrip('/')
    if members is None:
        members = recorded_members(path)
    if members == 1:
        return [Location(first)]
    directories = [run_files.member_name(first, number) for number in range(members)]
    missing = [each for each in directories if not is_model(each)]
    if not missing:
        return [Location(directory) for directory in directories]
    scopes = scopes_of(members)
    if os.path.basename(first) == run_files.POLICY.network:
        there = TrainedModel(first).open_weights().scopes()
        missing = [f'{scope} in {first}' for scope in scopes if scope not in there]
    if missing:
        raise OptionError('--rewards.ensemble', f'{members}: {missing[0]} is missing')
    return [Location(first, scope) for scope in scopes]


def recorded_members(path: str) -> int:
    """Return the number of reward models at `path`, a run or a model's directory; 1 if none yet."""
    run, name = os.path.split(path.rstrip('/'))
    if name == run_files.POLICY.network and is_model(path):
        return run_settings.members_of(run or '.', run_files.POLICY)
    return run_settings.members_of(path, run_files.REWARD)


def reward_model_dir(path: str) -> str:
    """Return the directory of a reward model: `path`, or its reward_model/; else UserError."""
    if is_model(path) or storage.exists(storage.join(path, run_files.FROZEN_HEAD)):
        return path
    network = storage.join(path, run_files.REWARD.network)
    if is_model(network):
        return network
    if peft_files.is_peft(storage.model_path(path) or path):
        raise OptionError(
            '--rewards.trained_model',
            f'{path} is an adapter, which no reward is read from: merge it into its classifier'
            " (PEFT's merge_and_unload; `export` without --form adapter) and give that",
        )
    train = shell.typed('./launch.py train_reward')
    raise OptionError(
        '--rewards.trained_model',
        f'{path}: neither it nor its reward_model/ has an {run_files.SIZES}, nor is it a sequence'
        f' classifier of transformers; train one with {train}, or give the policy/ of a run of'
        ' train_policy, or what its settings name',
    )
