"""A run as read from its files; a missing or damaged file leaves None or an empty value."""

import os
from collections.abc import Callable
from typing import Any

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams import policy_options, reward_options
from lm_human_preferences.labels.folder import VALIDATION, LabelFolder, is_folder, parse_names
from lm_human_preferences.labels.report import label_report
from lm_human_preferences.runs import curves, run_files, run_record
from lm_human_preferences.runs.run_settings import read_settings
from lm_human_preferences.storage.schema import matches_schema

DAMAGED = (UserError, OSError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class Run:
    """A run: settings, records, logs, results and labels."""

    def __init__(self, directory: str, files: run_files.CommandFiles) -> None:
        """Read the run in `directory` (path or URL). files: names of the files in a run."""
        self.directory = directory
        self.has_names = True  # whether the report may name labellers
        self.unreadable: dict[str, None] = {}  # names of damaged files and missing report parts
        self.trains_policy = files is run_files.POLICY
        hparams = policy_options.HParams if self.trains_policy else reward_options.CommandHParams
        self.settings = self.tried(files.settings, None, read_settings, hparams(), directory)
        self.policy: policy_options.HParams | None = self.settings and self.settings.policy
        # These are the settings of the reward model that the run trained, if any.
        self.reward = self.settings and self.settings.new_reward_model
        given = self.policy and self.reward is None and self.policy.rewards.trained_model
        # `trainer` is the run that trained the reward model, or this run if that run is unreadable.
        self.trainer = (given and self.tried('its reward model', None, read_run, given)) or self
        adaptive = self.policy and self.policy.rewards.adaptive_kl
        self.target = adaptive and adaptive.target  # target of the KL, in nats
        record = self.tried(run_files.RECORD, {}, run_record.read, directory)
        self.training = record.get(files.command, {})  # runs.run_record describes this record
        self.labels = run_record.labels(record)
        self.commands = run_record.commands(record)
        self.log = curves.read(directory, files.events)
        if not self.log.curves:
            self.unreadable[files.events] = None
        self.curves = {**curves.read(directory, run_files.REWARD.events).curves, **self.log.curves}
        results = storage.join(directory, run_files.RESULTS)
        self.evaluation = self.tried(
            run_files.RESULTS, {}, lambda: dict(storage.read_json(results))
        )
        # {tracked query: its answers, in the order of the training steps}
        self.samples = self.tried(run_files.SAMPLES, {}, _samples, directory)
        found = self.tried(run_files.LABELS, (None, {}, []), _labels, self)
        self.folder, self.label_report, self.comparisons = found

    def tried(self, name: str, otherwise: Any, make: Callable[..., Any], *args: Any) -> Any:
        """Return make(*args), or `otherwise` if files are missing or damaged; record damage."""
        try:
            return make(*args)
        except storage.NotFound:
            pass
        except DAMAGED:
            self.unreadable[name] = None
        return otherwise

    @property
    def rewards(self) -> dict[str, dict[str, Any]]:
        """Results {reward: {policy: statistics}} of the evaluation or, without one, of the log.

        The reward of the training comes first.
        """
        kl, score = (self.curves.get(f'objective/{name}') for name in ('kl', 'score'))
        if self.evaluation or not (kl and score):
            return self.evaluation.get('rewards', {})
        ends = [{'kl': kl[end(kl)], 'reward': score[end(score)]} for end in (min, max)]
        return {'reward of the training': dict(zip(('base', 'policy'), ends, strict=True))}

    def last(self, tag: str) -> float | None:
        """Return the last logged value of a statistic; None if it is not logged."""
        return next(reversed(self.curves.get(tag, {}).values()), None)


def read_run(path: str) -> Run | None:
    """Return the run at `path`, or the run that saved a network at `path`; None without a run."""
    parent, _, last = path.rstrip('/').rpartition('/')
    directories = [path, parent or '.'] if run_files.is_network(last) else [path]
    for directory in directories:
        for files in (run_files.POLICY, run_files.REWARD):
            if storage.exists(storage.join(directory, files.settings)):
                return Run(directory, files)
    return None


def _labels(run: Run) -> tuple[LabelFolder | None, dict[str, Any], list[dict[str, Any]]]:
    """Return (folder of labels, report on the folder, comparisons with other policies)."""
    path, found = run.labels.get('source'), []
    if path == reward_options.COLLECTED:
        path = storage.join(run.directory, run_files.LABELS)
    if not path or not is_folder(path):
        return None, {}, []
    folder, whole = LabelFolder(path, run.labels.get('answers')), LabelFolder(path)
    without = parse_names(run.reward.labels.without) if run.reward is not None else ()
    report = label_report.report(folder, folder.logs.keys() & set(without))
    answers = [answer for answer in whole.counted(VALIDATION) if not answer.is_simulated]
    for each in label_report.comparisons(whole, answers):
        name = each['policy'].partition(' (')[0].removesuffix('/policy')
        if each['n'] and os.path.abspath(name) == os.path.abspath(run.directory):
            wins, low, high = each['n'] - each['wins_of_against'], 1 - each['high'], 1 - each['low']
            found.append({**each, 'wins': wins, 'low': low, 'high': high})
    return folder, report, found


def _samples(directory: str) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    path = storage.join(directory, run_files.SAMPLES)
    for _, line in storage.parse_json_lines(storage.read_whole_lines(path), path):
        if matches_schema(line, {'query': str, 'response': str}):
            found.setdefault(line['query'], []).append(line)
    return found
