"""Log of an online run (used.jsonl): the labels that each reward model learned from, and when.

A resumed run would find more answers than before, so each decision is on the disk before anything
follows from it, and never changes:

    {"asked_again": 2, "step": 12}
    {"model": 5, "step": 130, "wanted": 512, "labels": 530, "answers": {"anna": 3}, "digest": ""}
"""

import dataclasses
import os
from typing import Any

from lm_human_preferences.errors import UserError
from lm_human_preferences.labels import json_lines
from lm_human_preferences.labels.folder import are_line_counts
from lm_human_preferences.runs.run_files import USED
from lm_human_preferences.storage.schema import COUNT, matches_schema

MODEL = {'model': COUNT, 'step': COUNT, 'wanted': COUNT, 'labels': COUNT, 'digest': str}
ASKED_AGAIN = {'asked_again': COUNT, 'step': COUNT}


@dataclasses.dataclass(frozen=True)
class Batch:
    """Labels from which reward model number `model`, from 1, learns before `step` of the policy."""

    model: int
    step: int
    wanted: int  # l(n) of the paper
    labels: int
    answers: dict[str, int]  # {labeller: lines of the file}
    digest: str


class Decisions:
    """Decisions of a run, in the folder of labels at `path`; this process alone adds to them."""

    def __init__(self, path: str) -> None:
        file = os.path.join(path, USED)
        self._writer = json_lines.Writer(
            file, in_use=f'{file} is in use: another training is asking for labels there'
        )
        self.batches: dict[int, Batch] = {}  # {step: labels}
        self._asked_again: list[tuple[int, int]] = []  # (step, questions)
        reader = json_lines.Reader(file)
        try:
            for where, record in reader.new_records():
                self._read(record, where)
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
        else:
            raise UserError(f'{where} is not a decision of an online run')

    def asked_again(self, step: int) -> int:
        """Return how many questions were asked up to `step` in place of skipped ones."""
        return sum(count for when, count in self._asked_again if when <= step)

    def record_asked_again(self, step: int, count: int) -> None:
        """Record that `count` more questions are asked from `step` on."""
        self._writer.append([{'asked_again': count, 'step': step}])
        self._asked_again.append((step, count))

    def last_batch_before(self, step: int) -> Batch | None:
        """Return the labels that the reward model in use before `step` has learned from."""
        steps = [when for when in self.batches if when < step]
        return self.batches[max(steps)] if steps else None

    def record_batch(self, batch: Batch) -> None:
        """Record the labels that a reward model learns from."""
        self._writer.append([dataclasses.asdict(batch)])
        self.batches[batch.step] = batch

    def close(self) -> None:
        """Let another training use this folder."""
        self._writer.close()
