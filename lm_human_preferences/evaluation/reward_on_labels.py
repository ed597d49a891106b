"""Predictions of labellers' answers by the reward model of a run."""

import dataclasses
from collections.abc import Collection
from typing import Any

import torch

from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import about_option, option_renamed
from lm_human_preferences.labels import label_files
from lm_human_preferences.labels.folder import TRAIN, VALIDATION, LabelFolder
from lm_human_preferences.labels.held_out import Rewards, parted, predict
from lm_human_preferences.reward_sources import loading
from lm_human_preferences.runs.run_settings import reward_settings_of

BATCH = 64  # number of labels that are scored at a time


def report(folder: LabelFolder, run: str, without: Collection[str] = ()) -> dict[str, Any]:
    """Return, as JSON values, the accuracy with which the reward model of `run` predicts labels.

    'held_out': on labels that the model's training held out; 'trained_on': on all other training
    labels; 'comparisons': on labels that compare two policies, which no model learns from. Each is
    None if there are no such labels. Labels that the model may have learned get no interval.
    """
    encoding, chat = folder.encoding(), bool(folder.task['task'].get('chat'))
    with option_renamed('--reward'):
        model = loading.load_reward_model(run, encoding, chat=chat, may_be_code=True)
    is_learned = isinstance(model, loading.LearnedReward)
    fraction = 0.0
    if is_learned and (record := reward_settings_of(run)) is not None:
        fraction = record.labels.held_out
    learned = label_files.tensors_of(folder, folder.counted(TRAIN, without))
    held_out, others = parted(learned, folder.label_type, fraction, encoding.get_encoder())
    splits = {
        'held_out': held_out,
        'trained_on': others,
        'comparisons': label_files.tensors_of(folder, folder.counted(VALIDATION, without)),
    }
    found: dict[str, Any] = {'run': run, 'held_out_share': fraction}
    for name, labels in splits.items():
        with about_option(f'--reward {run}:'):
            prediction = predict(rewards_by(model), labels, folder.label_type, BATCH, Comm())
        if prediction is None:
            found[name] = None
            continue
        may_know = name == 'trained_on' and is_learned
        prediction = dataclasses.replace(prediction, is_learned=may_know)
        low, high = prediction.interval() or (None, None)
        more = {'low': low, 'high': high, 'in_words': str(prediction)}
        found[name] = dataclasses.asdict(prediction) | more
    return found


def rewards_by(model: loading.FrozenRewardModel) -> Rewards:
    """Return a function that computes rewards (batch, n) of n responses to each query."""
    if isinstance(model, loading.LearnedReward):
        return model.get_rewards

    def get_rewards(queries: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
        count = responses.shape[1]
        scores = model.score(queries.repeat_interleave(count, 0), responses.flatten(0, 1))
        return scores.reshape(-1, count)

    return get_rewards
