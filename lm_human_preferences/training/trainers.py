"""What hooks ask of the training that they accompany; the trainers are in rooms above."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from lm_human_preferences.training.loop import Trainer

if TYPE_CHECKING:
    import torch

    from lm_human_preferences.distributed.comm import Comm
    from lm_human_preferences.hparams import policy_options, reward_options


class Episodes(Protocol):
    """Those of a step of PPO, as in `ppo.Rollout`, which says what each of them holds."""

    queries: torch.Tensor
    responses: torch.Tensor
    logprobs: torch.Tensor
    ref_logprobs: torch.Tensor
    scores: torch.Tensor
    scored_responses: torch.Tensor


class PolicyTrainer(Trainer, Protocol):
    """A policy's training, `train_policy.PPOTrainer`.

    step_seconds: that the last step took. reward_version: how often this process has retrained the
    reward model.
    """

    hparams: policy_options.HParams
    comm: Comm
    step_seconds: float
    reward_version: int

    @property
    def rollout(self) -> Episodes | None:
        """The episodes of the last step."""
        ...


class Prediction(Protocol):
    """How well a reward model predicts labels that it has not seen; see `labels.held_out`."""

    @property
    def labels(self) -> int: ...

    @property
    def accuracy(self) -> float | None: ...

    @property
    def chance(self) -> float | None: ...

    @property
    def agreement(self) -> float: ...

    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the accuracy; of the agreement where there is none."""
        ...

    def statistics(self) -> Mapping[str, float]:
        """As TensorBoard has them."""
        ...


class RewardTrainer(Trainer, Protocol):
    """A reward model's training, `reward_trainer.RewardModelTrainer`.

    agreement: of the rewards with the labels of the last batch. held_out_by_epoch: how well the
    labels held out were predicted after each epoch so far. steps_of_epoch: in which all labels are
    learned once. judged_steps: the last ones, by which its outcome is judged.
    """

    hparams: reward_options.HParams
    comm: Comm
    agreement: float | None
    held_out_by_epoch: list[float]

    @property
    def steps_of_epoch(self) -> int: ...

    @property
    def judged_steps(self) -> int: ...

    def labels_after(self, step: int) -> int:
        """How many labels have been learned after so many steps."""
        ...

    def guessing_loss(self) -> float:
        """The loss of rewards that depend on no response."""
        ...

    def predict_held_out(self) -> Prediction | None:
        """How well it predicts the labels held out; None where there are none. Collective."""
        ...
