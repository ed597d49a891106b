"""A reward as the judge of a simulated labeller: the known one, or any other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from lm_human_preferences.language.encodings import Encoding
from lm_human_preferences.synthetic.known_reward import KnownReward


class Reward(Protocol):
    """What scores responses."""

    def score(self, queries: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
        """Scores (batch,) of responses (batch, length) to queries (batch, length)."""
        ...


Tokens = dict[str, list[int]]  # of a question: {field: token ids}


def known_judge(encoding: Encoding) -> Callable[[Sequence[Tokens]], list[list[float]]]:
    """The known reward of film reviews, as a `Judge` of `labels.simulated_labeller`.

    UserError for another encoding.
    """
    return judge_by(KnownReward(encoding))


def judge_by(model: Reward) -> Callable[[Sequence[Tokens]], list[list[float]]]:
    """A `Judge` of `labels.simulated_labeller` who prefers what `model` does."""

    def rewards(questions: Sequence[Tokens]) -> list[list[float]]:
        """The reward of each sample of each question."""
        columns = {
            field: torch.tensor([tokens[field] for tokens in questions]) for field in questions[0]
        }
        queries = columns.pop('query')
        scores = [model.score(queries, samples).cpu() for samples in columns.values()]
        return torch.stack(scores, dim=1).tolist()

    return rewards
