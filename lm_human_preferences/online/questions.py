"""Questions made by sampling policies, for `./launch.py ask` and for online training."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from lm_human_preferences import errors, lm_tasks
from lm_human_preferences.errors import UserError
from lm_human_preferences.label_types import LabelType
from lm_human_preferences.labels.answers import question_id
from lm_human_preferences.labels.folder import TRAIN, QuestionWriter
from lm_human_preferences.language.encodings import Encoder
from lm_human_preferences.plan.phases import TrainPolicy
from lm_human_preferences.policy import Policy
from lm_human_preferences.utils.core import map_micro_batches, random_stream

IDLE_BATCHES = 20  # asking stops after this number of successive batches without a new question
PART = 'train'  # split of the data set that queries come from
POLICY = 'policy'  # name of the policy in training, as questions record it

Tokens = dict[str, list[int]]  # {field: token ids} of a query and its samples


class Query(NamedTuple):
    """Tokens of a query (query_length,), and number of texts read so far, including the query's."""

    tokens: torch.Tensor
    texts_read: int


class Queries:
    """Queries of a task in a fixed order; reading can begin at any position.

    part, labels: see lm_tasks.make_query_sampler.
    """

    def __init__(
        self, task: lm_tasks.TaskHParams, encoder: Encoder, part: str, labels: str | None
    ) -> None:
        self._sampler = lm_tasks.make_query_sampler(
            task, encoder=encoder, batch_size=1, mode=part, labels=labels
        )

    def seek(self, texts_read: int) -> None:
        """Go to the first query after text number `texts_read` of the data set."""
        # Seeking is slow, as it reads the data set again from its beginning.
        if self._sampler.position[0] != texts_read:
            self._sampler.seek((texts_read, 0))

    def take(self, count: int) -> list[Query]:
        """Return the next `count` queries."""
        found = []
        for _ in range(count):
            tokens = self._sampler()['tokens'][0]
            found.append(Query(tokens, self._sampler.position[0]))
        return found


class QuestionSampler:
    """Sampler of questions with equally many samples from each policy of {name: policy}.

    names: name of the policy of each sample. equal, known: numbers of questions left out because
    all their samples are equal, or because they are asked already.
    """

    def __init__(
        self,
        policies: Mapping[str, Policy],
        task: lm_tasks.TaskHParams,
        label_type: LabelType,
        micro_batch_size: int | None,
    ) -> None:
        self.policies = policies
        self.task = task
        self.fields = label_type.samples
        times = len(self.fields) // len(policies)
        self.names = [name for name in policies for _ in range(times)]
        self.micro_batch_size = micro_batch_size
        encoder = next(iter(policies.values())).encoder
        self.postprocess = lm_tasks.postprocess_fn_from_hparams(
            task, encoder.padding_token, encoder
        )
        self.equal = self.known = 0

    def new_questions(
        self, queries: Sequence[Query], seen: set[str]
    ) -> Iterator[tuple[Query, Tokens]]:
        """Yield (query, tokens) of new questions with unequal samples; add their ids to `seen`."""
        for query, tokens in zip(queries, self._samples(queries), strict=True):
            id = question_id(tokens)
            if are_equal([tokens[field] for field in self.fields]):
                self.equal += 1
            elif id in seen:
                self.known += 1
            else:
                seen.add(id)
                yield query, tokens

    def _samples(self, queries: Sequence[Query]) -> Iterator[Tokens]:
        """Yield {field: tokens} of each query and its responses, as a reward model sees them."""
        rows = torch.stack([query.tokens for query in queries])
        times = len(self.fields) // len(self.policies)
        columns: list[torch.Tensor] = []  # samples of each field, (queries, response_length)
        for policy in self.policies.values():
            responses = map_micro_batches(
                lambda part, policy=policy: self._respond(policy, part),
                self.micro_batch_size,
                rows.repeat_interleave(times, 0),
            )
            columns += responses.reshape(len(rows), times, -1).unbind(1)
        for row, query in enumerate(queries):
            samples = [column[row].tolist() for column in columns]
            fields = dict(zip(self.fields, samples, strict=True))
            yield {'query': query.tokens.tolist(), **fields}

    def _respond(self, policy: Policy, queries: torch.Tensor) -> torch.Tensor:
        responses = policy.respond(queries, self.task.response_length)['responses']
        return self.postprocess(responses).cpu()


def are_equal(samples: Sequence[list[int]]) -> bool:
    """Return whether all samples are the same, so that there is nothing to choose."""
    return len(samples) > 1 and all(sample == samples[0] for sample in samples)


class QuestionSource:
    """Source of questions about a policy in training; a resumed run asks the same questions again.

    writer: writer into the run's label folder. seed: seed of the run.
    """

    def __init__(
        self, *, policy: Policy, writer: QuestionWriter, phase: TrainPolicy, seed: int
    ) -> None:
        settings = phase.settings
        assert settings.rewards.online is not None
        self.writer, self.seed = writer, seed
        self.at_once = settings.rewards.online.asked_at_once
        self.batch_size = settings.ppo.batch_size
        self.sampler = QuestionSampler(
            {POLICY: policy},
            settings.task,
            writer.folder.label_type,
            settings.ppo.micro_batch_size,
        )
        with random_stream(seed, 'queries of questions'):
            labels = phase.source.label_source()
            self.queries = Queries(settings.task, policy.encoder, PART, labels)

    def ask(self, step: int, count: int) -> bool:
        """Add questions before `step` until the run has `count`; return whether any were added."""
        questions = self.writer.folder.questions
        # Questions by `./launch.py ask` have no episode.
        there = [question for question in questions.values() if question.episode is not None]
        lacking = count - len(there)
        if lacking <= 0:
            return False
        episode = step * self.batch_size
        made_again = {question.id for question in there if question.episode == episode}
        before = [question for question in there if question.id not in made_again]
        self.queries.seek(before[-1].texts_read if before else 0)
        with random_stream(self.seed, 'questions', episode):
            new = self._new_questions(questions.keys() - made_again, len(made_again) + lacking)
        header = {
            'kind': TRAIN,
            'labellers': 1,
            'policies': self.sampler.names,
            'part': PART,
            'episode': episode,
        }
        added = new[len(made_again) :]
        headers = [{**header, 'texts_read': query.texts_read} for query, _ in added]
        self.writer.add([tokens for _, tokens in added], headers)
        return True

    def _new_questions(self, seen: set[str], count: int) -> list[tuple[Query, Tokens]]:
        """Return the next `count` questions not in `seen`."""
        found: list[tuple[Query, Tokens]] = []
        idle = 0
        while idle < IDLE_BATCHES:
            # Sample whole batches, so that a larger `count` does not change the first questions.
            new = list(self.sampler.new_questions(self.queries.take(self.at_once), seen))
            found += new
            if len(found) >= count:
                return found[:count]
            idle = 0 if new else idle + 1
        raise UserError(
            f'there is nothing left to ask: the last {idle * self.at_once} queries gave only equal'
            ' responses or questions asked before; for more varied responses, lower --ppo.lr or'
            ' raise --rewards.kl_coef'
        )


def label_command(folder: str) -> str:
    """Return the command with which people answer the questions in `folder`."""
    return errors.typed('./launch.py label', os.path.abspath(folder), '--labeller', 'NAME')
