"""Hooks of a policy's training: printed samples, the table of statistics, alarms, checkpoints."""

from collections.abc import Iterator, Mapping

import torch

from lm_human_preferences.checkpointing.checkpointer import Checkpointer
from lm_human_preferences.hparams.policy_options import HParams
from lm_human_preferences.language.encodings import Encoder
from lm_human_preferences.plan.phases import TrainPolicy
from lm_human_preferences.ppo import Rollout
from lm_human_preferences.trainers.policy_trainer import PPOTrainer
from lm_human_preferences.training.loop import KL, Checkpoints, HealthMonitor, Hook, Progress
from lm_human_preferences.utils.logging import (
    ENDED,
    LENGTH,
    VALID,
    announce,
    console_is,
    log_as_original,
)
from lm_human_preferences.utils.terminal import cut_mark

SAMPLES_SHOWN, SAMPLES_IN_SUMMARY = 3, 2

KL_TARGETS = 10  # an alarm is raised above this multiple of the target of the KL divergence
KL_PER_TOKEN = 2  # without a target: alarm above this KL, in nats per token of a response
FINITE = ('ppo/loss/total', KL, 'objective/score')


def policy_hooks(
    trainer: PPOTrainer, phase: TrainPolicy, checkpointer: Checkpointer, encoder: Encoder
) -> list[Hook]:
    """Return the hooks of a policy's training."""
    run, settings, batch_size = phase.run, phase.settings, trainer.ppo.batch_size
    columns = {'score': ('objective/score', '.2f')}
    if trainer.reward_blocks:  # a head gives the scores
        columns['spread'] = 'objective/score_std', '.2f'
    columns |= {
        'KL': (KL, 'z.2f'),
        'KL coef': ('objective/kl_coef', '.4g'),
        'loss': ('ppo/loss/total', '.3f'),
    }
    return [
        Samples(trainer, encoder),
        Progress(trainer, phase.name, 'episodes', lambda steps: steps * batch_size, columns),
        HealthMonitor(run.on_anomaly, trainer, checkpointer, FINITE, most_kl(settings)),
        Checkpoints(trainer, checkpointer, run.save_interval, settings),
    ]


class Samples(Hook):
    """Hook that prints the first few episodes of a PPO step and its duration, as the original did.

    With --run.console summary, it prints only samples of the first and the last step.
    """

    def __init__(self, trainer: PPOTrainer, encoder: Encoder) -> None:
        self.trainer = trainer
        self.encoder = encoder

    def after_step(self, step: int, stats: Mapping[str, float]) -> None:
        """Print samples on rank 0 if they are due; the console `original` counts steps from 0."""
        trainer = self.trainer
        if trainer.rollout is None or trainer.comm.rank != 0:
            return
        if console_is('summary') and step in (1, trainer.total_steps):
            self._summarize(step, trainer.rollout, stats)
        if console_is('original') and trainer.logger.is_due(step - 1):
            for query, response, score, kl, _ in self._first(SAMPLES_SHOWN, trainer.rollout):
                total = score - stats['objective/kl_coef'] * kl
                numbers = {'score': score, 'kl': kl, 'total': total}
                announce(query, response, *(f'  {name} = {numbers[name]:+.2f}' for name in numbers))
        seconds = trainer.step_seconds
        episodes_per_second = trainer.ppo.batch_size / max(seconds, 1e-9)
        log_as_original(
            f'[ppo_step {step - 1}] step_time={seconds:.2f}s, eps/s={episodes_per_second:.2f}'
        )

    def _summarize(self, step: int, rollout: Rollout, stats: Mapping[str, float]) -> None:
        announce(f'samples of step {step}:')
        if LENGTH in stats:
            announce(
                f'  of all responses {stats[ENDED]:.0%} ended, {stats[VALID]:.0%} where it counts,'
                f' at a mean length of {stats[LENGTH]:.1f} tokens'
            )
        for query, response, score, kl, cut in self._first(SAMPLES_IN_SUMMARY, rollout):
            shown = f'{response} {cut_mark(cut)}'.rstrip()
            announce(f'  {query} | {shown}   (score {score:.2f}, KL {kl:z.2f})')

    def _first(self, count: int, rollout: Rollout) -> Iterator[tuple[str, str, float, float, int]]:
        """Yield (query, response, score, KL, number of tokens cut off) for the first episodes."""
        first = rollout[:count]
        kl = (first.logprobs - first.ref_logprobs).sum(1)
        cut = (first.responses != first.scored_responses).sum(1)
        numbers = zip(first.scores.tolist(), kl.tolist(), cut.tolist(), strict=True)
        for query, response, each in zip(first.queries, first.scored_responses, numbers):
            yield self._line(query), self._line(response), *each

    def _line(self, tokens: torch.Tensor) -> str:
        return self.encoder.decode(tokens).replace('\n', '⏎')


def most_kl(settings: HParams) -> float:
    """Return the KL divergence, in nats per response, above which an alarm is raised."""
    adaptive_kl = settings.rewards.adaptive_kl
    if adaptive_kl is not None:
        return KL_TARGETS * adaptive_kl.target
    return KL_PER_TOKEN * settings.task.response_length
