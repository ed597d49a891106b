"""Several runs on one page: what they reached, their curves, and how their settings differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lm_human_preferences.report_page import charts
from lm_human_preferences.report_page.charts import Chart, Series
from lm_human_preferences.run_story import commands, happenings, sentences
from lm_human_preferences.run_story.curves import Curve
from lm_human_preferences.run_story.facts import RunFacts
from lm_human_preferences.runs.run_files import POLICY

_CURVES = {
    'objective/score': ('Score', 'mean score'),
    'objective/kl': ('KL from the initial model', 'nats'),
}
_NONE = '–'


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A table of results, charts, and a table of the settings that are not the same everywhere."""

    heads: list[str]
    rows: list[list[str]]
    charts: list[Chart]
    settings: list[list[str]]


def comparison(
    names: Sequence[str], runs: Sequence[RunFacts], *, has_names: bool = True
) -> Comparison:
    """That of `runs`, which the page calls `names`. has_names: whether labellers are named."""
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
    return Comparison(
        ['run', 'began as', 'labels', 'steps', 'score', 'KL', 'share of the gain', 'alarms'],
        [[name, *_results(facts)] for name, facts in zip(names, runs, strict=True)],
        [chart for chart in drawn if chart is not None],
        [row for row in _settings(runs) if has_names or not commands.is_of_names(row[0])],
    )


def _series(name: str, place: int, curve: Curve) -> Series:
    """The curve of the run at a place; runs of the same colour differ by their lines."""
    kind = charts.DASHED if place // charts.COLOURS % 2 else charts.LINE
    return Series(name, curve.steps, curve.values, kind, place)


def _results(facts: RunFacts) -> list[str]:
    log = facts.logs.get(POLICY.command)
    alarms = 0
    if log is not None:
        alarms = sum(mark.kind == happenings.ALARM for mark in happenings.marks(log))
    labels = facts.reward_trainer.labels if facts.learned_reward else None
    curve = facts.curves.get('objective/score')
    share = sentences.share_of_gain(facts)
    return [
        facts.initial_model or _NONE,
        _NONE if labels is None or labels.count is None else str(labels.count),
        _NONE if curve is None else str(curve.steps[-1] + 1),
        _last(facts, 'objective/score'),
        _last(facts, 'objective/kl'),
        _NONE if share is None else share,
        str(alarms),
    ]


def _last(facts: RunFacts, tag: str) -> str:
    return charts.number(facts.curves[tag].last) if tag in facts.curves else _NONE


def _settings(runs: Sequence[RunFacts]) -> list[list[str]]:
    """(option, its value in each run) of those that are not the same everywhere."""
    found = [_options(facts) for facts in runs]
    names = dict.fromkeys(key for options in found for key in options)
    rows = []
    for name in names:
        values = [options.get(name, _NONE) for options in found]
        if len(set(values)) > 1:
            rows.append([f'--{name}', *values])
    return rows


def _options(facts: RunFacts) -> dict[str, str]:
    """{option: value} of a run's settings."""
    hparams = facts.policy if facts.policy is not None else facts.reward
    if hparams is None:
        return {}
    return {key: str(value) for key, value in commands.settings(hparams).items()}
