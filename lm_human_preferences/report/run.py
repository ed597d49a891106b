"""A run as read from its files; a missing or damaged file leaves None or an empty value."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
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
from lm_human_preferences.runs.run_files import POLICY, REWARD
from lm_human_preferences.runs.run_settings import read_settings
from lm_human_preferences.storage.schema import matches_schema

Content = TypeVar('Content')
Settings = PolicyHParams | RewardHParams
KNOWN = 'mock'  # value of --rewards.trained_model for the known reward of film reviews
DAMAGED = (UserError, OSError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
# Schema of the numbers that a report needs from each point of an evaluation
POINT = dict.fromkeys(('kl', 'reward', 'frontier', 'share'), int | float | None)


class Run:
    """A run: settings, records, logs, results and labels."""

    def __init__(self, directory: str, files: run_files.CommandFiles) -> None:
        """Read the run in `directory` (path or URL), with the `files` of its command."""
        self.directory = directory
        self.unreadable: dict[str, None] = {}  # names of damaged files
        self.policy: PolicyHParams | None = None
        events = [REWARD.events]
        if files is POLICY:
            events = [POLICY.events, REWARD.events]
            self.policy = self._tried(POLICY.settings, None, read_settings, PolicyHParams())
        # Settings with which the run trained its reward model, if it did
        self.reward: HParams | None = self._tried(
            REWARD.settings, None, read_settings, RewardHParams()
        )
        if self.policy is not None and self.reward is None:
            self.reward = self.policy.new_reward_model
        record = self._tried(run_files.RECORD, {}, run_record.read)
        self.training = record.get(files.command, {})  # see runs.run_record about these three
        self.labels = run_record.labels(record)
        self.commands = run_record.commands(record)
        # Log of the policy, if any, then that of the reward model
        self.logs = [curves.read(directory, each) for each in events]
        if not self.logs[0].curves:
            self.unreadable[events[0]] = None
        self.evaluation = self._tried(run_files.RESULTS, {}, _evaluation)
        # {tracked query: answers, in the order of the steps}
        self.samples = self._tried(run_files.SAMPLES, {}, _samples)
        # Folder of labels with the answers that were used, and the report on it
        self.folder = self._tried(run_files.LABELS, None, _label_folder, self.labels)
        self.label_report = self._tried(run_files.LABELS, {}, _label_report, self)
        # People's comparisons of the run's policy with others; most answers first
        self.comparisons = self._tried(run_files.LABELS, [], _comparisons, self)

    def _tried(
        self, name: str, otherwise: Content, read: Callable[..., Content], *args: Any
    ) -> Content:
        """Return the result of `read`, or `otherwise`; add a damaged file to `unreadable`."""
        try:
            return read(*args, self.directory)
        except storage.NotFound:
            pass
        except DAMAGED:
            self.unreadable[name] = None
        return otherwise

    @property
    def settings(self) -> Settings | None:
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
        if self.given in (None, KNOWN) or self.policy is None or self.policy.rewards.function:
            return self
        try:
            return read_run(self.given) or self
        except DAMAGED:
            return self

    @property
    def rewards(self) -> dict[str, dict[str, Any]]:
        """Results {reward: {point: numbers}}; the reward that was trained on comes first.

        The results are from the evaluation, or else from the first and last steps in the log.
        """
        ends = zip(self.logged('objective/kl'), self.logged('objective/score'), strict=False)
        points = [{'kl': kl, 'reward': score} for kl, score in ends]
        logged = {'Score': {'base': points[0], 'policy': points[-1]}} if points else {}
        return self.evaluation.get('rewards', logged)

    def logged(self, tag: str) -> list[float]:
        """Return the values of a statistic, step by step; [] if no log has it."""
        return next((log.curves[tag] for log in self.logs if tag in log.curves), [])

    def last(self, tag: str) -> float | None:
        """Return the last value of a statistic."""
        return next(reversed(self.logged(tag)), None)


def read_run(path: str) -> Run | None:
    """Return the run at `path` (path or URL), or the run whose network is there, or None."""
    directories = [path.rstrip('/')]
    parent, _, last = directories[0].rpartition('/')
    if run_files.is_network(last):
        directories.append(parent or '.')
    for directory in directories:
        for files in (POLICY, REWARD):
            if storage.exists(storage.join(directory, files.settings)):
                return Run(directory, files)
    return None


def _label_folder(labels: Mapping[str, Any], directory: str) -> LabelFolder | None:
    path = labels.get('source')
    if path == COLLECTED:
        path = storage.join(directory, run_files.LABELS)
    return LabelFolder(path, labels.get('answers')) if path and is_folder(path) else None


def _label_report(run: Run, directory: str) -> dict[str, Any]:
    if run.folder is None:
        return {}
    without = parse_names(run.reward.labels.without) if run.reward is not None else ()
    present = [name for name in without if name in run.folder.logs]
    return label_report.report(run.folder, present)


def _comparisons(run: Run, directory: str) -> list[dict[str, Any]]:
    """Return people's comparisons of a run's policy with others, also those after the training."""
    if run.folder is None:
        return []
    whole, found = LabelFolder(run.folder.path), []
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
    """Return the results of `evaluate`."""
    path = storage.join(directory, run_files.RESULTS)
    results = storage.read_json(path)
    for points in results['rewards'].values():
        for point in (points['base'], points['policy']):
            if not matches_schema({'frontier': None, 'share': None, **point}, POINT):
                raise ValueError(f'{path}: {point!r:.80} holds what is no number')
    return results


def _samples(directory: str) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    path = storage.join(directory, run_files.SAMPLES)
    for _, line in storage.parse_json_lines(storage.read_whole_lines(path), path):
        if matches_schema(line, {'query': str, 'response': str}):
            found.setdefault(line['query'], []).append(line)
    return found
