"""Questions about a policy in training, made again the same if the run is interrupted."""

from __future__ import annotations

from lm_human_preferences.errors import UserError
from lm_human_preferences.labels.folder import TRAIN, VALIDATION, Question, QuestionWriter
from lm_human_preferences.online.question_sampler import (
    IDLE_BATCHES,
    Queries,
    QuestionSampler,
    Tokens,
    labellers_wanted,
)
from lm_human_preferences.plan.phases import TrainPolicy
from lm_human_preferences.policy import Policy
from lm_human_preferences.utils.core import random_stream

PART = 'train'  # of the data set: comparisons are learned from as well
INITIAL, POLICY = 'initial', 'policy'  # whose samples a question has


class QuestionSource:
    """Asks about the policy as it is. writer: of the folder of labels. seed: of the run."""

    def __init__(
        self,
        *,
        policy: Policy,
        ref_policy: Policy,
        writer: QuestionWriter,
        phase: TrainPolicy,
        seed: int,
    ) -> None:
        settings = phase.settings
        assert settings.rewards.online is not None
        self.writer, self.online, self.seed = writer, settings.rewards.online, seed
        self.batch_size = settings.ppo.batch_size
        self.sampler = QuestionSampler(
            {INITIAL: ref_policy, POLICY: policy},
            settings.task,
            writer.folder.label_type,
            settings.ppo.micro_batch_size,
        )
        self.names = {
            TRAIN: self.sampler.share([POLICY]),
            VALIDATION: self.sampler.share([INITIAL, POLICY]),
        }
        with random_stream(seed, 'queries of questions'):
            labels = phase.source.label_source()
            self.queries = Queries.for_task(settings.task, policy.encoder, PART, labels)

    def ask(self, step: int, counts: dict[str, int]) -> int:
        """Ask until `step` has `counts` {kind: number} questions; return the number added."""
        added = 0
        for kind in (VALIDATION, TRAIN):
            there = [question for question in self._own() if question.kind == kind]
            lacking = counts[kind] - len(there)
            if lacking > 0:
                self._ask(step, kind, there, lacking)
                added += lacking
        return added

    def _ask(self, step: int, kind: str, there: list[Question], lacking: int) -> None:
        """Add `lacking` questions of a kind to those that this run has asked, `there`."""
        episode = step * self.batch_size
        made_again = {question.id for question in there if question.episode == episode}
        of_this_step = len(made_again)
        before = [question for question in self._own() if question.id not in made_again]
        self.queries.seek(before[-1].texts_read if before else 0)
        with random_stream(self.seed, 'questions', kind, episode):
            new = self._new_questions(
                self.names[kind],
                self.writer.folder.questions.keys() - made_again,
                of_this_step + lacking,
            )
        headers = []
        for number, (_, texts_read) in enumerate(new, start=len(there) - of_this_step):
            labellers = 1
            if kind == TRAIN:
                labellers = labellers_wanted(number, self.online.repeated, self.online.labellers)
            headers.append(
                {
                    'kind': kind,
                    'labellers': labellers,
                    'policies': self.names[kind],
                    'part': PART,
                    'texts_read': texts_read,
                    'episode': episode,
                }
            )
        questions = [tokens for tokens, _ in new]
        self.writer.add(questions[of_this_step:], headers[of_this_step:])

    def _own(self) -> list[Question]:
        """Return this run's questions; those of `./launch.py ask` have no episode."""
        questions = self.writer.folder.questions.values()
        return [question for question in questions if question.episode is not None]

    def _new_questions(
        self, names: list[str], seen: set[str], count: int
    ) -> list[tuple[Tokens, int]]:
        """Return the next `count` questions not in `seen`, each with the texts read for it."""
        found: list[tuple[Tokens, int]] = []
        idle, at_once = 0, self.online.asked_at_once
        while idle < IDLE_BATCHES:
            # Whole batches, so that one question more leaves those before it what they are.
            queries = self.queries.take(at_once)
            new = list(self.sampler.new_questions(queries, names, seen))
            used = new[: count - len(found)]
            found += [(tokens, query.texts_read) for query, tokens in used]
            if len(found) == count:
                last, _ = used[-1]
                self.queries.put_back(queries[queries.index(last) + 1 :], last.texts_read)
                return found
            idle = 0 if new else idle + 1
        raise UserError(
            f'there is nothing left to ask: {idle * at_once} queries in a row had equal'
            ' responses only, or were asked already; lower --ppo.lr or raise --rewards.kl_coef'
        )
