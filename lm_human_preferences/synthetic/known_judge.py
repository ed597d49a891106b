"""The known reward as the judge of a simulated labeller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lm_human_preferences.language.encodings import Encoding
from lm_human_preferences.synthetic.known_reward import KnownReward

if TYPE_CHECKING:
    from lm_human_preferences.labels.simulated_labeller import Judge


def known_judge(encoding: Encoding) -> Judge:
    """The known reward of film reviews; UserError for another encoding."""
    model = KnownReward(encoding)

    def rewards(questions: Sequence[dict[str, list[int]]]) -> list[list[float]]:
        """The reward of each sample of each question, {field: token ids}."""
        columns = {
            field: torch.tensor([tokens[field] for tokens in questions]) for field in questions[0]
        }
        queries = columns.pop('query')
        scores = [model.score(queries, samples).cpu() for samples in columns.values()]
        return torch.stack(scores, dim=1).tolist()

    return rewards
