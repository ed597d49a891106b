"""Proximal policy optimisation as pure functions of tensors (paper, section 2.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from lm_human_preferences.utils.core import TensorBatch, those_in, whiten

if TYPE_CHECKING:
    from lm_human_preferences.hparams.policy_options import PpoHParams

# A ScoreFn takes queries (batch, query_length) and responses (batch, response_length).
# A ScoreFn returns scores (batch,), truncated responses and statistics {'score': scores}.
# A reward head on hidden states adds standard deviations, 'score_std' (batch,), to the statistics.
# A ScoreFn with a reward head also takes the hidden states from Policy.analyze_responses.
ScoreFn = Callable[
    ...,
    tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]],
]
PART = 'score/'  # prefix of the statistics that are components of the score


@dataclass
class Rollout(TensorBatch):
    """Episodes of a step: each row is a query x with its response y."""

    # Token ids and `mask` may be in host memory, to compute layouts without waiting for a GPU.
    # Tensors other than token ids and `mask` are on the device of the policy.
    queries: torch.Tensor  # token ids (batch, query_length)
    responses: torch.Tensor  # token ids (batch, response_length) sampled from the policy pi
    logprobs: torch.Tensor  # log pi of each token when it was sampled (batch, response_length)
    values: torch.Tensor  # estimates of the return before each token (batch, response_length)
    ref_logprobs: torch.Tensor  # log rho of the initial policy (batch, response_length)
    scores: torch.Tensor  # the reward model's r(x, y), (batch,)
    scored_responses: torch.Tensor  # token ids (batch, response_length) after truncation
    rewards: torch.Tensor | None = None  # rewards of tokens, see compute_rewards
    score_std: torch.Tensor | None = None  # standard deviations (batch,) of a reward head's scores
    # mask: bool (batch, response_length), True up to a response's end; None if all tokens count.
    # Where `mask` is False, logprobs, values and rewards are 0.
    mask: torch.Tensor | None = None
    baselines: torch.Tensor | None = None  # leave-one-out baselines; None to use `values` instead


@dataclass
class Minibatch(TensorBatch):
    """Episodes of a Rollout, with returns, and whitened advantages: (batch, response_length)."""

    queries: torch.Tensor
    responses: torch.Tensor
    logprobs: torch.Tensor
    values: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor
    mask: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        """Return the number of response tokens, not counting padding."""
        if self.mask is None:
            return self.logprobs.numel()
        return int(np.count_nonzero(self.mask.cpu()))


def compute_rewards(
    scores: torch.Tensor,
    logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    kl_coef: float,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rewards (paper, equation 2) and KL penalties of tokens, (batch, response_length)."""
    non_score_reward = -kl_coef * (logprobs - ref_logprobs)
    rewards = non_score_reward.clone()
    if mask is None:
        rewards[:, -1] += scores
    else:
        last = (mask.sum(1) - 1).to(rewards.device, non_blocking=True)
        rewards[torch.arange(len(rewards), device=rewards.device), last] += scores
    return rewards, non_score_reward


def advantages_and_returns(
    values: torch.Tensor, rewards: torch.Tensor, *, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages (GAE) and returns, (batch, response_length), 0 after a response's end."""
    length = rewards.shape[1]
    advantage, advantages = 0.0, []
    for t in reversed(range(length)):
        next_values = values[:, t + 1] if t < length - 1 else 0.0
        delta = rewards[:, t] + gamma * next_values - values[:, t]
        advantage = delta + gamma * lam * advantage
        advantages.append(advantage)
    advantages = torch.stack(advantages[::-1], dim=1)
    return advantages, advantages + values


def leave_one_out(rewards: torch.Tensor, samples_per_query: int) -> torch.Tensor | None:
    """Return for each response the mean return (batch,) of the query's other responses, if any.

    rewards: (batch, response_length), neighbouring rows answer one query. As the mean does
    not depend on the response, it is an unbiased baseline (Kool et al. 2019, Ahmadian et al. 2024).
    """
    if samples_per_query == 1:
        return None
    returns = rewards.sum(1).view(-1, samples_per_query)
    others = returns.sum(1, keepdim=True) - returns
    return (others / (samples_per_query - 1)).flatten()


def add_advantages(rollout: Rollout, options: PpoHParams) -> Minibatch:
    """Return a Minibatch of `rollout`. Advantages are whitened over all tokens, as in the original.

    With a leave-one-out baseline, all tokens of a response have the same advantage.
    """
    rewards, values = rollout.rewards, rollout.values
    assert rewards is not None, 'see compute_rewards'
    if rollout.baselines is not None:
        returns = rewards.sum(1, keepdim=True).expand_as(rewards)
        values = rollout.baselines.unsqueeze(1).expand_as(rewards)
        advantages = returns - values
    else:
        if options.whiten_rewards:
            rewards = whiten(rewards, shift_mean=False, mask=rollout.mask)
        advantages, returns = advantages_and_returns(
            values, rewards, gamma=options.gamma, lam=options.lam
        )
    return Minibatch(
        queries=rollout.queries,
        responses=rollout.responses,
        logprobs=rollout.logprobs,
        values=values,
        advantages=whiten(advantages, mask=rollout.mask),
        returns=returns,
        mask=rollout.mask,
    )


def return_stats(minibatch: Minibatch) -> dict[str, torch.Tensor]:
    """Return {name: scalar}: mean and variance of a minibatch's returns and old values."""
    stats = {}
    for name, values in (('returns', minibatch.returns), ('val', minibatch.values)):
        values = those_in(values, minibatch.mask)
        stats[f'{name}/var'], stats[f'{name}/mean'] = torch.var_mean(values, correction=0)
    return stats


def explained_variance(error: float, variance: float) -> float:
    """Return 1 - mean squared `error` / `variance`, the explained fraction; 0 for variance 0."""
    return 0.0 if variance == 0 else 1 - error / variance


def step_stats(
    rollout: Rollout,
    kl_coef: float,
    non_score_reward: torch.Tensor,
    train_stats: Mapping[str, Sequence[torch.Tensor]],
) -> dict[str, torch.Tensor]:
    """Return a step's statistics by the original's names, and the means of `train_stats`."""
    logprobs = rollout.logprobs
    score = rollout.scores.mean()
    stats = {
        'objective/kl': (logprobs - rollout.ref_logprobs).sum(1).mean(),
        'objective/kl_coef': torch.tensor(kl_coef, device=logprobs.device),
        'objective/entropy': -logprobs.sum(1).mean(),
        'objective/score': score,
        'objective/score_total': score + non_score_reward.sum(1).mean(),
    }
    if rollout.mask is not None:
        stats['objective/response_length'] = rollout.mask.sum(1).float().mean()
    if rollout.score_std is not None:
        stats['objective/score_std'] = rollout.score_std.mean()
    for name, values in train_stats.items():
        stats[f'ppo/{name}'] = torch.stack(tuple(values)).mean()
    return {name: stat.to(logprobs.device) for name, stat in stats.items()}


def loss(
    minibatch: Minibatch, outputs: dict[str, torch.Tensor], options: PpoHParams
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return PPO's loss and {statistic: scalar}. outputs: new logprobs, values and entropies."""

    def mean(values: torch.Tensor) -> torch.Tensor:
        return those_in(values, minibatch.mask).mean()

    advantages, returns = minibatch.advantages, minibatch.returns
    # A leave-one-out baseline is not trained; its logged value loss is only the baseline's error.
    values = outputs['values'] if options.samples_per_query == 1 else minibatch.values
    values_clipped = values.clamp(
        minibatch.values - options.cliprange_value, minibatch.values + options.cliprange_value
    )
    value_losses = (values - returns).square()
    value_losses_clipped = (values_clipped - returns).square()
    value_loss = 0.5 * mean(torch.maximum(value_losses, value_losses_clipped))

    log_ratio = outputs['logprobs'] - minibatch.logprobs
    ratio = log_ratio.exp()
    policy_losses = -advantages * ratio
    policy_losses_clipped = -advantages * ratio.clamp(1 - options.cliprange, 1 + options.cliprange)
    policy_loss = mean(torch.maximum(policy_losses, policy_losses_clipped))

    total = policy_loss + options.vf_coef * value_loss
    stats = {
        'loss/policy': policy_loss,
        'loss/value': value_loss,
        'loss/total': total,
        'policy/entropy': mean(outputs['entropies']),
        'policy/approxkl': 0.5 * mean(log_ratio.square()),
        'policy/clipfrac': mean((policy_losses_clipped > policy_losses).float()),
        'val/vpred': mean(values),
        'val/error': mean(value_losses),
        'val/clipfrac': mean((value_losses_clipped > value_losses).float()),
    }
    return total, {name: stat.detach() for name, stat in stats.items()}
