"""Questions about a policy in training: the same ones whether or not the run was interrupted.

What is asked before a step depends on the policy as it is then, the questions of earlier steps, and
random numbers of its own. So a resumed run makes the same questions again, and leaves out those
that are in the folder already. The policy's own random numbers go on as if nothing had been asked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from lm_human_preferences import lm_tasks
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.online import ASKED_AT_ONCE
from lm_human_preferences.hparams.train_policy import HParams
from lm_human_preferences.labels.answers import question_id, sample_names
from lm_human_preferences.labels.folder import TRAIN, VALIDATION, Question, QuestionWriter
from lm_human_preferences.language.encodings import Encoder
from lm_human_preferences.online.answers import INITIAL, POLICY
from lm_human_preferences.policy import Policy
from lm_human_preferences.training.micro_batches import map_micro_batches
from lm_human_preferences.utils.core import random_stream

PART = 'train'  # of the data set: comparisons are learned from as well
IDLE_BATCHES = 20  # without a new question, after which there is none to be expected

Tokens = dict[str, list[int]]  # {field: token ids} of a query and its samples


@dataclasses.dataclass(frozen=True)
class Query:
    """A query (query_length,), and how many texts of the data set had been read for it."""

    tokens: torch.Tensor
    texts_read: int


class Queries:
    """The queries of a task in their order, beginning at any of them."""

    def __init__(self, sampler: lm_tasks.QuerySampler) -> None:
        """sampler: with batches of one."""
        self._sampler = sampler
        self._unused: list[Query] = []
        self._texts_read = 0

    def seek(self, texts_read: int) -> None:
        """Go on after the query for which so many texts had been read."""
        if texts_read != self._texts_read:
            self._sampler.seek((texts_read, 0))
            self._unused = []
            self._texts_read = texts_read

    def take(self, count: int) -> list[Query]:
        """The next `count` queries."""
        while len(self._unused) < count:
            tokens = self._sampler()['tokens'][0]
            self._unused.append(Query(tokens, self._sampler.position[0]))
        taken, self._unused = self._unused[:count], self._unused[count:]
        self._texts_read = taken[-1].texts_read
        return taken

    def put_back(self, queries: list[Query], texts_read: int) -> None:
        """Have `queries`, which were taken last, come next; texts_read: of the one before them."""
        self._unused = queries + self._unused
        self._texts_read = texts_read


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
        new_model, online = hparams.rewards.train_new_model, hparams.rewards.online
        assert new_model is not None and online is not None
        self.policies = {INITIAL: ref_policy, POLICY: policy}
        self.writer, self.hparams, self.online, self.seed = writer, hparams, online, seed
        self.fields = sample_names(new_model.labels.type)
        half = len(self.fields) // 2
        self.names = {
            TRAIN: [POLICY] * len(self.fields),
            VALIDATION: [INITIAL] * half + [POLICY] * half,
        }
        encoder: Encoder = policy.encoder
        self.postprocess = lm_tasks.postprocess_fn_from_hparams(hparams.task, encoder.padding_token)
        with random_stream(seed, 'queries of questions'):
            sampler = lm_tasks.make_query_sampler(
                hparams=hparams.task, encoder=encoder, batch_size=1, mode=PART, labels=labels
            )
        self.queries = Queries(sampler)

    def ask(self, step: int, counts: dict[str, int]) -> int:
        """Have so many questions of each kind in the folder; returns how many were added.

        counts: {kind: number}. Those that are missing are asked about the policy as it is before
        `step`. UserError if its responses leave nothing to choose from.
        """
        added = 0
        for kind in (VALIDATION, TRAIN):
            there = [q for q in self.writer.folder.questions.values() if q.kind == kind]
            lacking = counts[kind] - len(there)
            if lacking > 0:
                self._ask(step, kind, there, lacking)
                added += lacking
        return added

    def _ask(self, step: int, kind: str, there: list[Question], lacking: int) -> None:
        """Add `lacking` questions of a kind, of which `there` are those in the folder."""
        episode = step * self.hparams.ppo.batch_size
        earlier = [q for q in there if q.episode is not None and q.episode < episode]
        of_this_step = len(there) - len(earlier)
        before = [
            question
            for question in self.writer.folder.questions.values()
            if question.kind != kind or question.episode != episode
        ]
        self.queries.seek(before[-1].texts_read if before else 0)
        with random_stream(self.seed, 'questions', kind, episode):
            new = self._new_questions(
                self.names[kind], {question.id for question in before}, of_this_step + lacking
            )
        headers = [
            {
                'kind': kind,
                'labellers': self._labellers(kind, len(earlier) + number),
                'policies': self.names[kind],
                'part': PART,
                'texts_read': texts_read,
                'episode': episode,
            }
            for number, (_, texts_read) in enumerate(new)
        ]
        questions = [tokens for tokens, _ in new]
        self.writer.add(questions[of_this_step:], headers[of_this_step:])

    def _labellers(self, kind: str, number: int) -> int:
        """How many people answer the question of a kind that has this number, from 0."""
        share = self.online.repeated
        # One more of them whenever the share of all so far has come to a whole number.
        is_repeated = kind == TRAIN and int((number + 1) * share) > int(number * share)
        return self.online.labellers if is_repeated else 1

    def _new_questions(
        self, names: list[str], seen: set[str], count: int
    ) -> list[tuple[Tokens, int]]:
        """The next `count` questions that are not in `seen`, each with the texts read for it."""
        found: list[tuple[Tokens, int]] = []
        idle = 0
        while True:
            # Whole batches, so that one question more leaves those before it what they are.
            queries = self.queries.take(ASKED_AT_ONCE)
            before = len(found)
            for number, tokens in enumerate(self._samples(queries, names)):
                if not self._is_new(tokens, seen):
                    continue
                found.append((tokens, queries[number].texts_read))
                if len(found) == count:
                    self.queries.put_back(queries[number + 1 :], queries[number].texts_read)
                    return found
            idle = idle + 1 if len(found) == before else 0
            if idle == IDLE_BATCHES:
                raise UserError(
                    f'there is nothing left to ask: {idle * ASKED_AT_ONCE} queries in a row had'
                    ' equal responses only, or were asked already; lower --ppo.lr or raise'
                    ' --rewards.kl_coef'
                )

    def _is_new(self, tokens: Tokens, seen: set[str]) -> bool:
        """Whether a question is worth asking; it is then in `seen`."""
        samples = [tokens[field] for field in self.fields]
        id = question_id(tokens)
        are_equal = len(samples) > 1 and all(sample == samples[0] for sample in samples)
        if are_equal or id in seen:
            return False
        seen.add(id)
        return True

    def _samples(self, queries: list[Query], names: list[str]) -> Iterator[Tokens]:
        """Yield each query with a response of each of the named policies, as a reward model will
        see them."""
        rows = torch.stack([query.tokens for query in queries])
        size = self.hparams.ppo.micro_batch_size
        columns: list[Any] = []
        for name in dict.fromkeys(names):
            times = names.count(name)
            responses = map_micro_batches(
                lambda part, policy=self.policies[name]: self._respond(policy, part),
                size,
                rows.repeat_interleave(times, 0),
            )
            columns += responses.reshape(len(rows), times, -1).unbind(1)
        for row, query in enumerate(queries):
            samples = [column[row].tolist() for column in columns]
            yield {
                'query': query.tokens.tolist(),
                **dict(zip(self.fields, samples, strict=True)),
            }

    def _respond(self, policy: Policy, queries: torch.Tensor) -> torch.Tensor:
        responses = policy.respond(queries, self.hparams.task.response_length)['responses']
        return self.postprocess(responses).cpu()
