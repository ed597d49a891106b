"""Log of an online run (used.jsonl): the labels that each reward model learned from.

When a run resumes, there may be more answers than before. So a line is written before the model
learns, and never changes:

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

KINDS = {'model': COUNT, 'step': COUNT, 'wanted': COUNT, 'labels': COUNT, 'digest': str}
EARLIER = 'asked_again'  # key of lines that only earlier versions wrote, and that are ignored


@dataclasses.dataclass(frozen=True)
class Batch:
    """Labels that reward model number `model` (from 1) learns from, before the policy's `step`."""

    model: int
    step: int
    wanted: int  # number of labels due at this step: l(n) in the paper
    labels: int
    answers: dict[str, int]  # {labeller: number of lines read from the labeller's file}
    digest: str


class Decisions:
    """Batches recorded in the label folder `path`, to which only this process may add."""

    def __init__(self, path: str) -> None:
        file = os.path.join(path, USED)
        self._writer = json_lines.Writer(
            file, in_use=f'{file} is in use: another training is asking for labels there'
        )
        self.batches: dict[int, Batch] = {}  # by step
        try:
            for where, record in json_lines.Reader(file).new_records():
                if EARLIER not in record:
                    batch = _batch_of(record, where)
                    self.batches[batch.step] = batch
        except BaseException:
            self.close()
            raise

    def last_batch_before(self, step: int) -> Batch | None:
        """Return the batch that the reward model in use before `step` learned from, or None."""
        steps = [when for when in self.batches if when < step]
        return self.batches[max(steps)] if steps else None

    def record_batch(self, batch: Batch) -> None:
        """Append to used.jsonl the labels that a reward model learns from."""
        self._writer.append([dataclasses.asdict(batch)])
        self.batches[batch.step] = batch

    def close(self) -> None:
        """Let another training use this folder."""
        self._writer.close()


def _batch_of(record: dict[str, Any], where: str) -> Batch:
    if not matches_schema(record, KINDS) or not are_line_counts(record.get('answers')):
        raise UserError(f'{where} is not a decision of an online run')
    return Batch(**{field.name: record[field.name] for field in dataclasses.fields(Batch)})
