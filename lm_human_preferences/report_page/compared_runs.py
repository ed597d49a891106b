"""Comparison of several runs: results, curves, and settings that differ."""

from collections.abc import Sequence
from typing import Any

from lm_human_preferences.hparams.differences import decided
from lm_human_preferences.report_page import charts
from lm_human_preferences.report_page.charts import Series
from lm_human_preferences.run_story import command_lines
from lm_human_preferences.run_story.facts import RunFacts
from lm_human_preferences.runs.curves import LoggedCurve

_CURVES = {
    'objective/score': ('Score', 'mean score'),
    'objective/kl': ('KL from the initial model', 'nats'),
}
_NONE = '–'


def comparison(
    names: Sequence[str], runs: Sequence[RunFacts], *, has_names: bool = True
) -> dict[str, Any]:
    """Return the rows of results, charts, and rows of settings that differ between `runs`."""
    named = list(zip(names, runs, strict=True))
    drawn = []
    for tag, (title, y) in _CURVES.items():
        series = []
        for place, (name, facts) in enumerate(named):
            if tag in facts.curves:
                series.append(_series(name, place, facts.curves[tag]))
        identity = f'runs-{tag.partition("/")[2]}'
        chart = charts.layout(title, charts.STEP, y, series, identity=identity)
        if chart is not None:
            drawn.append(chart)
    return {
        'rows': [[name, *_results(facts)] for name, facts in named],
        'charts': drawn,
        'settings': _settings(runs, has_names=has_names),
    }


def _series(name: str, place: int, curve: LoggedCurve) -> Series:
    """Return the curve of a run; runs of the same colour differ by their lines."""
    kind = charts.DASHED if place // charts.COLOURS % 2 else charts.LINE
    return Series(name, curve.steps, curve.values, kind, place)


def _results(facts: RunFacts) -> list[Any]:
    """Return initial model, labels, steps, mean score and KL at the end, share, alarms."""
    found: list[Any] = [_NONE] * 6
    found[0] = facts.initial_model or _NONE
    labels = facts.reward_trainer.labels
    if facts.learned_reward and labels is not None:
        found[1] = labels.count
    for place, tag in enumerate(_CURVES, start=3):
        curve = facts.curves.get(tag)
        if curve is not None:
            found[2] = curve.steps[-1] + 1
            found[place] = charts.number(curve.recent)
    if facts.share_of_gain is not None:
        found[5] = facts.share_of_gain
    alarms = len(facts.marks['policy']['alarm']) if 'policy' in facts.marks else 0
    return [*found, alarms]


def _settings(runs: Sequence[RunFacts], *, has_names: bool) -> list[list[str]]:
    """Return (option, its value in each run) of those that differ."""
    found = []
    for facts in runs:
        options = {} if facts.settings is None else decided(facts.settings)
        found.append({key: str(value) for key, value in options.items()})
    rows = []
    for name in dict.fromkeys(key for options in found for key in options):
        values = [options.get(name, _NONE) for options in found]
        if len(set(values)) > 1 and (has_names or not command_lines.is_of_names(name)):
            rows.append([f'--{name}', *values])
    return rows
