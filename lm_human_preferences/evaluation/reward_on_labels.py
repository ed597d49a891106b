"""How well the reward model of a run predicts what labellers have answered."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Collection
from typing import Any

import torch

from lm_human_preferences import rewards, storage
from lm_human_preferences.distributed.comm import LocalComm
from lm_human_preferences.errors import OptionError, UserError, option_renamed
from lm_human_preferences.external_rewards.by_name import text_scorer
from lm_human_preferences.external_rewards.texts import TextReward
from lm_human_preferences.hparams.reward_options import HParams
from lm_human_preferences.label_types import LabelType
from lm_human_preferences.labels import label_files
from lm_human_preferences.labels.answers import Answer
from lm_human_preferences.labels.folder import GOLD, TRAIN, VALIDATION, LabelFolder
from lm_human_preferences.labels.held_out import Labels, Rewards, is_held_out, predict
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.reward_models import places
from lm_human_preferences.reward_models.ensemble import EnsembleReward
from lm_human_preferences.rewards import LearnedReward, TrainedRewardModel
from lm_human_preferences.runs import run_files, run_settings
from lm_human_preferences.training import precision

RECORD = run_files.REWARD.settings
POLICY_RECORD = run_files.POLICY.settings
LEARNED = (TrainedRewardModel, EnsembleReward)
BATCH = 64  # labels that are scored at a time


def saved_model(run: str) -> TrainedModel:
    """Where the reward model of a run, or in that directory, is, local or remote.

    Its weights are not read yet. UserError where there is none.
    """
    try:
        saved = TrainedModel(run, places.reward_model_dir(run))
        saved.encoding.get_encoder()
        return saved
    except OptionError as e:
        raise UserError(e.text) from e


def load(saved: TrainedModel) -> LearnedReward:
    """The reward model that `saved_model` has found, with all members of an ensemble.

    This process computes in float32 from now on, as fast as this machine can.
    """
    precision.configure_for(saved.hparams().n_embd, 'fp32')
    return rewards.load_learned(saved.name, saved.encoding)


def record_of(run: str) -> HParams | None:
    """The settings by which the reward model of a run was trained; None where it has no record.

    run: also the directory of the reward model, next to which the record is. The reward model may
    be in the checkpoint of a policy: then its settings are part of that run's, and if it had been
    trained elsewhere, only the task is known.
    """
    for directory in _directories(run):
        hparams = HParams()
        with contextlib.suppress(storage.NotFound):
            run_settings.read_settings(hparams, directory)
            return hparams
        if storage.exists(storage.join(directory, POLICY_RECORD)):
            of_policy = run_settings.load_run_hparams(directory)
            return of_policy.rewards.train_new_model or HParams(task=of_policy.task)
    return None


def _is_online(run: str) -> bool:
    """Whether the reward model of a run was retrained while its policy trained; see record_of."""
    for directory in _directories(run):
        if storage.exists(storage.join(directory, POLICY_RECORD)):
            return run_settings.load_run_hparams(directory).rewards.online is not None
    return False


def _directories(run: str) -> tuple[str, str]:
    """Where the records of a run may be."""
    run = run.rstrip('/')
    return run, os.path.dirname(run)


def report(folder: LabelFolder, run: str, without: Collection[str] = ()) -> dict[str, Any]:
    """How often the reward model of `run` answers like the labellers, as JSON has it.

    held_out: labels that its training held out, None if there were none; trained_on: the other
    labels that count for training, which it may have learned; comparisons: others, of two policies,
    from which only an online run learns. labellers: accuracy and number of all answers of each but
    gold ones.
    """
    model, share, parts = parts_of(folder, run, without)
    label_type = folder.label_type
    names = [name for name in folder.logs if name not in without]
    by_labeller = {name: label_files.of_answers(folder, _answers(folder, name)) for name in names}
    return {
        'run': run,
        'held_out_share': share,
        **{name: _prediction(model, part, label_type) for name, part in parts.items()},
        'labellers': {
            name: _prediction(model, part, label_type) for name, part in by_labeller.items()
        },
    }


def parts_of(
    folder: LabelFolder, run: str, without: Collection[str]
) -> tuple[rewards.FrozenRewardModel, float, dict[str, Labels]]:
    """(the reward model of `run`, the share it held out, {part: its labels}), see `report`."""
    model = _reward_for(folder, run)
    label_type = folder.label_type
    # What did not learn from labels has held none out.
    record = record_of(run) if isinstance(model, LEARNED) else None
    share = 0.0 if record is None else record.labels.held_out
    learned = label_files.of_answers(folder, folder.counted(TRAIN, without))
    compared = label_files.of_answers(folder, folder.counted(VALIDATION, without))
    held_out, trained_on = _split(learned, label_type, share)
    if record is not None and _is_online(run):
        compared_aside, compared = _split(compared, label_type, share)
        for field, values in compared_aside.items():
            held_out[field] = torch.cat([held_out[field], values])
    parts = {'held_out': held_out, 'trained_on': trained_on, 'comparisons': compared}
    return model, share, parts


def _reward_for(folder: LabelFolder, run: str) -> rewards.FrozenRewardModel:
    """The reward of `run`, or called so, for tokens of a folder; see rewards.load_reward_model."""
    encoding, chat = folder.encoding(), bool(folder.task['task'].get('chat'))
    if run == 'mock':
        return rewards.load_reward_model(run, encoding)
    with option_renamed('--reward'):
        scorer = text_scorer(run, chat=chat)
    if scorer is not None:
        return TextReward(scorer, encoding, chat=chat)
    saved = saved_model(run)
    _check(saved, folder)
    return load(saved)


def rewards_by(model: rewards.FrozenRewardModel) -> Rewards:
    """What `predict` asks: rewards (batch, n) of responses (batch, n, length)."""
    if isinstance(model, LEARNED):
        return model.get_rewards

    def get_rewards(queries: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
        count = responses.shape[1]
        scores = model.score(queries.repeat_interleave(count, 0), responses.flatten(0, 1))
        return scores.reshape(-1, count)

    return get_rewards


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


def _split(labels: Labels, label_type: LabelType, share: float) -> tuple[Labels, Labels]:
    """(those of `labels` that a training with this share held out, the others)."""
    mask = is_held_out(labels, label_type, share)
    held_out = {field: values[mask] for field, values in labels.items()}
    return held_out, {field: values[~mask] for field, values in labels.items()}


def _prediction(
    model: rewards.FrozenRewardModel, labels: Labels, label_type: LabelType
) -> dict[str, Any] | None:
    found = predict(rewards_by(model), labels, label_type, BATCH, LocalComm())
    if found is None:
        return None
    low, high = found.interval()
    return {**dataclasses.asdict(found), 'low': low, 'high': high}


def _answers(folder: LabelFolder, labeller: str) -> list[Answer]:
    log = folder.logs[labeller]
    last = [answers[-1] for answers in log.by_question.values()]
    return [
        answer
        for answer in last
        if answer.value is not None and folder.questions[answer.question].kind != GOLD
    ]
