"""The known reward as the judge of a simulated labeller."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lm_human_preferences.language.encodings import Encoding
from lm_human_preferences.synthetic.known_reward import KnownReward

Tokens = dict[str, list[int]]  # of a question: {field: token ids}


def known_judge(encoding: Encoding) -> Callable[[Sequence[Tokens]], list[list[float]]]:
    """The known reward of film reviews, as a `Judge` of `labels.simulated_labeller`.

    UserError for another encoding.
    """
    model = KnownReward(encoding)

    def rewards(questions: Sequence[Tokens]) -> list[list[float]]:
        """The reward of each sample of each question."""
        columns = {
            field: torch.tensor([tokens[field] for tokens in questions]) for field in questions[0]
        }
        queries = columns.pop('query')
        scores = [model.score(queries, samples).cpu() for samples in columns.values()]
        return torch.stack(scores, dim=1).tolist()

    return rewards
