"""Facts about the labels of a reward model, from the files of its run."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.policy_options import HParams as PolicyHParams
from lm_human_preferences.hparams.reward_options import HParams as RewardHParams
from lm_human_preferences.labels.folder import LabelFolder, are_line_counts, is_folder, parse_names
from lm_human_preferences.labels.report import label_report
from lm_human_preferences.runs import run_files, run_record

PEOPLE, KNOWN_REWARD, MADE_UP, FILE, FOLDER = 'people', 'known reward', 'made up', 'file', 'folder'
_MADE_HERE = {'mock': KNOWN_REWARD, 'test': MADE_UP}


@dataclasses.dataclass(frozen=True)
class Source:
    """Source of labels."""

    kind: str  # PEOPLE (while the policy trained), KNOWN_REWARD, MADE_UP, FILE or FOLDER
    path: str  # or URL, as the run was given it
    agreement: Mapping[str, Any] | None = None  # see labels.report

    @property
    def has_labellers(self) -> bool:
        """True if answers name their labellers."""
        return self.kind in (PEOPLE, FOLDER)


@dataclasses.dataclass(frozen=True)
class LabelFacts:
    """Labels of a reward model. None stands for an unknown fact."""

    sources: tuple[Source, ...]
    label_type: str  # of label_types
    count: int | None = None  # those held out included
    labellers: int | None = None  # people or programs that answered
    left_out: int = 0  # labellers whose answers do not count
    held_out: float = 0.0  # share
    errors: float = 0.0  # share of simulated answers that are random
    reward_models: int = 0  # trained one after another while the policy trained


def labels_of_training(run: str, settings: RewardHParams) -> LabelFacts:
    """Return the labels of a reward model that a run trained first. settings: train_reward's."""
    labels = settings.labels
    record = recorded_labels(run)
    count = record.get('found')
    names = parse_names(labels.without)
    return LabelFacts(
        sources=tuple(_source(path, record, names) for path in labels.sources().values()),
        label_type=labels.type,
        count=count if isinstance(count, int) else None,
        labellers=_labellers(record),
        left_out=len(names),
        held_out=labels.held_out,
        errors=labels.error,
    )


def _source(path: str, record: Mapping[str, Any], without: tuple[str, ...]) -> Source:
    """Return the source that `path` names. record: of what was learned."""
    lines = record.get('answers') if record.get('source') == path else None
    counts = lines if are_line_counts(lines) else None
    is_here = is_folder(path)
    return Source(
        kind=_MADE_HERE.get(path, FOLDER if is_here or lines is not None else FILE),
        path=path,
        agreement=_agreement(path, counts, without) if is_here else None,
    )


def labels_of_online(run: str, settings: PolicyHParams) -> LabelFacts:
    """Return the labels of reward models that were retrained while the policy trained."""
    online, new_model = settings.rewards.online, settings.new_reward_model
    assert online is not None
    folder = storage.join(run, run_files.LABELS)
    batches = _batches(storage.join(folder, run_files.USED))
    last = batches[-1] if batches else {}
    count, lines = last.get('labels'), last.get('answers')
    counts = lines if are_line_counts(lines) else None
    source = Source(
        kind=_MADE_HERE.get(online.source, PEOPLE),
        path=folder,
        agreement=_agreement(folder, counts, ()) if is_folder(folder) else None,
    )
    return LabelFacts(
        sources=(source,),
        label_type='' if new_model is None else new_model.labels.type,
        count=count if isinstance(count, int) else None,
        labellers=sum(map(bool, counts.values())) if counts is not None else None,
        held_out=0.0 if new_model is None else new_model.labels.held_out,
        errors=online.error,
        reward_models=len(batches),
    )


def _labellers(record: Mapping[str, Any]) -> int | None:
    labellers = record.get('labellers')
    return len(labellers) if isinstance(labellers, dict) else None


def recorded_labels(run: str) -> dict[str, Any]:
    """Return what a run has recorded of its labels; {} where that is unknown or damaged."""
    with contextlib.suppress(UserError, OSError):
        return run_record.labels(run)
    return {}


def _agreement(
    folder: str, lines: Mapping[str, int] | None, without: tuple[str, ...]
) -> dict[str, Any] | None:
    """Measure the agreement in a local folder; None if that fails. lines: that count."""
    try:
        opened = LabelFolder(folder, dict(lines) if lines is not None else None)
        return label_report.report(opened, without)['agreement']
    except (UserError, OSError, ValueError, KeyError, TypeError):
        return None


def _batches(path: str) -> list[dict[str, Any]]:
    """Read the labels of each reward model of an online run, see online/decisions.py."""
    with contextlib.suppress(UserError, OSError):
        lines = storage.parse_json_lines(storage.read_whole_lines(path), path)
        return [value for _, value in lines if isinstance(value, dict) and 'model' in value]
    return []


def json_object(path: str) -> dict[str, Any]:
    """Read the JSON object at `path`, local or remote; an empty one where there is none."""
    with contextlib.suppress(UserError, OSError, ValueError):
        value = storage.read_json(path)
        if isinstance(value, dict):
            return value
    return {}
