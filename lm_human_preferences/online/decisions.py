"""What an online run has decided from the answers that were there at the time.

People answer when they please, so a resumed run would find other answers than it found before. It
looks here first: each decision is on the disk before anything follows from it, and never changes.
used.jsonl has one JSON object a line, of three kinds:

    {"asked_again": 2, "step": 12}
    {"model": 5, "step": 130, "wanted": 512, "labels": 530, "answers": {"anna": 3}, "digest": ""}
    {"trained": 5, "step": 130, "loss": 1.2}

The first says how many questions were asked in place of those that labellers have skipped. The
second says what a reward model learns from: how many of the first lines of each file of answers.
The third says how well it did, with more statistics than shown here.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from lm_human_preferences.checkpointing.checkpoints import COUNT, matches_schema
from lm_human_preferences.errors import UserError
from lm_human_preferences.labels import json_lines
from lm_human_preferences.labels.folder import are_line_counts
from lm_human_preferences.runs.run_files import USED

MODEL = {'model': COUNT, 'step': COUNT, 'wanted': COUNT, 'labels': COUNT, 'digest': str}
ASKED_AGAIN = {'asked_again': COUNT, 'step': COUNT}
TRAINED = {'trained': COUNT, 'step': COUNT}


@dataclasses.dataclass(frozen=True)
class Batch:
    """What a reward model learns from: the labels in the first lines of the files of answers.

    model: which reward model, from 1. step: of the policy, before which it is trained. wanted:
    l(n). labels: how many there are. answers: {labeller: lines}. digest: of the labels.
    """

    model: int
    step: int
    wanted: int
    labels: int
    answers: dict[str, int]
    digest: str


class Decisions:
    """The decisions of a run; this process alone adds to them.

    path: of the folder of labels.
    """

    def __init__(self, path: str) -> None:
        file = os.path.join(path, USED)
        self._writer = json_lines.Writer(
            file, in_use=f'{file} is in use: another training is asking for labels there'
        )
        self.batches: dict[int, Batch] = {}  # by step
        self._trained: set[int] = set()  # steps whose outcome is recorded
        self._asked_again: list[tuple[int, int]] = []  # (step, questions)
        reader = json_lines.Reader(file)
        try:
            for _, line in reader.new_lines():
                self._read(json_lines.parse(line, reader.where()), reader.where())
        except BaseException:
            self.close()
            raise

    def _read(self, record: dict[str, Any], where: str) -> None:
        if matches_schema(record, MODEL) and are_line_counts(record.get('answers')):
            names = [field.name for field in dataclasses.fields(Batch)]
            batch = Batch(**{name: record[name] for name in names})
            self.batches[batch.step] = batch
        elif matches_schema(record, ASKED_AGAIN):
            self._asked_again.append((record['step'], record['asked_again']))
        elif matches_schema(record, TRAINED):
            self._trained.add(record['step'])
        else:
            raise UserError(f'{where} is no decision of an online run')

    def asked_again(self, step: int) -> int:
        """How many more questions have been asked by `step`, in place of skipped ones."""
        return sum(count for when, count in self._asked_again if when <= step)

    def ask_again(self, step: int, count: int) -> None:
        """Have `count` more questions asked from `step` on."""
        self._writer.append([{'asked_again': count, 'step': step}])
        self._asked_again.append((step, count))

    def last_batch_before(self, step: int) -> Batch | None:
        """What the reward model that is in force before `step` has learned from."""
        steps = [when for when in self.batches if when < step]
        return self.batches[max(steps)] if steps else None

    def learn_from(self, batch: Batch) -> None:
        """Record what a reward model learns from."""
        self._writer.append([dataclasses.asdict(batch)])
        self.batches[batch.step] = batch

    def record_outcome(self, batch: Batch, outcome: Mapping[str, float]) -> None:
        """Record how a training went, unless it is known from before an interruption."""
        if batch.step in self._trained:
            return
        numbers = {name: value for name, value in outcome.items() if name not in MODEL}
        self._writer.append([{'trained': batch.model, 'step': batch.step, **numbers}])
        self._trained.add(batch.step)

    def close(self) -> None:
        """Let another training use this folder."""
        self._writer.close()
