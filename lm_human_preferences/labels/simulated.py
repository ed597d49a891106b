"""Simulated labellers, which answer the questions in a label folder according to any reward."""

import itertools
import random
import time
from collections.abc import Sequence

import torch

from lm_human_preferences.label_types import LabelType, Value
from lm_human_preferences.labels.labeller import Labeller
from lm_human_preferences.labels.training_data import Score, scores_of

BATCH = 256  # number of questions that are judged at a time


def simulated_answer(
    label_type: LabelType, rewards: Sequence[float], rng: random.Random, error: float = 0.0
) -> Value:
    """Return the answer that `rewards` imply, or, with probability `error`, a random answer."""
    if rng.random() < error:
        return label_type.by_chance(rewards, rng)
    return label_type.judged(rewards, rng)


def simulate(labeller: Labeller, score: Score, *, error: float = 0.0, seed: int = 0) -> int:
    """Answer all questions still open for a labeller as `score` implies; return their number.

    error: see simulated_answer. An answer depends only on seed, labeller and question, so an
    interrupted run goes on with the same answers.
    """
    label_type = labeller.folder.label_type
    given = 0
    rewards: dict[str, Sequence[float]] = {}
    for question in labeller.upcoming():
        begin = time.monotonic()
        if question.id not in rewards:
            rewards = _next_rewards(labeller, score)
        rng = random.Random(f'{seed}/{labeller.name}/{question.id}')
        value = simulated_answer(label_type, rewards[question.id], rng, error)
        labeller.answer(question, value, time.monotonic() - begin, is_simulated=True)
        given += 1
    return given


def _next_rewards(labeller: Labeller, score: Score) -> dict[str, Sequence[float]]:
    """Return {id: rewards of the samples} for the next BATCH questions of a labeller."""
    batch = list(itertools.islice(labeller.upcoming(), BATCH))
    tokens = [question.tokens() for question in batch]
    columns = {field: torch.tensor([each[field] for each in tokens]) for field in tokens[0]}
    rewards = scores_of(score, columns).tolist()
    return dict(zip((question.id for question in batch), rewards, strict=True))
