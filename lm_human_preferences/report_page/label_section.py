"""Labels of a run: labellers, agreement, calibration of the reward model."""

from collections.abc import Mapping
from typing import Any

from lm_human_preferences.errors import UserError
from lm_human_preferences.labels.folder import LabelFolder, is_folder, parse_names
from lm_human_preferences.labels.report import label_report, wording
from lm_human_preferences.report_page import charts
from lm_human_preferences.report_page.charts import Chart, Series
from lm_human_preferences.run_story import sentences
from lm_human_preferences.run_story.facts import RunFacts

_DAMAGED = (UserError, OSError, ValueError, KeyError, TypeError, AttributeError)
MOST_LABELLERS = 40  # of each folder


def labels(
    facts: RunFacts, *, has_names: bool, calibrate: bool, identity: str
) -> dict[str, Any] | None:
    """Return the section on the labels of a run, calibrated by its reward model; None if none."""
    trainer = facts.reward_trainer
    if not facts.learned_reward or trainer.labels is None:
        return None
    labellers: list[tuple[str, Mapping[str, Any]]] = []
    comparisons: list[str] = []
    calibrations: list[tuple[Chart | None, str]] = []
    without = () if trainer.reward is None else parse_names(trainer.reward.labels.without)
    for source in trainer.labels.sources:
        report = _report(source.path, without) if is_folder(source.path) else None
        if report is None:
            continue
        for name, found in list(report['labellers'].items())[:MOST_LABELLERS]:
            labellers.append((name if has_names else f'labeller {len(labellers) + 1}', found))
        comparisons += map(wording.comparison, report['comparisons'])
        if calibrate:
            chart = f'{identity}-calibration-{len(calibrations)}'
            calibrations.append(_calibration(source.path, facts, without, chart))
    heads, *rows = wording.labeller_table(labellers)
    return {
        'sentences': [*sentences.labels(trainer.labels), *sentences.held_out(trainer)],
        'heads': heads,
        'rows': rows,
        'comparisons': comparisons,
        'calibrations': calibrations,
    }


def _report(source: str, without: tuple[str, ...]) -> dict[str, Any] | None:
    try:
        folder = LabelFolder(source)
        return label_report.report(folder, [name for name in without if name in folder.logs])
    except _DAMAGED:
        return None


def _calibration(
    source: str, facts: RunFacts, without: tuple[str, ...], identity: str
) -> tuple[Chart | None, str]:
    """Measure the calibration on the answers in a folder. identity: of the chart."""
    from lm_human_preferences.evaluation import reward_on_labels
    from lm_human_preferences.reward_sources import source_of

    try:
        model = facts.directory
        if facts.policy is not None:
            model = source_of(facts.policy).place_in(facts.directory)
        found = reward_on_labels.calibration(LabelFolder(source), model, without)
    except (*_DAMAGED, RuntimeError) as e:
        return None, f'The calibration cannot be computed: {e}'
    if found is None:
        return None, 'These labels are not choices, so there is no preference to predict.'
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
    return chart, (
        f'From {found.labels} labels {which}, whose responses are grouped by how likely the reward'
        f' model finds them. Its rewards are multiplied by {found.scale:.2g}, which fits best:'
        ' their scale was set after it had learned. Where points are off the line, it is too sure'
        ' or too timid.'
    )
