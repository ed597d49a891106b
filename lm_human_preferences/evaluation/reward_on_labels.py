"""Predictions of labellers' answers by the reward model of a run."""

import dataclasses
import os
from collections.abc import Collection
from typing import Any

import torch

from lm_human_preferences import storage
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import OptionError, UserError, option_renamed
from lm_human_preferences.external_rewards.by_name import text_scorer
from lm_human_preferences.external_rewards.classifier import Classifier
from lm_human_preferences.external_rewards.texts import TextReward
from lm_human_preferences.label_types import LabelType
from lm_human_preferences.labels import label_files
from lm_human_preferences.labels.answers import Answer
from lm_human_preferences.labels.folder import GOLD, TRAIN, VALIDATION, LabelFolder
from lm_human_preferences.labels.held_out import Labels, Rewards, parted, predict
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.reward_models import locations
from lm_human_preferences.reward_sources import loading
from lm_human_preferences.reward_sources.loading import LearnedReward
from lm_human_preferences.runs import run_files
from lm_human_preferences.runs.run_settings import reward_settings_of
from lm_human_preferences.training import precision

BATCH = 64  # labels that are scored at a time


def saved_model(run: str) -> TrainedModel:
    """Return the reward model of a run, its weights not read yet; UserError if there is none."""
    try:
        saved = TrainedModel(run, locations.reward_model_dir(run))
        saved.encoding.get_encoder()
        return saved
    except OptionError as e:
        raise UserError(e.text) from e


def load(saved: TrainedModel) -> LearnedReward:
    """Load a reward model, or all of an ensemble, and have this process compute in float32."""
    precision.configure_for(saved.sizes().n_embd, 'fp32')
    return loading.load_learned(saved.name, saved.encoding)


def _directories(run: str) -> tuple[str, str]:
    run = run.rstrip('/')
    return run, os.path.dirname(run)


def report(folder: LabelFolder, run: str, without: Collection[str] = ()) -> dict[str, Any]:
    """Return the accuracy of the reward model of `run` on labels, for JSON.

    'held_out': on labels that its training held out, None without any; 'trained_on': on others;
    'comparisons': on those of two policies, from which nothing learns; 'labellers': on the answers
    of each but gold ones, where there are any only on those held out. What the model may have
    'learned' tests nothing, and has no interval.
    """
    model, share, parts = parts_of(folder, run, without)
    label_type = folder.label_type
    learns = isinstance(model, LearnedReward) or _is_exported(model)
    found, labellers = {}, {}
    for name, part in parts.items():
        found[name] = _prediction(model, part, label_type, learned=learns and name == 'trained_on')
    learns = learns and found['held_out'] is None
    for name in folder.logs:
        if name in without:
            continue
        labels = label_files.tensors_of(folder, _answers(folder, name))
        if found['held_out'] is not None:
            labels, _ = _parted(folder, labels, share)
        labellers[name] = _prediction(model, labels, label_type, learned=learns)
    return {
        'run': run,
        'held_out_share': share,
        'is_of_folder': _has_learned_from(folder, run),
        **found,
        'labellers': labellers,
    }


def _is_exported(model: loading.FrozenRewardModel) -> bool:
    """Return whether a classifier was a reward model of this program; its labels are not known."""
    scorer = model.scorer if isinstance(model, TextReward) else None
    return isinstance(scorer, Classifier) and scorer.is_exported


def _has_learned_from(folder: LabelFolder, run: str) -> bool:
    """Return whether the reward model of a run is known to have learned from this folder."""
    record = reward_settings_of(run)
    sources = [storage.join(directory, run_files.LABELS) for directory in _directories(run)]
    if record is not None and record.labels.source is not None:
        sources.append(record.labels.source)
    return os.path.realpath(folder.path) in map(os.path.realpath, sources)


def _share_held_out(model: loading.FrozenRewardModel, run: str) -> float:
    """Return the share of the queries whose labels a model did not learn from; others: all."""
    record = reward_settings_of(run) if isinstance(model, LearnedReward) else None
    return 0.0 if record is None else record.labels.held_out


def _parted(folder: LabelFolder, labels: Labels, share: float) -> tuple[Labels, Labels]:
    return parted(labels, folder.label_type, share, folder.encoding().get_encoder())


def parts_of(
    folder: LabelFolder, run: str, without: Collection[str]
) -> tuple[loading.FrozenRewardModel, float, dict[str, Labels]]:
    """Return (the reward model of `run`, the share it held out, {part: its labels})."""
    model = _reward_for(folder, run)
    share = _share_held_out(model, run)
    learned = label_files.tensors_of(folder, folder.counted(TRAIN, without))
    compared = label_files.tensors_of(folder, folder.counted(VALIDATION, without))
    held_out, trained_on = _parted(folder, learned, share)
    parts = {'held_out': held_out, 'trained_on': trained_on, 'comparisons': compared}
    return model, share, parts


def _reward_for(folder: LabelFolder, run: str) -> loading.FrozenRewardModel:
    """Return the reward of `run` for tokens of a folder; see loading.load_reward_model."""
    encoding, chat = folder.encoding(), bool(folder.task['task'].get('chat'))
    if run == 'mock':
        return loading.load_reward_model(run, encoding)
    with option_renamed('--reward'):
        scorer = text_scorer(run, chat=chat, may_be_code=True)
    if scorer is not None:
        return TextReward(scorer, encoding, chat=chat)
    saved = saved_model(run)
    _check(saved, folder)
    return load(saved)


def rewards_by(model: loading.FrozenRewardModel) -> Rewards:
    """Return the function of `predict`: rewards (batch, n) of responses (batch, n, length)."""
    if isinstance(model, LearnedReward):
        return model.get_rewards

    def get_rewards(queries: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
        count = responses.shape[1]
        scores = model.score(queries.repeat_interleave(count, 0), responses.flatten(0, 1))
        return scores.reshape(-1, count)

    return get_rewards


def _check(saved: TrainedModel, folder: LabelFolder) -> None:
    """Raise UserError where a reward model cannot read the questions of a folder."""
    there, here = folder.task['encoding'], saved.encoding.name
    if there != here:
        raise UserError(
            f'--reward {saved.name}: its encoding is {here!r}, that of {folder.path} {there!r}'
        )
    tokens = sum(folder.task['task'][name] for name in ('query_length', 'response_length'))
    n_ctx = saved.sizes().n_ctx
    if tokens > n_ctx:
        raise UserError(
            f'--reward {saved.name}: it takes {n_ctx} tokens, and a query with a response of'
            f' {folder.path} has {tokens}'
        )


def _prediction(
    model: loading.FrozenRewardModel, labels: Labels, label_type: LabelType, *, learned: bool
) -> dict[str, Any] | None:
    found = predict(rewards_by(model), labels, label_type, BATCH, Comm())
    if found is None:
        return None
    low, high = (None, None) if learned else found.interval()
    return {**dataclasses.asdict(found), 'learned': learned, 'low': low, 'high': high}


def _answers(folder: LabelFolder, labeller: str) -> list[Answer]:
    log = folder.logs[labeller]
    last = [answers[-1] for answers in log.by_question.values()]
    return [
        answer
        for answer in last
        if answer.value is not None and folder.questions[answer.question].kind != GOLD
    ]
