"""Reward that a head computes from the hidden states of a frozen policy."""

import os
from collections.abc import Mapping
from typing import Any

import torch

from lm_human_preferences import lm_tasks, storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.language.networks.model_kinds import is_model, is_saved_by_transformers
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.policy import Policy
from lm_human_preferences.reward_sources.frozen_head.head import (
    Head,
    blocks_of,
    n_features,
    pooled,
    task_of,
    unfitted,
)
from lm_human_preferences.runs.run_files import POLICY

PROBED = 4  # length in tokens of both the query and the response in probe_of
MOST_DIFFERENCE = 0.1  # tolerated error of recomputed features, in their standard deviations


class FrozenReward:
    """Reward that `head` computes from hidden states of `reference`; uncertainty may lower rewards.

    pessimism: subtracted for each unit by which the standard deviation exceeds `head.usual`, so
    that the mean score of the initial policy stays the same. The reference is never trained. It
    reads queries as the policy does: in the chat template, if there is one.
    """

    def __init__(self, head: Head, reference: Policy, pessimism: float = 0.0) -> None:
        self.reference = reference
        self.set_head(head)
        self.pessimism = pessimism
        self.encoder = reference.encoder
        self.padding_token = reference.padding_token
        self.blocks = blocks_of(reference.model.sizes.n_layer)

    def set_head(self, head: Head) -> None:
        """Replace the head that computes the scores."""
        self.head = head.to(self.reference.device)

    def score_and_stats(
        self, queries: torch.Tensor, responses: torch.Tensor, states: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return rewards and {'score_std': ...} (batch[, n]) of `responses (batch[, n], length)`.

        states: inputs of `blocks`, if the reference has computed them already.
        """
        features = features_of(self.reference, queries, responses, states)
        scores, spread = self.head(features)
        return scores - self.pessimism * (spread - self.head.usual), {'score_std': spread}

    def get_rewards(self, queries: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
        """Return rewards (batch[, n]) without their standard deviations."""
        return self.score_and_stats(queries, responses)[0]

    score = get_rewards


def without_labels(reference: Policy, pessimism: float = 0.0) -> FrozenReward:
    """Return a reward whose head scores 0 until set_head replaces that head."""
    nothing = torch.zeros(1, n_features(reference.model.sizes.n_embd))
    return FrozenReward(unfitted(nothing), reference, pessimism)


def features_of(
    reference: Policy,
    queries: torch.Tensor,
    responses: torch.Tensor,
    states: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return features (batch[, n], features) of `responses (batch[, n], length)` to queries."""
    rows = responses.to(reference.device).flatten(0, -2)
    real = rows != reference.padding_token
    if states is None:
        count = len(rows) // len(queries)
        blocks = blocks_of(reference.model.sizes.n_layer)
        # An empty response gets an arbitrary token, as only the state before this token is read.
        rows = rows.clone()
        rows[~real.any(1), 0] = 0
        repeated = queries.repeat_interleave(count, 0)
        states = reference.states(repeated, rows, count, blocks)
    return pooled(states, real).unflatten(0, responses.shape[:-1])


def probe_of(reference: Policy) -> torch.Tensor:
    """Return a model's features (features,) for a fixed query and response, to identify a model."""
    tokens = torch.arange(2 * PROBED).view(2, 1, PROBED) % reference.model.sizes.n_vocab
    return features_of(reference, tokens[0], tokens[1])[0].cpu()


def checked(
    directory: str,
    head: Head,
    about: Mapping[str, Any],
    reference: Policy | None = None,
    pessimism: float = 0.0,
) -> FrozenReward:
    """Return a loaded head's reward; UserError if the head was fitted to other hidden states.

    directory, about: where the head was loaded from, and the record of its model and task.
    reference: initial policy of the run to be rewarded; None: the model the head was fitted on.
    """
    if reference is None:
        reference = _reference_of(directory, about)
    here = probe_of(reference)
    difference = torch.inf
    if len(about['probe']) == len(here):
        deviations = head.scale / len(here) ** 0.5
        # Clamping limits the effect of a nearly constant feature, whose error in bf16 may be large.
        apart = ((torch.tensor(about['probe']) - here) / deviations).clamp(-1, 1)
        difference = apart.square().mean().sqrt().item()
    if not difference <= MOST_DIFFERENCE:  # this condition holds for NaN, too
        raise UserError(
            f'{directory} is a head on hidden states of {about["initial_model"]}, but'
            f' {reference.trained_model.name} has other hidden states (perhaps because of the chat'
            ' template): train a reward model for this task'
        )
    return FrozenReward(head, reference, pessimism)


def _reference_of(directory: str, about: Mapping[str, Any]) -> Policy:
    """Load the model that a head was fitted on: from the head's folder or run, or else by name."""
    run = os.path.dirname(directory.rstrip('/'))
    task = task_of(about)
    policy = storage.join(run, POLICY.network)
    if is_saved_by_transformers(directory):
        model = TrainedModel(directory)
    elif is_model(policy):
        model = TrainedModel(policy, scope='ref_policy')
    else:
        model = lm_tasks.initial_model(task.policy.initial_model)
    settings = lm_tasks.policy_settings(task, model.encoding.get_encoder())
    return Policy(model, scope='ref_policy', only_samples=True, **settings)
