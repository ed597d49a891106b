"""A run as read from its files; a missing or damaged file leaves None or an empty value."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Callable
from typing import Any, TypeVar

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.policy_options import HParams as PolicyHParams
from lm_human_preferences.hparams.reward_options import COLLECTED, HParams
from lm_human_preferences.hparams.reward_options import CommandHParams as RewardHParams
from lm_human_preferences.hparams.task_options import TaskHParams
from lm_human_preferences.labels.folder import VALIDATION, LabelFolder, is_folder, parse_names
from lm_human_preferences.labels.report import label_report
from lm_human_preferences.runs import curves, run_files, run_lock, run_record
from lm_human_preferences.runs.curves import Log
from lm_human_preferences.runs.run_files import POLICY, REWARD
from lm_human_preferences.runs.run_settings import read_settings

Content = TypeVar('Content')
KNOWN = 'mock'  # value of --rewards.trained_model for the known reward of film reviews
DAMAGED = (UserError, OSError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@dataclasses.dataclass(frozen=True)
class Run:
    """A run: settings, records, logs, results and labels."""

    directory: str  # path or URL
    policy: PolicyHParams | None
    reward: HParams | None  # settings of its reward model's training
    experiment: str | None
    commands: list[dict[str, Any]]  # see runs.run_record, like the two below
    digests: dict[str, str]
    labels: dict[str, Any]  # entry `labels` of the reward model's training
    logs: list[Log]  # log of the policy, if any, then that of the reward model
    evaluation: dict[str, Any]
    samples: dict[str, list[dict[str, Any]]]  # {tracked query: answers, in the order of the steps}
    folder: LabelFolder | None  # folder of labels, with the answers that were used
    label_report: dict[str, Any]  # see labels.report.label_report
    comparisons: list[dict[str, Any]]  # of its policy by people, that with most answers first
    unreadable: list[str]  # names of damaged files

    @property
    def settings(self) -> PolicyHParams | RewardHParams | None:
        reward = self.reward if isinstance(self.reward, RewardHParams) else None
        return self.policy or reward

    @property
    def task(self) -> TaskHParams | None:
        return None if self.settings is None else self.settings.task

    @property
    def given(self) -> str | None:
        """Given reward: a model, 'mock' or FILE.py:FUNCTION; None if the run trained its own."""
        if self.policy is None or self.policy.new_reward_model is not None:
            return None
        return self.policy.rewards.function or self.policy.rewards.trained_model

    @functools.cached_property
    def is_at_work(self) -> bool:
        return run_lock.is_held(self.directory)

    @functools.cached_property
    def trainer(self) -> Run:
        """Run that trained the reward model: another run, if it can be read, or this one."""
        rewards = None if self.policy is None else self.policy.rewards
        if self.given in (None, KNOWN) or rewards is None or rewards.trained_model is None:
            return self
        try:
            return read_run(rewards.trained_model) or self
        except DAMAGED:
            return self

    @property
    def rewards(self) -> dict[str, dict[str, Any]]:
        """Results of the evaluation, {reward: {point: numbers}}; the training's reward is first."""
        return self.evaluation.get('rewards', {})

    def logged(self, tag: str) -> list[float]:
        """Return the values of a statistic, step by step; [] if no log has it."""
        return next((log.curves[tag] for log in self.logs if tag in log.curves), [])

    def last(self, tag: str) -> float | None:
        """Return the last value of a statistic."""
        return next(reversed(self.logged(tag)), None)


def read_run(path: str) -> Run | None:
    """Return the run at `path` (path or URL), or that of the model there; None for no run."""
    directories = [path.rstrip('/')]
    parent, _, last = directories[0].rpartition('/')
    if run_files.is_network(last):
        directories.append(parent or '.')
    for directory in directories:
        for files in (POLICY, REWARD):
            if storage.exists(storage.join(directory, files.settings)):
                return _read(directory, files)
    return None


def _read(directory: str, files: run_files.CommandFiles) -> Run:
    unreadable: dict[str, None] = {}

    def tried(name: str, otherwise: Content, read: Callable[..., Content], *args: Any) -> Content:
        """Return what `read` returns, or `otherwise`; note a file that is damaged."""
        try:
            return read(*args)
        except storage.NotFound:
            pass
        except DAMAGED:
            unreadable[name] = None
        return otherwise

    policy, events = None, [REWARD.events]
    if files is POLICY:
        policy = tried(POLICY.settings, None, read_settings, PolicyHParams(), directory)
        events = [POLICY.events, REWARD.events]
    reward: HParams | None = tried(REWARD.settings, None, read_settings, RewardHParams(), directory)
    if policy is not None and reward is None:
        reward = policy.new_reward_model
    record = tried(run_files.RECORD, {}, run_record.read, directory)
    training, labels = record.get(files.command, {}), run_record.labels(record)
    folder = tried(run_files.LABELS, None, _label_folder, directory, labels)
    logs = [curves.read(directory, each) for each in events]
    if not logs[0].curves:
        unreadable[events[0]] = None
    return Run(
        directory=directory,
        policy=policy,
        reward=reward,
        experiment=training.get('experiment'),
        commands=run_record.commands(record),
        digests=training.get('digests', {}),
        labels=labels,
        logs=logs,
        evaluation=tried(run_files.RESULTS, {}, _evaluation, directory),
        samples=tried(run_files.SAMPLES, {}, _samples, directory),
        folder=folder,
        label_report=tried(run_files.LABELS, {}, _label_report, folder, reward),
        comparisons=tried(run_files.LABELS, [], _comparisons, folder, directory),
        unreadable=list(unreadable),
    )


def _label_folder(directory: str, labels: dict[str, Any]) -> LabelFolder | None:
    path = labels.get('source')
    if path == COLLECTED:
        path = storage.join(directory, run_files.LABELS)
    return LabelFolder(path, labels.get('answers')) if path and is_folder(path) else None


def _label_report(folder: LabelFolder | None, reward: RewardHParams | None) -> dict[str, Any]:
    if folder is None:
        return {}
    without = parse_names(reward.labels.without) if reward is not None else ()
    return label_report.report(folder, [name for name in without if name in folder.logs])


def _comparisons(folder: LabelFolder | None, directory: str) -> list[dict[str, Any]]:
    """Return comparisons of a run's policy with others, also by answers after the training."""
    if folder is None:
        return []
    whole, found = LabelFolder(folder.path), []
    answers = [answer for answer in whole.counted(VALIDATION) if not answer.is_simulated]
    for each in label_report.comparisons(whole, answers):
        n, won, low, high = each['n'], each['wins_of_against'], each['low'], each['high']
        for own, other, wins, interval in (
            ('against', 'policy', won, (low, high)),
            ('policy', 'against', n - won, (1 - high, 1 - low)),
        ):
            path = each[own].partition(' (weights ')[0].removesuffix('/policy')
            if n and os.path.abspath(path) == os.path.abspath(directory):
                found.append({'n': n, 'wins': wins, 'interval': interval, 'other': each[other]})
    return sorted(found, key=lambda each: -each['n'])


def _evaluation(directory: str) -> dict[str, Any]:
    """Return the most informative results of `evaluate`, see _information."""
    is_remote = storage.is_remote(directory)
    found = []
    for name in sorted(storage.listing(directory) if is_remote else os.listdir(directory)):
        if name.endswith('.json') and re.fullmatch(run_files.EVALUATION, name):
            found.append(storage.read_json(storage.join(directory, name)))
            _check(found[-1])
    return max(found, key=_information, default={})


def _check(results: dict[str, Any]) -> None:
    """Raise an error for results that are damaged."""
    for points in results['rewards'].values():
        for point in (points['base'], points['policy']):
            optional = point.get('frontier'), point.get('share')
            for number in (point['kl'], point['reward'], *optional):
                if type(number) not in (int, float, type(None)):
                    raise ValueError(f'{number!r} is no number')


def _information(results: dict[str, Any]) -> tuple[int, ...]:
    """Return the sort key by which the most informative results come last."""
    sizes = results['queries'], results['responses']
    return results.get('step') or -1, 'judge' in results, results['exact'], *sizes


def _samples(directory: str) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for line in storage.readable_json_lines(storage.join(directory, run_files.SAMPLES)):
        is_sample = isinstance(line, dict) and isinstance(line.get('response'), str)
        if is_sample and isinstance(line.get('query'), str):
            found.setdefault(line['query'], []).append(line)
    return found
