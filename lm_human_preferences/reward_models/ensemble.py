"""Several reward models as one reward: their mean, and how far they differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import torch

from lm_human_preferences.language.encodings import Encoder


class Member(Protocol):
    """A reward model, as in rewards.py."""

    encoder: Encoder
    padding_token: int

    def get_rewards(self, queries: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
        """Rewards (batch,) of responses (batch, response_length), or (batch, n) of several."""
        ...


AnyMember = TypeVar('AnyMember', bound=Member, covariant=True)


class EnsembleReward(Generic[AnyMember]):
    """The mean of reward models that have learned from the same labels with other seeds.

    Each of `members` is normalised by itself, so that all count alike. They are asked one after
    another.
    """

    def __init__(self, members: Sequence[AnyMember]) -> None:
        self.members = tuple(members)
        self.encoder = self.members[0].encoder
        self.padding_token = self.members[0].padding_token

    def rewards_of_members(self, queries: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
        """The rewards by each member: (members, ...), see Member.get_rewards."""
        return torch.stack([member.get_rewards(queries, responses) for member in self.members])

    def get_rewards(self, queries: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
        """Their mean: (batch,) or (batch, n), see Member.get_rewards."""
        return self.rewards_of_members(queries, responses).mean(0)

    def score(self, queries: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
        """Rewards (batch,) of responses to queries.

        queries: (batch, query_length). responses: (batch, response_length).
        """
        return self.get_rewards(queries, responses)


def spread(of_members: torch.Tensor) -> torch.Tensor:
    """How far members differ: the standard deviation of `of_members (members, batch)`: (batch,).

    It is that of these members, not an estimate for others: divided by their number.
    """
    return of_members.std(0, correction=0)
