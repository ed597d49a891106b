"""Labels of a run: labellers, comparisons of policies, calibration of the reward model."""

from collections.abc import Mapping
from typing import Any

from lm_human_preferences.errors import UserError
from lm_human_preferences.labels.folder import LabelFolder, is_folder, parse_names
from lm_human_preferences.labels.report import label_report, wording
from lm_human_preferences.report_page import charts
from lm_human_preferences.report_page.charts import Series
from lm_human_preferences.run_story.facts import RunFacts

_DAMAGED = (UserError, OSError, ValueError, KeyError, TypeError, AttributeError)
MOST_LABELLERS = 40  # of each folder


def labels(
    facts: RunFacts, *, has_names: bool, calibrate: bool, identity: str
) -> dict[str, Any] | None:
    """Return the tables and calibrations of the labels of a run; None if it has no labels."""
    trainer = facts.reward_trainer
    if not facts.learned_reward or trainer.labels is None:
        return None
    labellers: list[tuple[str, Mapping[str, Any]]] = []
    comparisons: list[Mapping[str, Any]] = []
    calibrations: list[dict[str, Any]] = []
    without = () if trainer.reward is None else parse_names(trainer.reward.labels.without)
    for source in trainer.labels.sources:
        report = _report(source.path, without) if is_folder(source.path) else None
        if report is None:
            continue
        for name, found in list(report['labellers'].items())[:MOST_LABELLERS]:
            labellers.append((name if has_names else f'labeller {len(labellers) + 1}', found))
        comparisons += report['comparisons']
        if calibrate:
            chart = f'{identity}-calibration-{len(calibrations)}'
            calibrations.append(_calibration(source.path, facts, without, chart))
    heads, *rows = wording.labeller_table(labellers)
    return {'heads': heads, 'rows': rows, 'comparisons': comparisons, 'calibrations': calibrations}


def _report(source: str, without: tuple[str, ...]) -> dict[str, Any] | None:
    try:
        folder = LabelFolder(source)
        return label_report.report(folder, [name for name in without if name in folder.logs])
    except _DAMAGED:
        return None


def _calibration(
    source: str, facts: RunFacts, without: tuple[str, ...], identity: str
) -> dict[str, Any]:
    """Measure the calibration on the answers in a folder. identity: of the chart."""
    from lm_human_preferences.evaluation import reward_on_labels
    from lm_human_preferences.reward_sources.sources import source_of

    try:
        model = facts.directory
        if facts.policy is not None:
            model = source_of(facts.policy).place_in(facts.directory)
        found = reward_on_labels.calibration(LabelFolder(source), model, without)
    except (*_DAMAGED, RuntimeError) as e:
        return {'error': str(e)}
    if found is None:
        return {'found': None}
    series = [
        Series('observed', found.predicted, found.observed, charts.POINTS, 1),
        Series('perfect calibration', [0, 1], [0, 1], charts.DASHED, 5),
    ]
    x, y = 'predicted probability that a response is chosen', 'share that was chosen'
    title = 'Calibration of the reward model'
    return {'found': found, 'chart': charts.layout(title, x, y, series, identity=identity)}
