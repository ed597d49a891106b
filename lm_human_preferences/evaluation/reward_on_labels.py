"""How well the reward model of a run predicts what labellers have answered."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Sequence
from typing import Any

import torch

from lm_human_preferences import label_types, rewards, storage
from lm_human_preferences.distributed.comm import LocalComm
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.train_reward import HParams
from lm_human_preferences.label_types import LabelType
from lm_human_preferences.labels.answers import Answer, answer_field
from lm_human_preferences.labels.folder import GOLD, TRAIN, VALIDATION, LabelFolder
from lm_human_preferences.labels.held_out import Labels, is_held_out, predict
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.rewards import TrainedRewardModel

RECORD = 'train_reward_hparams.json'
BATCH = 64  # labels that are scored at a time


def saved_model(run: str) -> TrainedModel:
    """Where the reward model of a run, or in that directory, is, local or remote.

    Its weights are not read yet. UserError where there is none.
    """
    try:
        saved = TrainedModel(run, rewards.reward_model_dir(run))
        saved.encoding.get_encoder()
        return saved
    except UserError as e:
        raise UserError(str(e).replace('--rewards.trained_model ', '')) from e


def load(saved: TrainedModel) -> TrainedRewardModel:
    """The reward model that `saved_model` has found."""
    assert saved.savedir is not None
    return TrainedRewardModel(saved.savedir, saved.encoding)


def record_of(run: str) -> HParams | None:
    """The settings by which the reward model of a run was trained; None where it has no record.

    run: also the directory of the reward model, next to which the record is.
    """
    for directory in (run.rstrip('/'), os.path.dirname(run.rstrip('/'))):
        path = storage.join(directory, RECORD)
        if storage.exists(path):
            hparams = HParams()
            hparams.override_from_json_file(path)
            return hparams
    return None


def report(folder: LabelFolder, run: str, without: Collection[str] = ()) -> dict[str, Any]:
    """How often the reward model of `run` answers like the labellers, as JSON has it.

    held_out: labels that its training held out, None if there were none; trained_on: the other
    labels that count for training, which it may have learned; comparisons: of two policies, from
    which only an online run learns. labellers: accuracy and number of all answers of each but gold
    ones.
    """
    saved = saved_model(run)
    _check(saved, folder)
    model = load(saved)
    label_type = label_types.get(folder.label_type)
    record = record_of(run)
    share = 0.0 if record is None else record.labels.held_out
    learned = _labels(folder, folder.counted(TRAIN, without))
    kept_aside = is_held_out(learned, label_type, share)
    parts = {
        'held_out': {field: values[kept_aside] for field, values in learned.items()},
        'trained_on': {field: values[~kept_aside] for field, values in learned.items()},
        'comparisons': _labels(folder, folder.counted(VALIDATION, without)),
    }
    names = [name for name in folder.logs if name not in without]
    by_labeller = {name: _labels(folder, _answers(folder, name)) for name in names}
    return {
        'run': run,
        'held_out_share': share,
        **{name: _prediction(model, part, label_type) for name, part in parts.items()},
        'labellers': {
            name: _prediction(model, part, label_type) for name, part in by_labeller.items()
        },
    }


def _check(saved: TrainedModel, folder: LabelFolder) -> None:
    """UserError where a reward model cannot read the questions of a folder."""
    there, here = folder.task['encoding'], saved.encoding.name
    if there != here:
        raise UserError(
            f'--reward {saved.name}: its encoding is {here!r}, that of {folder.path} {there!r}'
        )
    tokens = sum(folder.task['task'][name] for name in ('query_length', 'response_length'))
    n_ctx = saved.hparams().n_ctx
    if tokens > n_ctx:
        raise UserError(
            f'--reward {saved.name}: it takes {n_ctx} tokens, and a query with a response of'
            f' {folder.path} has {tokens}'
        )


def _prediction(
    model: TrainedRewardModel, labels: Labels, label_type: LabelType
) -> dict[str, Any] | None:
    found = predict(model.get_rewards, labels, label_type, BATCH, LocalComm())
    return None if found is None else dataclasses.asdict(found)


def _answers(folder: LabelFolder, labeller: str) -> list[Answer]:
    log = folder.logs[labeller]
    last = [answers[-1] for answers in log.by_question.values()]
    return [
        answer
        for answer in last
        if answer.value is not None and folder.questions[answer.question].kind != GOLD
    ]


def _labels(folder: LabelFolder, answers: Sequence[Answer]) -> Labels:
    """Questions and their answers, {field: (answers, ...)}."""
    fields = ['query', *folder.samples]
    lengths = folder.task['task']
    questions = [folder.tokens(folder.questions[answer.question]) for answer in answers]
    labels = {}
    for field in fields:
        length = lengths['query_length' if field == 'query' else 'response_length']
        rows = [question[field] for question in questions]
        labels[field] = torch.tensor(rows, dtype=torch.int64).reshape(len(rows), length)
    name = answer_field(folder.label_type)
    dtype = torch.int64 if name == 'best' else torch.float32
    labels[name] = torch.tensor([answer.value for answer in answers], dtype=dtype)
    return labels
