"""The labels of a run, for the page: who gave them, how far they agree, how they are predicted."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from lm_human_preferences.errors import UserError
from lm_human_preferences.labels.folder import LabelFolder, is_folder
from lm_human_preferences.labels.folder_labels import parse_names
from lm_human_preferences.labels.report import label_report
from lm_human_preferences.report_page import charts
from lm_human_preferences.report_page.charts import Chart, Series
from lm_human_preferences.run_story import sentences
from lm_human_preferences.run_story.facts import RunFacts

_DAMAGED = (UserError, OSError, ValueError, KeyError, TypeError, AttributeError)
MOST_LABELLERS = 40
HEADS = [
    'labeller',
    'answers',
    'skipped',
    'taken back',
    'median seconds',
    'under 1 s',
    'agree with others',
    'chosen by position',
    'p of the positions',
]


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What a reward model predicts, against what was answered.

    chart: None where it cannot be drawn. told: a sentence.
    """

    chart: Chart | None
    told: str


@dataclasses.dataclass(frozen=True)
class Labels:
    """What the page says of labels.

    told: sentences. heads, rows: the table of labellers. comparisons: sentences. calibrations: of
    each folder of labels; none where they were not asked for.
    """

    told: list[str]
    heads: list[str]
    rows: list[list[str]]
    comparisons: list[str]
    calibrations: list[Calibration]


def labels(facts: RunFacts, *, has_names: bool, calibrate: bool, identity: str) -> Labels | None:
    """Those of the reward model that a run learned from; None where it learned from none.

    has_names: whether labellers are named. calibrate: whether its reward model is asked for its
    opinion of them, which loads torch.
    """
    trainer = facts.reward_trainer
    if not facts.learned_reward or trainer.labels is None:
        return None
    told = [*sentences.labels(trainer.labels), *sentences.held_out(trainer)]
    rows: list[list[str]] = []
    comparisons: list[str] = []
    calibrations: list[Calibration] = []
    without = () if trainer.reward is None else parse_names(trainer.reward.labels.without)
    for source in trainer.labels.sources:
        report = _report(source.path, without) if is_folder(source.path) else None
        if report is None:
            continue
        rows += _rows(report['labellers'], len(rows), has_names=has_names)
        comparisons += [_comparison(each) for each in report['comparisons']]
        if calibrate:
            chart = f'{identity}-calibration-{len(calibrations)}'
            calibrations.append(_calibration(source.path, facts, without, chart))
    return Labels(told, HEADS, rows, comparisons, calibrations)


def _report(source: str, without: tuple[str, ...]) -> dict[str, Any] | None:
    try:
        folder = LabelFolder(source)
        return label_report.report(folder, [name for name in without if name in folder.logs])
    except _DAMAGED:
        return None


def _rows(
    labellers: Mapping[str, Mapping[str, Any]], before: int, *, has_names: bool
) -> list[list[str]]:
    """Those of the table. before: how many it has of other labellers."""
    rows = []
    for place, (name, found) in enumerate(list(labellers.items())[:MOST_LABELLERS], before + 1):
        agreement = '–'
        if found['agreement'] is not None and found['agreement_pairs']:
            agreement = f'{100 * found["agreement"]:.0f} % of {found["agreement_pairs"]}'
        positions, p = found['positions'], found['positions_p_value']
        rows.append(
            [
                name if has_names else f'labeller {place}',
                _answers(found),
                str(found['skipped']),
                str(found['taken_back']),
                '–' if found['median_seconds'] is None else f'{found["median_seconds"]:.1f}',
                str(found['under_a_second']),
                agreement,
                '–' if positions is None else ' / '.join(map(str, positions)),
                '–' if p is None else f'{p:.2g}',
            ]
        )
    return rows


def _answers(labeller: Mapping[str, Any]) -> str:
    """How many a labeller has given, and how many of them prefer nothing."""
    told = str(labeller['answers'])
    ties = labeller.get('ties', 0)
    if ties:
        told += f', {ties} without a preference'
    return told


def _comparison(found: Mapping[str, Any]) -> str:
    return (
        f'{found["against"]} was preferred to {found["policy"]} in'
        f' {100 * found["win_rate"]:.1f} % of {found["n"]} answers (95 % interval'
        f' {100 * found["low"]:.1f} to {100 * found["high"]:.1f} %).'
    )


def _calibration(
    source: str, facts: RunFacts, without: tuple[str, ...], identity: str
) -> Calibration:
    """That of the answers in a folder. identity: of the chart."""
    from lm_human_preferences.evaluation import calibration

    try:
        found = calibration.calibration(LabelFolder(source), _reward_model(facts), without)
    except (*_DAMAGED, RuntimeError) as e:
        return Calibration(None, f'The calibration cannot be computed: {e}')
    if found is None:
        told = 'These labels are no choices, so there is no preference to predict.'
        return Calibration(None, told)
    chart = charts.draw(
        'Calibration of the reward model',
        'predicted chance that a response is chosen',
        'share that was chosen',
        [
            Series('what was chosen', found.predicted, found.observed, charts.POINTS, 1),
            Series('perfect calibration', [0, 1], [0, 1], charts.DASHED, 5),
        ],
        identity=identity,
    )
    which = 'held out of the training' if found.held_out else 'that it learned from'
    told = (
        f'From {found.labels} labels {which}, whose responses are grouped by how likely the reward'
        f' model finds them. Its rewards are multiplied by {found.scale:.2g}, which fits best:'
        ' their scale was set after it had learned. Where points are off the line, it is too sure'
        ' or too timid.'
    )
    return Calibration(chart, told)


def _reward_model(facts: RunFacts) -> str:
    """Where the reward model is that the policy learned from, or that the run is."""
    from lm_human_preferences.reward_models import places  # loads torch

    if facts.policy is None:
        return facts.directory
    return places.reward_model_of(facts.directory, facts.policy)
