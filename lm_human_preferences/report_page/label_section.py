"""Labels of a run: labellers, and comparisons of policies."""

from collections.abc import Mapping
from typing import Any

from lm_human_preferences.errors import UserError
from lm_human_preferences.labels.folder import LabelFolder, is_folder, parse_names
from lm_human_preferences.labels.report import label_report, wording
from lm_human_preferences.run_story.facts import RunFacts

_DAMAGED = (UserError, OSError, ValueError, KeyError, TypeError, AttributeError)
MOST_LABELLERS = 40  # of each folder


def labels(facts: RunFacts, *, has_names: bool) -> dict[str, Any] | None:
    """Return the tables of the labels of a run; None if it has no labels."""
    trainer = facts.reward_trainer
    if not facts.learned_reward or trainer.labels is None:
        return None
    labellers: list[tuple[str, Mapping[str, Any]]] = []
    comparisons: list[Mapping[str, Any]] = []
    without = () if trainer.reward is None else parse_names(trainer.reward.labels.without)
    for source in trainer.labels.sources:
        report = _report(source.path, without) if is_folder(source.path) else None
        if report is None:
            continue
        for name, found in list(report['labellers'].items())[:MOST_LABELLERS]:
            labellers.append((name if has_names else f'labeller {len(labellers) + 1}', found))
        comparisons += report['comparisons']
    heads, *rows = wording.labeller_table(labellers)
    return {'heads': heads, 'rows': rows, 'comparisons': comparisons}


def _report(source: str, without: tuple[str, ...]) -> dict[str, Any] | None:
    try:
        folder = LabelFolder(source)
        return label_report.report(folder, [name for name in without if name in folder.logs])
    except _DAMAGED:
        return None
