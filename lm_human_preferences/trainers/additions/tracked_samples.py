"""Hooks that write samples during training, to SAVE_DIR/samples.jsonl and to the console."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from lm_human_preferences import lm_tasks, storage
from lm_human_preferences.errors import UserError, os_errors_as
from lm_human_preferences.runs import run_files
from lm_human_preferences.trainers.policy_trainer import PPOTrainer
from lm_human_preferences.training.loop import KL_COEF, Hook
from lm_human_preferences.utils.core import random_stream
from lm_human_preferences.utils.logging import (
    announce,
    console_is,
    log_as_original,
    log_in_summary,
)
from lm_human_preferences.utils.option_checks import ceil_div

if TYPE_CHECKING:
    from lm_human_preferences.language.encodings import Encoder
    from lm_human_preferences.plan.phases import TrainPolicy
    from lm_human_preferences.ppo import Rollout

SHOWN, SHOWN_IN_SUMMARY = 3, 2  # number of samples that --run.console original and summary show
TIMES = 10  # most times that a training writes samples after its start
_TRIES = 20  # maximum number of draws per wanted query, as a draw may repeat an earlier one


def fixed_queries(
    task: lm_tasks.TaskHParams, encoder: Encoder, count: int, labels: str | None
) -> torch.Tensor:
    """Return the first `count` different queries of the data set, or fewer if it has fewer."""
    sampler = lm_tasks.make_query_sampler(task, encoder=encoder, batch_size=1, labels=labels)
    found: dict[tuple[int, ...], None] = {}
    for _ in range(_TRIES * count):
        found[tuple(sampler()['tokens'][0].tolist())] = None
        if len(found) == count:
            break
    return torch.tensor(list(found))


class OriginalSamples(Hook):
    """Hook that prints a PPO step's first few episodes and its duration, as the original did."""

    def __init__(self, trainer: PPOTrainer, reader: Encoder) -> None:
        self.trainer = trainer
        self.reader = reader

    def after_step(self, step: int, stats: Mapping[str, float]) -> None:
        """Print samples on rank 0 if they are due; as in the original, the first step is 0."""
        trainer, rollout = self.trainer, self.trainer.rollout
        if rollout is None or trainer.comm.rank != 0 or not console_is('original'):
            return
        if trainer.logger.is_due(step - 1):
            first = rollout[:SHOWN]
            kls = (first.logprobs - first.ref_logprobs).sum(1)
            for row, (score, kl) in enumerate(zip(first.scores.tolist(), kls.tolist())):
                texts = map(self.reader.decode, (first.queries[row], first.scored_responses[row]))
                numbers = {'score': score, 'kl': kl, 'total': score - stats[KL_COEF] * kl}
                log_as_original(
                    *(text.replace('\n', '⏎') for text in texts),
                    *(f'  {name} = {number:+.2f}' for name, number in numbers.items()),
                )
        seconds = trainer.step_seconds
        episodes_per_second = trainer.ppo.batch_size / max(seconds, 1e-9)
        log_as_original(
            f'[ppo_step {step - 1}] step_time={seconds:.2f}s, eps/s={episodes_per_second:.2f}'
        )


class TrackedSamples(Hook):
    """Hook that samples the same queries again and again, on rank 0, from its own random stream."""

    def __init__(
        self, trainer: PPOTrainer, phase: TrainPolicy, seed: int | None, reader: Encoder
    ) -> None:
        task, count = phase.settings.task, phase.run.sample_queries
        self.trainer, self.seed, self.reader = trainer, seed, reader
        self.path = os.path.join(str(phase.run.directory), run_files.SAMPLES)
        labels = phase.source.label_source()
        with random_stream(seed, 'queries of samples'):
            self.queries = fixed_queries(task, trainer.policy.encoder, count, labels)
        self.interval = ceil_div(trainer.total_steps, TIMES)  # steps between two sets of samples
        self.has_ends = task.truncates  # whether a response can end before response_length

    def __enter__(self) -> TrackedSamples:
        """Drop the samples of steps that a resumed run repeats."""
        if storage.exists(self.path):
            kept = _lines_before(storage.read_whole_lines(self.path), self.trainer.steps_done)
            storage.write_bytes(self.path, ''.join(kept).encode())
        return self

    def before_step(self, step: int) -> None:
        """Write samples of the current policy if they are due."""
        if step % self.interval == 0:
            self._write(step)

    def after_step(self, step: int, stats: Mapping[str, float]) -> None:
        """Write samples of the final policy after the last step."""
        if step == self.trainer.total_steps:
            self._write(step)

    def _write(self, step: int) -> None:
        try:
            with random_stream(self.seed, 'samples', step):
                rollout = self.trainer.generate(self.queries)
        except UserError as e:  # a reward that fails may work again at the next step
            announce(f'WARNING: {self.path} has no samples of step {step}: {e}')
            return
        lines, shown = [], [f'samples of step {step}:']
        for record in self._records(step, rollout):
            lines.append(json.dumps(record, ensure_ascii=False) + '\n')
            texts = f'{record["query"]} | {record["response"]}'.replace('\n', '⏎')
            shown.append(f'  {texts}   (score {record["score"]:.2f}, KL {record["kl"]:z.2f})')
        if step in (0, self.trainer.total_steps):
            log_in_summary(*shown[: 1 + SHOWN_IN_SUMMARY])
        with (
            os_errors_as(f'{self.path} cannot be written'),
            open(self.path, 'ab', buffering=0, opener=storage.open_nofollow) as file,
        ):
            storage.append(file, ''.join(lines).encode(errors='replace'), sync=False)

    def _records(self, step: int, rollout: Rollout) -> list[dict[str, Any]]:
        kls = (rollout.logprobs.double() - rollout.ref_logprobs.double()).sum(1)
        columns: dict[str, list[Any]] = {
            'step': [step] * len(kls),
            'query': self._texts(rollout.queries),
            'response': self._texts(rollout.scored_responses),
            'query_tokens': rollout.queries.tolist(),
            'response_tokens': rollout.responses.tolist(),
        }
        if self.has_ends:
            is_after_end = rollout.responses != rollout.scored_responses
            columns['tokens_after_end'] = is_after_end.sum(1).tolist()
        columns['score'] = rollout.scores.tolist()
        if rollout.score_std is not None:
            columns['score_std'] = rollout.score_std.tolist()
        columns['kl'] = kls.tolist()
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def _texts(self, rows: torch.Tensor) -> list[str]:
        encoder = self.trainer.policy.encoder
        return [self.reader.decode(encoder.without_padding(row)) for row in rows.tolist()]


def _lines_before(text: str, step: int) -> list[str]:
    """Return the lines of steps before `step`, up to the first line that cannot be parsed."""
    kept = []
    for line in io.StringIO(text):  # splits only at newlines, unlike str.splitlines
        try:
            is_earlier = json.loads(line)['step'] < step
        except (ValueError, KeyError, TypeError):
            break
        if not is_earlier:
            break
        kept.append(line)
    return kept
