"""Whether a reward model is as sure of labellers' choices as it may be."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
import torch.nn.functional as F

from lm_human_preferences.evaluation import reward_on_labels
from lm_human_preferences.label_types import PickBest
from lm_human_preferences.labels.folder import LabelFolder
from lm_human_preferences.labels.held_out import rewards_of

GROUPS = 10  # of responses, from the least likely to be chosen to the most likely
LEAST = 12  # responses of a group
SCALES = torch.logspace(-2, 2, 401)  # that are tried


class Calibration(NamedTuple):
    """Predicted and observed choices, each the mean of a group of responses.

    labels: how many there are. held_out: whether they were held out of the training. scale: by
    which rewards were multiplied.
    """

    labels: int
    held_out: bool
    scale: float
    predicted: list[float]
    observed: list[float]


def calibration(folder: LabelFolder, run: str, without: Collection[str]) -> Calibration | None:
    """That of the reward model of `run` on the labels of a folder; None without choices.

    A training of a reward model ends with its rewards scaled anew, so one number, their scale, is
    fitted here. without: labellers whose answers do not count.
    """
    label_type = folder.label_type
    if not isinstance(label_type, PickBest):
        return None
    model, _, parts = reward_on_labels.parts_of(folder, run, without)
    is_held_out = len(label_type.without_ties(parts['held_out'])['best']) > 0
    labels = label_type.without_ties(parts['held_out' if is_held_out else 'trained_on'])
    best = labels['best']
    if len(best) == 0:
        return None
    get_rewards = reward_on_labels.rewards_by(model)
    rewards = rewards_of(get_rewards, labels, label_type, reward_on_labels.BATCH)
    return Calibration(len(best), is_held_out, *calibrated(rewards, best))


def calibrated(rewards: torch.Tensor, best: torch.Tensor) -> tuple[float, list[float], list[float]]:
    """(scale, predicted, observed) of rewards (labels, n) and choices `best (labels,)`.

    scale: the one that makes the choices most likely. Responses are grouped by what is predicted.
    """
    losses = [F.cross_entropy(scale * rewards, best).item() for scale in SCALES]
    scale = SCALES[losses.index(min(losses))].item()
    predicted = torch.softmax(scale * rewards, dim=1)
    chosen = F.one_hot(best, rewards.shape[1]).float().flatten()
    order = predicted.flatten().argsort()
    groups = order.tensor_split(max(1, min(GROUPS, len(order) // LEAST)))
    means = [
        (predicted.flatten()[group].mean().item(), chosen[group].mean().item()) for group in groups
    ]
    return scale, [expected for expected, _ in means], [share for _, share in means]
