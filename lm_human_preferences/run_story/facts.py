"""Facts about a run from its files. None stands for an unknown one."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.evaluation.report import CLASSIFIER, FUNCTION, REWARD_MODEL, named
from lm_human_preferences.hparams.policy_options import HParams as PolicyHParams
from lm_human_preferences.hparams.reward_options import HParams as RewardHParams
from lm_human_preferences.hparams.task_options import TaskHParams
from lm_human_preferences.labels.folder import (
    LabelFolder,
    are_line_counts,
    is_folder,
    parse_names,
)
from lm_human_preferences.labels.report import label_report
from lm_human_preferences.language.gpt2 import released
from lm_human_preferences.runs import curves, run_files, run_settings
from lm_human_preferences.runs.curves import Curve, Log

PEOPLE, KNOWN_REWARD, MADE_UP, FILE, FOLDER = 'people', 'known reward', 'made up', 'file', 'folder'
KNOWN = 'mock'  # of --rewards.trained_model
# Prefixes of the tags of these measurements: of the mean of an ensemble, of a single reward model
# (of an ensemble, the first), and of one that is retrained while the policy trains.
OF_MEAN = 'train_reward/held_out_of_mean/'
HELD_OUT = (OF_MEAN, 'train_reward/held_out_of_kept/', 'train_reward/held_out/', 'online/held_out_')
_MADE_HERE = {'mock': KNOWN_REWARD, 'test': MADE_UP}


@dataclasses.dataclass(frozen=True)
class Source:
    """Source of labels."""

    kind: str  # PEOPLE (while the policy trained), KNOWN_REWARD, MADE_UP, FILE or FOLDER
    path: str  # or URL, as the run was given it
    agreement: Mapping[str, Any] | None = None  # see labels.report

    @property
    def has_labellers(self) -> bool:
        """True if answers name their labellers."""
        return self.kind in (PEOPLE, FOLDER)


@dataclasses.dataclass(frozen=True)
class LabelFacts:
    """Labels of a reward model. None stands for an unknown fact."""

    sources: tuple[Source, ...]
    label_type: str  # of label_types
    count: int | None = None  # those held out included
    labellers: int | None = None  # people or programs that answered
    left_out: int = 0  # labellers whose answers do not count
    held_out: float = 0.0  # share
    errors: float = 0.0  # share of simulated answers that are random
    reward_models: int = 0  # trained one after another while the policy trained


def labels_of_training(run: str, hparams: RewardHParams) -> LabelFacts:
    """Return the labels of a reward model that a run trained first. hparams: train_reward's."""
    labels = hparams.labels
    record = json_object(storage.join(run, run_files.LEARNED))
    count = record.get('labels')
    names = parse_names(labels.without)
    return LabelFacts(
        sources=tuple(_source(path, record, names) for path in labels.sources().values()),
        label_type=labels.type,
        count=count if isinstance(count, int) else None,
        labellers=_labellers(record),
        left_out=len(names),
        held_out=labels.held_out,
        errors=labels.error,
    )


def _source(path: str, record: Mapping[str, Any], without: tuple[str, ...]) -> Source:
    """Return the source that `path` names. record: of what was learned."""
    lines = record.get('answers') if record.get('source') == path else None
    counts = lines if are_line_counts(lines) else None
    is_here = is_folder(path)
    return Source(
        kind=_MADE_HERE.get(path, FOLDER if is_here or lines is not None else FILE),
        path=path,
        agreement=_agreement(path, counts, without) if is_here else None,
    )


def labels_of_online(run: str, hparams: PolicyHParams) -> LabelFacts:
    """Return the labels of reward models that were retrained while the policy trained."""
    online, new_model = hparams.rewards.online, hparams.new_reward_model
    assert online is not None
    folder = storage.join(run, run_files.LABELS)
    batches = _batches(storage.join(folder, run_files.USED))
    last = batches[-1] if batches else {}
    count, lines = last.get('labels'), last.get('answers')
    counts = lines if are_line_counts(lines) else None
    source = Source(
        kind=_MADE_HERE.get(online.source, PEOPLE),
        path=folder,
        agreement=_agreement(folder, counts, ()) if is_folder(folder) else None,
    )
    return LabelFacts(
        sources=(source,),
        label_type='' if new_model is None else new_model.labels.type,
        count=count if isinstance(count, int) else None,
        labellers=sum(map(bool, counts.values())) if counts is not None else None,
        held_out=0.0 if new_model is None else new_model.labels.held_out,
        errors=online.error,
        reward_models=len(batches),
    )


def _labellers(record: Mapping[str, Any]) -> int | None:
    ids = record.get('ids')
    if not isinstance(ids, list):
        return None
    return len({each[1] for each in ids if isinstance(each, list) and len(each) == 3})


def _agreement(
    folder: str, lines: Mapping[str, int] | None, without: tuple[str, ...]
) -> dict[str, Any] | None:
    """Measure the agreement in a local folder; None if that fails. lines: that count."""
    try:
        opened = LabelFolder(folder, dict(lines) if lines is not None else None)
        return label_report.report(opened, without)['agreement']
    except (UserError, OSError, ValueError, KeyError, TypeError):
        return None


def _batches(path: str) -> list[dict[str, Any]]:
    """Read the labels of each reward model of an online run, see online/decisions.py."""
    with contextlib.suppress(UserError, OSError):
        lines = storage.parse_json_lines(storage.read_whole_lines(path), path)
        return [value for _, value in lines if isinstance(value, dict) and 'model' in value]
    return []


def json_object(path: str) -> dict[str, Any]:
    """Read the JSON object at `path`, local or remote; an empty one where there is none."""
    with contextlib.suppress(UserError, OSError, ValueError):
        value = storage.read_json(path)
        if isinstance(value, dict):
            return value
    return {}


class HeldOut(NamedTuple):
    """Measurement of a reward model by held-out labels, from one log."""

    prefix: str  # of its tags, one of HELD_OUT
    name: str  # 'accuracy' or 'agreement'
    value: float
    effective_labels: float | None  # independent ones; None in logs of earlier versions


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """Facts about a run."""

    directory: str  # path or URL
    policy: PolicyHParams | None = None  # settings of its trainings
    reward: RewardHParams | None = None
    experiments: Mapping[str, str] = dataclasses.field(default_factory=dict)  # {command: name}
    ranks: int | None = None  # at its start
    # [setting, value before, value] of what it was resumed with
    changed: tuple[list[Any], ...] = ()
    labels: LabelFacts | None = None  # of the reward model that it trained
    logs: Mapping[str, Log] = dataclasses.field(default_factory=dict)  # {command: events}
    evaluation: dict[str, Any] | None = None  # results of `evaluate`, of several the best
    evaluation_file: str = run_files.RESULTS
    reward_run: RunFacts | None = None  # that trained a given reward model

    @property
    def curves(self) -> dict[str, Curve]:
        """{tag: Curve} of all trainings."""
        return {tag: curve for log in self.logs.values() for tag, curve in log.curves.items()}

    def last(self, tag: str) -> float | None:
        """Return the last value of a curve; None where there is none."""
        return self.curves[tag].last if tag in self.curves else None

    @property
    def hparams(self) -> PolicyHParams | RewardHParams | None:
        return self.policy or self.reward

    @property
    def task(self) -> TaskHParams | None:
        return None if self.hparams is None else self.hparams.task

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
        if judge in (self.given_reward, self.reward_function):
            return True
        places = {os.path.abspath(each.directory) for each in (self, self.reward_trainer)}
        path, network = os.path.split(os.path.abspath(judge))
        is_of_run = path in places and network.startswith(run_files.REWARD.network)
        return is_of_run or os.path.abspath(judge) in places

    @property
    def reward_kind(self) -> str:
        """Word for the reward of the policy, as far as the files show it."""
        if self.reward_function is not None:
            return FUNCTION
        if self.given_reward == KNOWN:
            return KNOWN_REWARD
        if self.given_reward is not None and _is_classifier(self.given_reward):
            return CLASSIFIER
        return REWARD_MODEL

    @property
    def held_out(self) -> HeldOut | None:
        """Last measurement of the reward model by held-out labels; None without one."""
        for prefix, name in itertools.product(HELD_OUT, ('accuracy', 'agreement')):
            value = self.last(prefix + name)
            if value is not None:
                return HeldOut(prefix, name, value, self.last(f'{prefix}effective_labels'))
        return None

    @property
    def reward_trainer(self) -> RunFacts:
        """Run that trained the reward model, as far as that is known."""
        return self.reward_run or self


def of_run(model_dir: str) -> RunFacts | None:
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
    changed: list[list[Any]] = []
    with contextlib.suppress(UserError, OSError):
        ranks = run_settings.ranks_of(directory)
        changed = run_settings.changed(directory, commands[-1])
        for command in commands:
            experiment = run_settings.experiment_of(directory, command)
            if experiment is not None:
                experiments[command] = experiment
    evaluation_file, evaluation = _best_evaluation(directory)
    labels = None
    if policy is not None and policy.rewards.online is not None:
        labels = labels_of_online(directory, policy)
    elif reward is not None:
        labels = labels_of_training(directory, reward)
    logs = {
        files.command: curves.read(directory, files.events) for files in run_files.COMMANDS.values()
    }
    found = RunFacts(directory, policy, reward, experiments, ranks, tuple(changed), labels, logs)
    if not evaluation:
        return found
    kind = evaluation.get('reward_kind')
    shown = named(evaluation, kind if isinstance(kind, str) else found.reward_kind)
    return dataclasses.replace(found, evaluation=shown, evaluation_file=evaluation_file)


def _settings(hparams: Any, directory: str, commands: list[str]) -> Any:
    if hparams.command not in commands:
        return None
    try:
        run_settings.read_settings(hparams, directory)
    except (UserError, OSError):
        return None
    return hparams


def _best_evaluation(directory: str) -> tuple[str, dict[str, Any]]:
    """Return name and results of the evaluation that tells most of the policy as it is now.

    An exact one comes first, then the one with most queries and most responses to each; of those
    that are alike, the newest. Times of a remote run are not known.
    """
    pattern = re.compile(run_files.EVALUATION)
    names = [run_files.RESULTS]
    with contextlib.suppress(storage.StorageError, OSError):
        is_remote = storage.is_remote(directory)
        names += sorted(storage.listing(directory) if is_remote else os.listdir(directory))
    trained = _time_of(directory, run_files.POLICY.finished)

    def how_good(candidate: tuple[str, dict[str, Any]]) -> tuple[Any, ...]:
        """Return a key that is greatest for the best."""
        name, results = candidate
        sizes = (results.get(size) for size in ('queries', 'responses'))
        counts = [size if isinstance(size, int) else 0 for size in sizes]
        time = _time_of(directory, name)
        return bool(results), time >= trained, results.get('exact') is True, *counts, time

    candidates = [
        (name, json_object(storage.join(directory, name)))
        for name in names
        if name.endswith('.json') and pattern.fullmatch(name)
    ]
    return max(candidates, key=how_good)


def _time_of(directory: str, name: str) -> float:
    """Return when a file of a local run was written; 0 where that is not known."""
    with contextlib.suppress(OSError):
        if not storage.is_remote(directory):
            return os.path.getmtime(os.path.join(directory, name))
    return 0.0


def _is_classifier(model: str) -> bool:
    """Return whether a given reward is a classifier, as all on the hub, without asking a server."""
    with contextlib.suppress(UserError, OSError):
        if storage.is_hub(model):
            return True
        if not os.path.exists(os.path.join(model, 'hparams.json')):
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
