"""Proximal policy optimisation as pure functions on tensors (the original's PPOTrainer.loss; paper,
section 2.2)."""

import torch

from lm_human_preferences.hparams.train_policy import PpoHParams
from lm_human_preferences.utils.core import whiten


def compute_rewards(
    scores: torch.Tensor,
    logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    kl_coef: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards per token: the KL penalty everywhere, plus the score at the last token.

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
    """Generalised advantage estimation; `values`, `rewards` and both results are (batch,
    response_length)."""
    length = rewards.shape[1]
    advantage, advantages = 0.0, []
    for t in reversed(range(length)):
        next_values = values[:, t + 1] if t < length - 1 else 0.0
        delta = rewards[:, t] + gamma * next_values - values[:, t]
        advantage = delta + gamma * lam * advantage
        advantages.append(advantage)
    advantages = torch.stack(advantages[::-1], dim=1)
    return advantages, advantages + values


def add_advantages(
    rollouts: dict[str, torch.Tensor],
    hparams: PpoHParams,
) -> dict[str, torch.Tensor]:
    """A minibatch together with what it is trained towards: 'advantages', whitened, and 'returns'.

    rollouts: 'values' and 'rewards', (batch, response_length) like the results, and more that is
    kept. Whitening is over this rank's whole minibatch. hparams: PpoHParams.
    """
    values, rewards = rollouts['values'], rollouts['rewards']
    if hparams.whiten_rewards:
        rewards = whiten(rewards, shift_mean=False)
    advantages, returns = advantages_and_returns(
        values, rewards, gamma=hparams.gamma, lam=hparams.lam
    )
    return {**rollouts, 'advantages': whiten(advantages), 'returns': returns}


def return_stats(rollouts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Moments of the 'returns' and old 'values' of a whole minibatch: {name: scalar}."""
    stats = {}
    for name, values in (('returns', rollouts['returns']), ('val', rollouts['values'])):
        stats[f'{name}/var'], stats[f'{name}/mean'] = torch.var_mean(values, correction=0)
    return stats


def loss(
    rollouts: dict[str, torch.Tensor],
    outputs: dict[str, torch.Tensor],
    hparams: PpoHParams,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The clipped loss of a minibatch, and statistics; all are means, so parts of a minibatch can
    be averaged.

    rollouts: 'logprobs' and 'values' when the responses were sampled, 'advantages', 'returns';
    outputs: 'logprobs', 'values' and 'entropies' now; each (batch, response_length). hparams:
    PpoHParams. Returns (scalar, {name: scalar}).
    """
    advantages, returns = rollouts['advantages'], rollouts['returns']
    old_values, values = rollouts['values'], outputs['values']
    values_clipped = values.clamp(
        old_values - hparams.cliprange_value, old_values + hparams.cliprange_value
    )
    value_losses, value_losses_clipped = (
        (values - returns).square(),
        (values_clipped - returns).square(),
    )
    value_loss = 0.5 * torch.maximum(value_losses, value_losses_clipped).mean()

    log_ratio = outputs['logprobs'] - rollouts['logprobs']
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
