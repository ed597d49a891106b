"""Comparison of several runs: results, curves, and settings that differ."""

from collections.abc import Sequence
from typing import Any

from lm_human_preferences.report_page import charts
from lm_human_preferences.report_page.charts import Series
from lm_human_preferences.run_story import commands, sentences
from lm_human_preferences.run_story.facts import RunFacts
from lm_human_preferences.runs import curves
from lm_human_preferences.runs.curves import Curve
from lm_human_preferences.runs.run_files import POLICY

_CURVES = {
    'objective/score': ('Score', 'mean score'),
    'objective/kl': ('KL from the initial model', 'nats'),
}
_NONE = '–'
# Scores and KLs are means of the last tenth of the steps.
HEADS = 'run, began as, labels, steps, score, KL, share of the gain (±: 95 %), alarms'


def comparison(
    names: Sequence[str], runs: Sequence[RunFacts], *, has_names: bool = True
) -> dict[str, Any]:
    """Return a table of results, charts, and a table of settings that differ between `runs`."""
    drawn = [
        charts.draw(
            title,
            charts.STEP,
            y,
            [
                _series(name, place, facts.curves[tag])
                for place, (name, facts) in enumerate(zip(names, runs, strict=True))
                if tag in facts.curves
            ],
            identity=f'runs-{tag.partition("/")[2]}',
        )
        for tag, (title, y) in _CURVES.items()
    ]
    return {
        'heads': HEADS.split(', '),
        'rows': [[name, *_results(facts)] for name, facts in zip(names, runs, strict=True)],
        'charts': [chart for chart in drawn if chart is not None],
        'settings': [
            row for row in _settings(runs) if has_names or not commands.is_of_names(row[0])
        ],
    }


def _series(name: str, place: int, curve: Curve) -> Series:
    """Return the curve of a run; runs of the same colour differ by their lines."""
    kind = charts.DASHED if place // charts.COLOURS % 2 else charts.LINE
    return Series(name, curve.steps, curve.values, kind, place)


def _results(facts: RunFacts) -> list[str]:
    log = facts.logs.get(POLICY.command)
    alarms = 0
    if log is not None:
        alarms = sum(mark.kind == curves.ALARM for mark in curves.marks(log))
    labels = facts.reward_trainer.labels if facts.learned_reward else None
    curve = facts.curves.get('objective/score')
    share = sentences.share_of_gain(facts)
    ends = [facts.curves[tag].recent if tag in facts.curves else None for tag in _CURVES]
    return [
        facts.initial_model or _NONE,
        _NONE if labels is None or labels.count is None else str(labels.count),
        _NONE if curve is None else str(curve.steps[-1] + 1),
        *(_NONE if value is None else charts.number(value) for value in ends),
        _NONE if share is None else share,
        str(alarms),
    ]


def _settings(runs: Sequence[RunFacts]) -> list[list[str]]:
    """Return (option, its value in each run) of those that differ."""
    found = []
    for facts in runs:
        options = {} if facts.hparams is None else commands.settings(facts.hparams)
        found.append({key: str(value) for key, value in options.items()})
    names = dict.fromkeys(key for options in found for key in options)
    rows = []
    for name in names:
        values = [options.get(name, _NONE) for options in found]
        if len(set(values)) > 1:
            rows.append([f'--{name}', *values])
    return rows
