"""What the files of a run say, as values. None stands for what no file says."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.policy_options import HParams as PolicyHParams
from lm_human_preferences.hparams.reward_options import HParams as RewardHParams
from lm_human_preferences.hparams.task_options import TaskHParams
from lm_human_preferences.language.gpt2 import released
from lm_human_preferences.run_story import curves, label_facts
from lm_human_preferences.run_story.curves import Curve, Log
from lm_human_preferences.run_story.label_facts import LabelFacts
from lm_human_preferences.runs import run_files, run_settings

KNOWN = 'mock'  # of --rewards.trained_model
# What the tags of these curves begin with: of a reward model that was trained once, and of one that
# is trained again and again.
HELD_OUT = ('train_reward/held_out/', 'online/held_out_')


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """What is known about a run.

    directory: path or URL. settings: {command: its settings} of the trainings in the run, as far as
    they can be read. experiments: {command: what it was of}. ranks: it was begun with. labels: of
    its reward model; None if the run trained none, or that is not known. logs: {command: what its
    events say}. evaluation: what `evaluate` has found.
    """

    directory: str
    policy: PolicyHParams | None = None
    reward: RewardHParams | None = None
    experiments: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ranks: int | None = None
    labels: LabelFacts | None = None
    logs: Mapping[str, Log] = dataclasses.field(default_factory=dict)
    evaluation: dict[str, Any] | None = None
    reward_run: RunFacts | None = None

    @property
    def curves(self) -> dict[str, Curve]:
        """{tag: Curve} of all trainings."""
        return {tag: curve for log in self.logs.values() for tag, curve in log.curves.items()}

    @property
    def task(self) -> TaskHParams | None:
        """What queries and responses are."""
        hparams = self.policy or self.reward
        return None if hparams is None else hparams.task

    @property
    def initial_model(self) -> str | None:
        """The language model that the trainings began with, as the run was given it."""
        return None if self.task is None else self.task.policy.initial_model

    @property
    def base_model(self) -> str | None:
        """The same as the hub calls it; None where it is not of the hub."""
        return None if self.initial_model is None else hub_name(self.initial_model)

    @property
    def given_reward(self) -> str | None:
        """The reward model that the policy was given: a path or URL, or 'mock'.

        None where the run trained its own.
        """
        if self.policy is None or self.policy.rewards.train_new_model is not None:
            return None
        return self.policy.rewards.trained_model

    @property
    def reward_function(self) -> str | None:
        """The function of the user's that is the reward, FILE.py:FUNCTION; None for a model."""
        return None if self.policy is None else self.policy.rewards.function

    @property
    def learned_reward(self) -> bool:
        """Whether the reward of the policy is a model that has learned from labels."""
        return self.given_reward != KNOWN and self.reward_function is None

    @property
    def held_out(self) -> tuple[str, float] | None:
        """('accuracy' or 'agreement', how well the reward model predicted labels held out)."""
        for name in ('accuracy', 'agreement'):
            for prefix in HELD_OUT:
                if prefix + name in self.curves:
                    return name, self.curves[prefix + name].last
        return None

    @property
    def held_out_labels(self) -> float | None:
        """How many independent labels would tell as much as those held out do.

        None where the log does not say, as in runs of earlier versions.
        """
        for prefix in HELD_OUT:
            if f'{prefix}effective_labels' in self.curves:
                return self.curves[f'{prefix}effective_labels'].last
        return None

    @property
    def reward_trainer(self) -> RunFacts:
        """The run that trained the reward model, as far as that is known."""
        return self.reward_run or self


def of_run(model_dir: str) -> RunFacts | None:
    """The facts of the run that `model_dir` (path or URL) is, or whose policy/ or reward_model/.

    None where it belongs to no run.
    """
    found = _run_of(model_dir)
    if found is None or found.given_reward in (None, KNOWN):
        return found
    assert found.given_reward is not None
    return dataclasses.replace(found, reward_run=_run_of(found.given_reward))


def _run_of(model_dir: str) -> RunFacts | None:
    directories = [model_dir.rstrip('/')]
    parent, _, last = directories[0].rpartition('/')
    if run_files.is_network(last):
        directories.append(parent or '.')
    for directory in directories:
        names = [
            files.command
            for files in run_files.COMMANDS.values()
            if _is_there(storage.join(directory, files.settings))
        ]
        if names:
            return _read(directory, names)
    return None


def hub_name(model: str) -> str | None:
    """What the hub calls a model that a run names; None for one that is not of the hub."""
    name = released.released_name(model)
    if name is not None:
        return released.hub_name(name)
    try:
        path = storage.model_path(model)
    except storage.StorageError:
        return None
    return None if path is None else path.removeprefix(storage.HUB).partition('@')[0]


def _read(directory: str, commands: list[str]) -> RunFacts:
    policy = _settings(PolicyHParams(), directory, commands)
    reward = _settings(RewardHParams(), directory, commands)
    if reward is None and policy is not None:
        reward = policy.rewards.train_new_model
    experiments = {}
    ranks = None
    with contextlib.suppress(UserError, OSError):
        ranks = run_settings.ranks_of(directory)
        for command in commands:
            experiment = run_settings.experiment_of(directory, command)
            if experiment is not None:
                experiments[command] = experiment
    return RunFacts(
        directory=directory,
        policy=policy,
        reward=reward,
        experiments=experiments,
        ranks=ranks,
        labels=_labels(directory, policy, reward),
        logs={
            files.command: curves.read(directory, files.events)
            for files in run_files.COMMANDS.values()
        },
        evaluation=_evaluation(storage.join(directory, run_files.RESULTS)),
    )


def _labels(
    directory: str, policy: PolicyHParams | None, reward: RewardHParams | None
) -> LabelFacts | None:
    if policy is not None and policy.rewards.online is not None:
        return label_facts.of_online(directory, policy)
    return None if reward is None else label_facts.of_training(directory, reward)


def _settings(hparams: Any, directory: str, commands: list[str]) -> Any:
    """`hparams` as the run has recorded them; None where it has not, or they cannot be read."""
    if hparams.writes()[-1] not in commands:
        return None
    try:
        run_settings.read_settings(hparams, directory)
    except (UserError, OSError):
        return None
    return hparams


def _evaluation(path: str) -> dict[str, Any] | None:
    """The results of an evaluation; None where there are none that can be shown."""
    with contextlib.suppress(UserError, OSError):
        found = storage.read_json(path)
        return found if isinstance(found, dict) else None
    return None


def _is_there(path: str) -> bool:
    try:
        return storage.exists(path)
    except storage.StorageError:
        return False
