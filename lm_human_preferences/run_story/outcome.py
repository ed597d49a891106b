"""Facts about a policy from the evaluation of its run, whose file may be damaged."""

import contextlib
import dataclasses
import operator
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lm_human_preferences import storage
from lm_human_preferences.evaluation import report
from lm_human_preferences.hparams.command_options import EvaluationHParams
from lm_human_preferences.run_story.label_facts import json_object
from lm_human_preferences.runs import run_files

_DAMAGED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class Measured(NamedTuple):
    """Policy by one reward: numbers with their 95 % intervals; None for one that is not known."""

    reward: str
    kl: str | None
    mean: str | None
    share: str | None  # of the gain that is possible at that KL
    is_learned_from: bool  # True for a judge that the policy, or its reward model, learned from


def measured(
    evaluation: Mapping[str, Any], has_learned_from: Callable[[str], bool]
) -> list[Measured]:
    """Return the policy by each reward, its own first; [] where the results are damaged."""
    found = []
    try:
        for reward, points in evaluation['rewards'].items():
            policy, queries = points['policy'], evaluation['queries']
            kl, mean, share = (
                _with_interval(policy, name, queries) for name in ('kl', 'reward', 'share')
            )
            judge = evaluation.get('judge') if reward == report.JUDGE else None
            is_learned_from = isinstance(judge, str) and has_learned_from(judge)
            found.append(Measured(reward, kl, mean, share, is_learned_from))
    except _DAMAGED:
        return []
    return found


def _with_interval(point: Mapping[str, Any], name: str, queries: int) -> str | None:
    """Format a number of a point, a share in per cent, with its 95 % interval, if it has one."""
    value = report.value_of(point, name) if name in point else None
    if value is None:
        return None
    width = report.margin(point, name, queries)
    if name == 'share':
        interval = f' ± {100 * width:.1f}' if width else ''
        return f'{100 * value:.1f}{interval} %'
    return f'{value:.2f} ± {width:.2f}' if width else f'{value:.2f}'


def table(evaluation: dict[str, Any]) -> list[str] | None:
    """Return the table of an evaluation as lines of text; None where it is damaged."""
    try:
        return list(report.table(evaluation))
    except _DAMAGED:
        return None


def settings_of(file: str) -> str:
    """Return the settings of an evaluation that are not the defaults, from its file's name."""
    names = '|'.join(field.name for field in dataclasses.fields(EvaluationHParams))
    settings = file.removesuffix('.json').removeprefix('evaluation')
    return re.sub(rf'-({names})_', r', \1 ', settings).removeprefix(', ')


def best_evaluation(directory: str) -> tuple[str, dict[str, Any]]:
    """Return name and results of the evaluation that says most about the present policy.

    An exact one comes first, then the one with most queries and most responses to each; of those
    that are alike, the newest. Times of a remote run are not known.
    """
    names = [run_files.RESULTS]
    with contextlib.suppress(storage.StorageError, OSError):
        is_remote = storage.is_remote(directory)
        names += sorted(storage.listing(directory) if is_remote else os.listdir(directory))
    trained = _time_of(directory, run_files.POLICY.finished)
    candidates = []
    for name in names:
        if not name.endswith('.json') or not re.fullmatch(run_files.EVALUATION, name):
            continue
        results = json_object(storage.join(directory, name))
        sizes = (results.get(size) for size in ('queries', 'responses'))
        counts = [size if isinstance(size, int) else 0 for size in sizes]
        time = _time_of(directory, name)
        key = bool(results), time >= trained, results.get('exact') is True, *counts, time
        candidates.append((key, name, results))
    _, name, results = max(candidates, key=operator.itemgetter(0))
    return name, results


def _time_of(directory: str, name: str) -> float:
    """Return when a file of a local run was written; 0 where that is not known."""
    with contextlib.suppress(OSError):
        if not storage.is_remote(directory):
            return os.path.getmtime(os.path.join(directory, name))
    return 0.0
