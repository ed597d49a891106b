"""Questions about a policy in training: the same ones whether or not the run was interrupted.

What is asked before a step depends on the policy as it is then, the questions of earlier steps, and
random numbers of its own. So a resumed run makes the same questions again, and leaves out those
that are in the folder already. The policy's own random numbers go on as if nothing had been asked.
"""

from __future__ import annotations

from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.online_options import ASKED_AT_ONCE
from lm_human_preferences.hparams.policy_options import HParams
from lm_human_preferences.labels.folder import TRAIN, VALIDATION, Question, QuestionWriter
from lm_human_preferences.online.collected_answers import INITIAL, POLICY
from lm_human_preferences.online.question_sampler import (
    IDLE_BATCHES,
    Queries,
    QuestionSampler,
    Tokens,
    labellers_wanted,
)
from lm_human_preferences.policy import Policy
from lm_human_preferences.utils.core import random_stream

PART = 'train'  # of the data set: comparisons are learned from as well


class QuestionSource:
    """Asks about the policy as it is.

    writer: of the folder of labels. seed: of the run. labels: see lm_tasks.make_query_sampler.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        ref_policy: Policy,
        writer: QuestionWriter,
        hparams: HParams,
        seed: int,
        labels: str | None,
    ) -> None:
        online = hparams.rewards.online
        assert online is not None
        self.writer, self.hparams, self.online, self.seed = writer, hparams, online, seed
        self.sampler = QuestionSampler(
            {INITIAL: ref_policy, POLICY: policy},
            hparams.task,
            writer.folder.label_type,
            hparams.ppo.micro_batch_size,
        )
        self.names = {
            TRAIN: self.sampler.share([POLICY]),
            VALIDATION: self.sampler.share([INITIAL, POLICY]),
        }
        with random_stream(seed, 'queries of questions'):
            self.queries = Queries.of_task(hparams.task, policy.encoder, PART, labels)

    def ask(self, step: int, counts: dict[str, int]) -> int:
        """Have so many questions of each kind in the folder; returns how many were added.

        counts: {kind: number}. Those that are missing are asked about the policy as it is before
        `step`. UserError if its responses leave nothing to choose from.
        """
        added = 0
        for kind in (VALIDATION, TRAIN):
            there = [question for question in self._own() if question.kind == kind]
            lacking = counts[kind] - len(there)
            if lacking > 0:
                self._ask(step, kind, there, lacking)
                added += lacking
        return added

    def _ask(self, step: int, kind: str, there: list[Question], lacking: int) -> None:
        """Add `lacking` questions of a kind, of which `there` are those that this run has asked."""
        episode = step * self.hparams.ppo.batch_size
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
        headers = [
            {
                'kind': kind,
                'labellers': self._labellers(kind, len(there) - of_this_step + number),
                'policies': self.names[kind],
                'part': PART,
                'texts_read': texts_read,
                'episode': episode,
            }
            for number, (_, texts_read) in enumerate(new)
        ]
        questions = [tokens for tokens, _ in new]
        self.writer.add(questions[of_this_step:], headers[of_this_step:])

    def _own(self) -> list[Question]:
        """What this run has asked; `ask` may have added others, which have no episode."""
        questions = self.writer.folder.questions.values()
        return [question for question in questions if question.episode is not None]

    def _labellers(self, kind: str, number: int) -> int:
        """How many people answer the question of a kind that has this number, from 0."""
        if kind != TRAIN:
            return 1
        return labellers_wanted(number, self.online.repeated, self.online.labellers)

    def _new_questions(
        self, names: list[str], seen: set[str], count: int
    ) -> list[tuple[Tokens, int]]:
        """The next `count` questions that are not in `seen`, each with the texts read for it."""
        found: list[tuple[Tokens, int]] = []
        idle = 0
        while idle < IDLE_BATCHES:
            # Whole batches, so that one question more leaves those before it what they are.
            queries = self.queries.take(ASKED_AT_ONCE)
            new = list(self.sampler.new_questions(queries, names, seen))
            used = new[: count - len(found)]
            found += [(tokens, query.texts_read) for query, tokens in used]
            if len(found) == count:
                last, _ = used[-1]
                self.queries.put_back(queries[queries.index(last) + 1 :], last.texts_read)
                return found
            idle = 0 if new else idle + 1
        raise UserError(
            f'there is nothing left to ask: {idle * ASKED_AT_ONCE} queries in a row had equal'
            ' responses only, or were asked already; lower --ppo.lr or raise --rewards.kl_coef'
        )
