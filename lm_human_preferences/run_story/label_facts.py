"""What is known of the labels that a reward model learned from."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.policy_options import HParams as PolicyHParams
from lm_human_preferences.hparams.reward_options import HParams
from lm_human_preferences.labels.folder import LabelFolder, are_line_counts, is_folder
from lm_human_preferences.labels.folder_labels import parse_names
from lm_human_preferences.labels.report import label_report
from lm_human_preferences.runs import run_files

PEOPLE, KNOWN_REWARD, MADE_UP, FILE, FOLDER = 'people', 'known reward', 'made up', 'file', 'folder'
_MADE_HERE = {'mock': KNOWN_REWARD, 'test': MADE_UP}


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How far labellers who answered the same question agree, see labels.report.

    pairs: of answers. same, chance: the share of them that are equal, and what guessing gives; None
    for ratings. interval: of `same`, 95 %. alpha: Krippendorff's; None where it is not defined.
    """

    pairs: int
    questions: int
    same: float | None
    chance: float | None
    alpha: float | None
    interval: tuple[float, float] | None = None


@dataclasses.dataclass(frozen=True)
class Source:
    """Where labels are from.

    kind: PEOPLE (while the policy trained), KNOWN_REWARD, MADE_UP, FILE or FOLDER. path: or URL, as
    the run was given it. agreement: of those who gave them; None where no file says.
    """

    kind: str
    path: str
    agreement: Agreement | None = None

    @property
    def has_labellers(self) -> bool:
        """Whether labellers are told apart, be they people or programs."""
        return self.kind in (PEOPLE, FOLDER)


@dataclasses.dataclass(frozen=True)
class LabelFacts:
    """The labels of a reward model. None stands for what no file says.

    sources: of all of them. label_type: of label_types. count: those held out included. labellers:
    how many people or programs answered. left_out: labellers whose answers do not count. held_out:
    the share. errors: the share of simulated answers that are random. reward_models: how many were
    trained, one after another, while the policy trained; 0: it was trained before.
    """

    sources: tuple[Source, ...]
    label_type: str
    count: int | None = None
    labellers: int | None = None
    left_out: int = 0
    held_out: float = 0.0
    errors: float = 0.0
    reward_models: int = 0


def of_training(run: str, hparams: HParams) -> LabelFacts:
    """Those of a reward model that a run trained before its policy. hparams: train_reward's."""
    labels = hparams.labels
    record = _object(storage.join(run, run_files.LEARNED))
    count = record.get('labels')
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
    """What is known of labels that were named by `path`. record: of what was learned."""
    lines = record.get('answers') if record.get('source') == path else None
    counts = lines if are_line_counts(lines) else None
    is_here = is_folder(path)
    return Source(
        kind=_MADE_HERE.get(path, FOLDER if is_here or lines is not None else FILE),
        path=path,
        agreement=_agreement(path, counts, without) if is_here else None,
    )


def of_online(run: str, hparams: PolicyHParams) -> LabelFacts:
    """Those of reward models that were retrained while the policy trained."""
    online, new_model = hparams.rewards.online, hparams.rewards.train_new_model
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
    """How many labellers gave the answers that are recorded as learned."""
    ids = record.get('ids')
    if not isinstance(ids, list):
        return None
    return len({each[1] for each in ids if isinstance(each, list) and len(each) == 3})


def _agreement(
    folder: str, lines: Mapping[str, int] | None, without: tuple[str, ...]
) -> Agreement | None:
    """That of the answers in a local folder; None where it cannot be read. lines: which count."""
    try:
        opened = LabelFolder(folder, dict(lines) if lines is not None else None)
        found = label_report.report(opened, without)['agreement']
    except (UserError, OSError, ValueError, KeyError, TypeError):
        return None
    interval = None if found['low'] is None else (found['low'], found['high'])
    return Agreement(
        found['pairs'],
        found['questions'],
        found['raw'],
        found['chance'],
        found['alpha'],
        interval,
    )


def _batches(path: str) -> list[dict[str, Any]]:
    """What each reward model of an online run learned from, see online/decisions.py."""
    with contextlib.suppress(UserError, OSError):
        lines = storage.parse_json_lines(storage.read_whole_lines(path), path)
        return [value for _, value in lines if isinstance(value, dict) and 'model' in value]
    return []


def _object(path: str) -> dict[str, Any]:
    """The JSON object at `path`, local or remote; an empty one where there is none."""
    with contextlib.suppress(UserError, OSError):
        value = storage.read_json(path)
        if isinstance(value, dict):
            return value
    return {}
