"""Proximal policy optimisation as pure functions on tensors.

They are the original's PPOTrainer.loss, and the paper's section 2.2.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from lm_human_preferences.hparams.policy_options import PpoHParams
from lm_human_preferences.training.micro_batches import TensorBatch
from lm_human_preferences.utils.core import whiten


@dataclass
class Rollout(TensorBatch):
    """The episodes of a step: each row is a query x, its response y and what is known of both.

    queries: (batch, query_length), token ids
    responses: (batch, response_length), token ids that the policy pi sampled
    logprobs: (batch, response_length), log pi of each token when it was sampled
    values: (batch, response_length), the policy's estimate of the return before each token
    ref_logprobs: (batch, response_length), log rho, of the initial policy
    scores: (batch,), the reward model's r(x, y)
    scored_responses: (batch, response_length), what the reward model saw: truncated responses
    rewards: (batch, response_length), see compute_rewards; None until they are computed
    score_std: (batch,), how far the members of an ensemble differ; None where there is one model
    """

    queries: torch.Tensor
    responses: torch.Tensor
    logprobs: torch.Tensor
    values: torch.Tensor
    ref_logprobs: torch.Tensor
    scores: torch.Tensor
    scored_responses: torch.Tensor
    rewards: torch.Tensor | None = None
    score_std: torch.Tensor | None = None


@dataclass
class Minibatch(TensorBatch):
    """What one update learns from: some episodes of a Rollout, with advantages and returns.

    advantages, whitened, and returns are (batch, response_length); for the others see Rollout.
    """

    queries: torch.Tensor
    responses: torch.Tensor
    logprobs: torch.Tensor
    values: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor


def compute_rewards(
    scores: torch.Tensor,
    logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    kl_coef: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards per token: the KL penalty everywhere, plus the score at the last token.

    Summed over a response this is the paper's equation 2, R = r - beta log(pi / rho).
    scores (batch,); logprobs, ref_logprobs (batch, response_length).
    Returns (rewards, the penalty alone), both (batch, response_length).
    """
    non_score_reward = -kl_coef * (logprobs - ref_logprobs)
    rewards = non_score_reward.clone()
    rewards[:, -1] += scores
    return rewards, non_score_reward


def advantages_and_returns(
    values: torch.Tensor,
    rewards: torch.Tensor,
    *,
    gamma: float,
    lam: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation.

    `values`, `rewards` and both results are (batch, response_length).
    """
    length = rewards.shape[1]
    advantage, advantages = 0.0, []
    for t in reversed(range(length)):
        next_values = values[:, t + 1] if t < length - 1 else 0.0
        delta = rewards[:, t] + gamma * next_values - values[:, t]
        advantage = delta + gamma * lam * advantage
        advantages.append(advantage)
    advantages = torch.stack(advantages[::-1], dim=1)
    return advantages, advantages + values


def add_advantages(rollout: Rollout, hparams: PpoHParams) -> Minibatch:
    """The minibatch of the episodes in `rollout`, which has rewards: whitened advantages, returns.

    Rewards are whitened and advantages estimated here, for each minibatch of a rank, because the
    original does it there: doing it once for all episodes of a step would give other numbers.
    """
    rewards = rollout.rewards
    assert rewards is not None, 'see compute_rewards'
    if hparams.whiten_rewards:
        rewards = whiten(rewards, shift_mean=False)
    advantages, returns = advantages_and_returns(
        rollout.values, rewards, gamma=hparams.gamma, lam=hparams.lam
    )
    return Minibatch(
        queries=rollout.queries,
        responses=rollout.responses,
        logprobs=rollout.logprobs,
        values=rollout.values,
        advantages=whiten(advantages),
        returns=returns,
    )


def return_stats(minibatch: Minibatch) -> dict[str, torch.Tensor]:
    """Moments of the returns and of the old values of a whole minibatch: {name: scalar}."""
    stats = {}
    for name, values in (('returns', minibatch.returns), ('val', minibatch.values)):
        stats[f'{name}/var'], stats[f'{name}/mean'] = torch.var_mean(values, correction=0)
    return stats


def step_stats(
    rollout: Rollout,
    kl_coef: float,
    non_score_reward: torch.Tensor,
    train_stats: Mapping[str, Sequence[torch.Tensor]],
) -> dict[str, torch.Tensor]:
    """Statistics of a step, scalars by the original's names.

    non_score_reward: the KL penalty, (batch, response_length). train_stats: {name: [scalar of each
    update]}.
    """
    logprobs = rollout.logprobs
    score = rollout.scores.mean()
    stats = {
        'objective/kl': (logprobs - rollout.ref_logprobs).sum(1).mean(),
        'objective/kl_coef': torch.tensor(kl_coef, device=logprobs.device),
        'objective/entropy': -logprobs.sum(1).mean(),
        'objective/score': score,
        'objective/score_total': score + non_score_reward.sum(1).mean(),
    }
    if rollout.score_std is not None:
        stats['objective/score_std'] = rollout.score_std.mean()
    for name, values in train_stats.items():
        stats[f'ppo/{name}'] = torch.stack(tuple(values)).mean()
    return {name: stat.to(logprobs.device) for name, stat in stats.items()}


def loss(
    minibatch: Minibatch,
    outputs: dict[str, torch.Tensor],
    hparams: PpoHParams,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The clipped loss of a minibatch, and statistics; all are means, so parts can be averaged.

    outputs: 'logprobs', 'values' and 'entropies' of the policy as it is now, each (batch,
    response_length). Returns (scalar, {name: scalar}).
    """
    advantages, returns = minibatch.advantages, minibatch.returns
    values = outputs['values']
    values_clipped = values.clamp(
        minibatch.values - hparams.cliprange_value, minibatch.values + hparams.cliprange_value
    )
    value_losses = (values - returns).square()
    value_losses_clipped = (values_clipped - returns).square()
    value_loss = 0.5 * torch.maximum(value_losses, value_losses_clipped).mean()

    log_ratio = outputs['logprobs'] - minibatch.logprobs
    ratio = log_ratio.exp()
    policy_losses = -advantages * ratio
    policy_losses_clipped = -advantages * ratio.clamp(1 - hparams.cliprange, 1 + hparams.cliprange)
    policy_loss = torch.maximum(policy_losses, policy_losses_clipped).mean()

    total = policy_loss + hparams.vf_coef * value_loss
    stats = {
        'loss/policy': policy_loss,
        'loss/value': value_loss,
        'loss/total': total,
        'policy/entropy': outputs['entropies'].mean(),
        'policy/approxkl': 0.5 * log_ratio.square().mean(),
        'policy/clipfrac': (policy_losses_clipped > policy_losses).float().mean(),
        'val/vpred': values.mean(),
        'val/error': value_losses.mean(),
        'val/clipfrac': (value_losses_clipped > value_losses).float().mean(),
    }
    return total, {name: stat.detach() for name, stat in stats.items()}
