"""Best-of-n sampling: of n responses to a query, keep the one with the highest score."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from lm_human_preferences.frozen_head.reward import FrozenReward
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.lm_tasks import TaskHParams, filter_fn_from_hparams
from lm_human_preferences.policy import Policy
from lm_human_preferences.rewards import ScoringModel, make_score_fn
from lm_human_preferences.utils.core import TokenIds, token_ids

OF_CHOICE = ('rank', 'mean_score', 'choice_kl')  # Choice's fields after `best`, as named in samples


class Choice(NamedTuple):
    """Best of n responses to each query: tensors (queries,)."""

    best: torch.Tensor  # index of the best response, the first if several are equally good
    rank: torch.Tensor  # rank of `best`: 1, or with ties the mean of the tied ranks, such as 1.5
    mean_score: torch.Tensor  # mean score of the n responses
    kl: torch.Tensor  # KL divergence of best-of-n sampling, see `choose`


def choose(scores: torch.Tensor, is_valid: torch.Tensor | None = None) -> Choice:
    """Choose the response with the highest of `scores (queries, n)`; NaN is worse than any number.

    is_valid: bool (queries, n), False for a response without the end that the task wants. These
    come last, since their score, a penalty, may be above that of a response with an end.

    Best-of-n sampling has the KL divergence E log((F^n - G^n) / (F - G)) from the sampled model,
    where F is the probability that a response scores at most as high as the best one, and G that
    it scores less. Here F is 1, and G is the fraction of the n responses that score less. KL is
    bounded by log n - (n - 1) / n, its value without ties; it is 0 if all are equally good.
    """
    n = scores.shape[1]
    comparable = scores.double().nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    if is_valid is not None:
        comparable = comparable.masked_fill(~is_valid, -math.inf)
    highest, best = comparable.max(1)
    equal = (comparable == highest.unsqueeze(1)).sum(1)
    fraction = equal.double() / n
    kl = torch.log((1 - (1 - fraction) ** n) / fraction)
    return Choice(
        best=best,
        rank=(equal + 1) / 2,
        mean_score=scores.double().mean(1),
        kl=kl.clamp(max=math.log(n) - (n - 1) / n),
    )


class BestOfN(Policy):
    """Policy that samples `n` responses, scores them as in training, and returns the best."""

    def __init__(
        self, model: TrainedModel, reward: ScoringModel, task: TaskHParams, n: int, **settings: Any
    ) -> None:
        """Build the policy. settings: keyword arguments of Policy."""
        super().__init__(model, **settings)
        self.reward, self.n = reward, n
        self.score_fn = make_score_fn(task, reward)
        self.is_valid = filter_fn_from_hparams(task, self.encoder)

    def respond(
        self, queries: TokenIds, length: int, samples_per_query: int = 1
    ) -> dict[str, torch.Tensor]:
        """Return the fields of Policy.respond, 'score', OF_CHOICE and, from a head, 'score_std'.

        The n responses to each of `queries (batch, query_length)` are sampled in one batch.
        """
        rows = token_ids(queries).repeat_interleave(self.n, 0)
        drawn = super().respond(rows, length, self.n * samples_per_query)
        rows, responses = rows.to(self.device), drawn['responses']
        given = {}
        if isinstance(self.reward, FrozenReward):  # a head, which then reads each query once
            blocks = self.reward.blocks
            given['states'] = self.reward.reference.states(rows, responses, self.n, blocks)
        drawn |= self.score_fn(rows, responses, **given)[2]
        of_queries = (-1, self.n)
        choice = choose(
            drawn['score'].unflatten(0, of_queries).cpu(),
            self.is_valid(responses).unflatten(0, of_queries).cpu(),
        )
        chosen = choice.best + torch.arange(0, len(rows), self.n)
        best = {name: values[chosen] for name, values in drawn.items()}
        return best | dict(zip(OF_CHOICE, choice[1:], strict=True))
