"""Facts about a run from its files. None stands for an unknown one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.evaluation.report import CLASSIFIER, FUNCTION, REWARD_MODEL
from lm_human_preferences.hparams.policy_options import HParams as PolicyHParams
from lm_human_preferences.hparams.reward_options import HParams as RewardHParams
from lm_human_preferences.hparams.task_options import TaskHParams
from lm_human_preferences.labels.report.agreement import wilson_interval
from lm_human_preferences.language.gpt2 import released
from lm_human_preferences.run_story import label_facts, outcome
from lm_human_preferences.runs import curves, run_files, run_record, run_settings
from lm_human_preferences.runs.curves import Log, LoggedCurve, Mark
from lm_human_preferences.training.model_sizes import is_model

KNOWN = 'mock'  # of --rewards.trained_model
# Prefixes of the tags of these measurements: of the mean of an ensemble, of a single reward model
# (of an ensemble, the first), and of one that is retrained while the policy trains.
OF_MEAN = 'train_reward/held_out_of_mean/'
HELD_OUT = (
    OF_MEAN,
    'train_reward/held_out/',
    'online/held_out_',
)
# Of a head that is fitted without each tenth of the labels in turn
CROSS_VALIDATED = ('train_reward/cross_validated/', 'online/cross_validated_')


class HeldOut(NamedTuple):
    """Measurement of a reward model by held-out labels, from one log."""

    name: str  # 'accuracy' or 'agreement'
    value: float
    interval: tuple[float, float] | None  # of 95 %, of an accuracy
    share: float  # of the labels that were held out; 0 where it is not known
    members: int  # of its ensemble; 1 for a single reward model
    is_of_mean: bool  # False: of the first member, as in logs of earlier versions
    is_cross_validated: bool  # each by a head that had not learned from its query
    gain: float | None  # of a head, in nats for each label over guessing
    may_be_chance: bool  # whether so much is gained by guessing, too


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """Facts about a run."""

    directory: str  # path or URL
    policy: PolicyHParams | None = None  # settings of its trainings
    reward: RewardHParams | None = None
    experiments: Mapping[str, str] = dataclasses.field(default_factory=dict)  # {command: name}
    ranks: int | None = None  # at its start
    labels: label_facts.LabelFacts | None = None  # of the reward model that it trained
    logs: Mapping[str, Log] = dataclasses.field(default_factory=dict)  # {command: events}
    evaluation: dict[str, Any] | None = None  # results of `evaluate`, of several the best
    evaluation_settings: str = ''  # that are not the defaults
    reward_run: RunFacts | None = None  # that trained a given reward model

    @functools.cached_property
    def curves(self) -> dict[str, LoggedCurve]:
        """{tag: LoggedCurve} of all trainings."""
        return {tag: curve for log in self.logs.values() for tag, curve in log.curves.items()}

    @functools.cached_property
    def recorded(self) -> list[dict[str, Any]]:
        """Commands that worked on it, see runs.run_record."""
        with contextlib.suppress(UserError, OSError):
            return run_record.commands(self.directory)
        return []

    @property
    def marks(self) -> dict[str, dict[str, list[Mark]]]:
        """{'reward model' or 'policy': {kind: events of its training}}, see runs.curves."""
        found = {}
        for command, log in self.logs.items():
            kinds = {kind: [] for kind in (curves.ALARM, curves.RESUMED, curves.RETRAINED)}
            for mark in curves.marks(log):
                kinds[mark.kind].append(mark)
            found[run_files.COMMANDS[command].network.replace('_', ' ')] = kinds
        return found

    @property
    def failed_commands(self) -> int:
        """Number of recorded commands that ended in an error."""
        return sum(str(each.get('how')).startswith('failed') for each in self.recorded)

    def last(self, tag: str) -> float | None:
        """Return the last value of a curve; None where there is none."""
        return self.curves[tag].last if tag in self.curves else None

    @property
    def settings(self) -> PolicyHParams | RewardHParams | None:
        return self.policy or self.reward

    @property
    def task(self) -> TaskHParams | None:
        return None if self.settings is None else self.settings.task

    @property
    def has_policy(self) -> bool:
        """True if a policy was trained, or its log is there."""
        log = self.logs.get(run_files.POLICY.command)
        return self.policy is not None or (log is not None and bool(log.curves))

    @property
    def total_episodes(self) -> int:
        """Episodes that the policy's training is to take, in whole batches."""
        assert self.policy is not None
        return self.policy.ppo.nupdates * self.policy.ppo.batch_size

    @property
    def kl_target(self) -> float | None:
        """Target of the KL, where the KL coefficient adapts."""
        adaptive = None if self.policy is None else self.policy.rewards.adaptive_kl
        return None if adaptive is None else adaptive.target

    @property
    def initial_model(self) -> str | None:
        """Initial language model, as it was given."""
        return None if self.task is None else self.task.policy.initial_model

    @property
    def base_model(self) -> str | None:
        """Name of the initial model on the hub; None where it is not of the hub."""
        return None if self.initial_model is None else hub_name(self.initial_model)

    @property
    def given_reward(self) -> str | None:
        """Given reward model: path, URL or 'mock'; None where the run trained its own."""
        if self.policy is None or self.policy.new_reward_model is not None:
            return None
        return self.policy.rewards.trained_model

    @property
    def reward_function(self) -> str | None:
        """Reward function of the user, FILE.py:FUNCTION; None for a reward model."""
        return None if self.policy is None else self.policy.rewards.function

    @property
    def learned_reward(self) -> bool:
        """True if the reward is a model that has learned from labels."""
        return self.given_reward != KNOWN and self.reward_function is None

    def has_learned_from(self, judge: str) -> bool:
        """Return whether a reward (path, URL or 'mock') is the policy's, or one of its ensemble."""
        if judge == self.given_reward or self._is_its_function(judge):
            return True
        places = {os.path.abspath(each.directory) for each in (self, self.reward_trainer)}
        path, network = os.path.split(os.path.abspath(judge))
        is_of_run = path in places and network.startswith(run_files.REWARD.network)
        return is_of_run or os.path.abspath(judge) in places

    def _is_its_function(self, judge: str) -> bool:
        """Return whether FILE:FUNCTION is the reward of the policy, or the run's copy of it."""
        if self.reward_function is None:
            return False
        file, _, name = self.reward_function.rpartition(':')
        judged, _, other = judge.rpartition(':')
        copies = file, os.path.join(self.directory, run_files.FUNCTION)
        return name == other and os.path.realpath(judged) in map(os.path.realpath, copies)

    @property
    def reward_kind(self) -> str:
        """Word for the reward of the policy, as far as the files show it."""
        if self.reward_function is not None:
            return FUNCTION
        if self.given_reward == KNOWN:
            return label_facts.KNOWN_REWARD
        if self.given_reward is not None and _is_classifier(self.given_reward):
            return CLASSIFIER
        return REWARD_MODEL

    @property
    def held_out(self) -> HeldOut | None:
        """Last measurement of the reward model by held-out labels; None without one."""
        return self._last_of(HELD_OUT)

    @property
    def cross_validated(self) -> HeldOut | None:
        """Last measurement of a head by labels that it learns from; None without one."""
        return self._last_of(CROSS_VALIDATED)

    def _last_of(self, prefixes: tuple[str, ...]) -> HeldOut | None:
        for prefix, name in itertools.product(prefixes, ('accuracy', 'agreement')):
            value = self.last(prefix + name)
            if value is not None:
                return self._held_out(prefix, name, value)
        return None

    def _held_out(self, prefix: str, name: str, value: float) -> HeldOut:
        # A correlation has none: the log does not say how much queries differ.
        effective = self.last(f'{prefix}effective_labels') if name == 'accuracy' else None
        settings = self.policy or self.reward
        gain, least_gain = (self.last(f'{prefix}{each}') for each in ('gain', 'least_gain'))
        is_online = self.labels is not None and self.labels.reward_models > 0
        return HeldOut(
            name,
            value,
            interval=wilson_interval(value * effective, effective) if effective else None,
            share=0 if self.labels is None else self.labels.held_out,
            members=1 if settings is None or is_online else settings.members,
            is_of_mean=prefix == OF_MEAN,
            is_cross_validated=prefix in CROSS_VALIDATED,
            gain=gain,
            may_be_chance=gain is not None and (least_gain is None or gain <= least_gain),
        )

    @property
    def measured(self) -> list[outcome.Measured]:
        """Policy by each reward of its evaluation, its own first; [] without a whole one."""
        return outcome.measured(self.evaluation or {}, self.has_learned_from)

    @property
    def share_of_gain(self) -> str | None:
        """Share of the possible gain in the policy's own reward; None if not known."""
        return next((each.share for each in self.measured), None)

    @property
    def older_step(self) -> str:
        """Step of the evaluation and the last one, where they differ; else ''."""
        step, last = (self.evaluation or {}).get('step'), self.last('elapsed/updates')
        is_older = isinstance(step, int) and last is not None and step < last
        return f'step {step} of {last:.0f}' if is_older else ''

    @property
    def reward_trainer(self) -> RunFacts:
        """Run that trained the reward model, as far as that is known."""
        return self.reward_run or self


def read_run(model_dir: str) -> RunFacts | None:
    """Return the facts of the run that has `model_dir` (path or URL), or is it; None for no run."""
    found = _run_of(model_dir)
    given = None if found is None else found.given_reward
    if found is None or given is None or given == KNOWN:
        return found
    return dataclasses.replace(found, reward_run=_run_of(given))


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
    """Return the name of a model on the hub; None for one that is not of the hub."""
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
        reward = policy.new_reward_model
    experiments = {}
    ranks = None
    with contextlib.suppress(UserError, OSError):
        ranks = run_record.training(directory, commands[-1]).get('ranks')
        for command in commands:
            experiment = run_record.training(directory, command)['experiment']
            if experiment is not None:
                experiments[command] = experiment
    evaluation_file, evaluation = outcome.best_evaluation(directory)
    labels = None
    if policy is not None and policy.rewards.online is not None:
        labels = label_facts.labels_of_online(directory, policy)
    elif reward is not None:
        labels = label_facts.labels_of_training(directory, reward)
    logs = {
        files.command: curves.read(directory, files.events) for files in run_files.COMMANDS.values()
    }
    found = RunFacts(directory, policy, reward, experiments, ranks, labels, logs)
    if not evaluation:
        return found
    kind = evaluation.get('reward_kind')
    return dataclasses.replace(
        found,
        evaluation=_named(evaluation, kind if isinstance(kind, str) else found.reward_kind),
        evaluation_settings=outcome.settings_of(evaluation_file),
    )


def _named(results: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return results of `evaluate` in which the reward of the run is called `kind`."""
    rewards = results.get('rewards')
    if not isinstance(rewards, dict) or REWARD_MODEL not in rewards or kind in rewards:
        return results
    renamed = {kind if name == REWARD_MODEL else name: of for name, of in rewards.items()}
    return {**results, 'rewards': renamed}


def _settings(settings: Any, directory: str, commands: list[str]) -> Any:
    if settings.command not in commands:
        return None
    try:
        run_settings.read_settings(settings, directory)
    except (UserError, OSError):
        return None
    return settings


def _is_classifier(model: str) -> bool:
    """Return whether a given reward is a classifier, as all on the hub, without asking a server."""
    with contextlib.suppress(UserError, OSError):
        if storage.is_hub(model):
            return True
        if not is_model(model):
            config = storage.read_json(os.path.join(model, 'config.json'))
            return isinstance(config, dict) and 'SequenceClassification' in str(
                config.get('architectures')
            )
    return False


def _is_there(path: str) -> bool:
    try:
        return storage.exists(path)
    except storage.StorageError:
        return False
