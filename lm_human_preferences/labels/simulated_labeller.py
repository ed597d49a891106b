"""A labeller who answers by a reward, so that everything can be tried without people."""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Callable, Sequence

from lm_human_preferences.errors import UserError
from lm_human_preferences.label_types import TIE, LabelType, Value
from lm_human_preferences.labels.folder import Question
from lm_human_preferences.labels.labeller import Labeller

BATCH = 256  # questions that are judged at a time

# Of questions' tokens, {field: token ids} each: the reward of each sample of each question.
Judge = Callable[[Sequence[dict[str, list[int]]]], Sequence[Sequence[float]]]


def small_tokens(questions: Sequence[dict[str, list[int]]]) -> list[list[float]]:
    """A judge who prefers small token ids, as --labels.source test does, and needs no model."""
    return [
        [-sum(ids) / len(ids) for field, ids in tokens.items() if field != 'query']
        for tokens in questions
    ]


def simulated_answer(
    label_type: LabelType,
    rewards: Sequence[float],
    order: Sequence[int],
    rng: random.Random,
    error: float = 0.0,
    position_bias: float = 0.0,
    indifference: float = 0.0,
) -> Value:
    """The answer by the rewards of the samples, as a rule.

    With probability `error` it is a random one; else, with probability `position_bias`, the one
    that prefers what was shown first. Else it is a tie where the best two rewards differ by less
    than `indifference`. order: the samples as they were shown.
    """
    if rng.random() < error:
        return label_type.by_chance(rewards, rng)
    if rng.random() < position_bias:
        return label_type.by_position(rewards, order)
    if indifference and _lead(rewards) < indifference:
        return TIE
    return label_type.by_rewards(rewards)


def _lead(rewards: Sequence[float]) -> float:
    """How far the best reward is above the second."""
    best, second = heapq.nlargest(2, rewards)
    return best - second


def simulate(
    labeller: Labeller,
    judge: Judge,
    *,
    error: float = 0.0,
    position_bias: float = 0.0,
    indifference: float = 0.0,
    answers: int | None = None,
    seed: int = 0,
) -> int:
    """Answer what is open for a labeller, as a person would through the same folder.

    judge: see Judge. error, position_bias, indifference: see simulated_answer. answers: how many
    after which the labeller leaves (None: stays until nothing is left). What is answered depends on
    seed, labeller and question only, so that an interruption changes nothing. Returns the number of
    answers. UserError for `indifference` in a folder without ties.
    """
    if indifference and not labeller.folder.label_type.ties:
        raise UserError(
            f'--simulate.indifference {indifference}: {labeller.folder.path} has no ties; begin a'
            ' folder with --ties on'
        )
    given = 0
    rewards: dict[str, Sequence[float]] = {}
    while answers is None or given < answers:
        begin = time.monotonic()
        question = labeller.next_question()
        if question is None:
            break
        if question.id not in rewards:
            rewards = _judged(labeller, question, judge)
        rng = random.Random(f'{seed}/{labeller.name}/{question.id}')
        value = simulated_answer(
            labeller.folder.label_type,
            rewards[question.id],
            labeller.order(question),
            rng,
            error,
            position_bias,
            indifference,
        )
        labeller.answer(question, value, time.monotonic() - begin)
        given += 1
    return given


def _judged(labeller: Labeller, first: Question, judge: Judge) -> dict[str, Sequence[float]]:
    """The rewards of a question and of others that are open for the labeller, up to BATCH."""
    batch = [first]
    for question in labeller.upcoming():
        if len(batch) == BATCH:
            break
        if question.id != first.id:
            batch.append(question)
    judged = judge([labeller.folder.tokens(question) for question in batch])
    return {question.id: rewards for question, rewards in zip(batch, judged, strict=True)}
