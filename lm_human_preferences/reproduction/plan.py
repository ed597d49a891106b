"""Which runs the figures are made from."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from typing import Any, Self

from lm_human_preferences import train_policy
from lm_human_preferences.utils.core import ceil_div

POINTS = 8  # of a curve of Figure 2
HORIZON = 10_000  # the paper's; the KL coefficient starts near the right value, see jobs.run_policy


@dataclasses.dataclass(frozen=True)
class Seeds:
    """How often runs are repeated. seeds: runs of each kind."""

    seeds: int

    def with_seeds(self, seeds: int | None) -> Self:
        """The same with so many runs of each kind; None: as many as it has."""
        return self if seeds is None else dataclasses.replace(self, seeds=seeds)


@dataclasses.dataclass(frozen=True)
class Scale(Seeds):
    """How much is run.

    labels: sizes of label sets. targets: KLs in nats. curve: the one of Figure 2. episodes:
    budgets.
    """

    labels: tuple[int, ...]
    targets: tuple[float, ...]
    curve: float
    episodes: tuple[int, ...]


FULL = Scale(
    labels=(65536, 8192, 1024),
    targets=(1.0, 2.0, 4.0, 6.0),
    curve=4.0,
    episodes=(12800, 51200),
    seeds=5,
)
QUICK = Scale(
    labels=(8192, 2048, 512), targets=(1.0, 2.0, 4.0), curve=2.0, episodes=(2560, 10240), seeds=2
)


@dataclasses.dataclass(frozen=True)
class Run:
    """The training of one policy.

    labels: how many its reward model is trained on, None for direct access to the known reward.
    points: how often the policy is measured.
    """

    labels: int | None
    target: float
    episodes: int
    seed: int
    points: int = 1

    @property
    def access(self) -> str:
        """What the policy learns from: a number of labels, or 'direct'."""
        return str(self.labels or 'direct')

    def hparams(self, experiment: train_policy.HParams) -> train_policy.HParams:
        """The hyperparameters of this variant of `experiment`, train_policy's."""
        settings: dict[str, Any] = {
            'run.seed': self.seed,
            'ppo.total_episodes': self.episodes,
            'rewards.adaptive_kl.horizon': HORIZON,
            'rewards.adaptive_kl.target': self.target,
        }
        if self.labels is None:
            settings['rewards.train_new_model'] = 'off'
            settings['rewards.trained_model'] = 'mock'
        else:
            settings['rewards.train_new_model.labels.num_train'] = self.labels
            settings['rewards.train_new_model.run.seed'] = self.seed
        variant = copy.deepcopy(experiment)
        variant.override_from_dict(settings)
        variant.run.save_interval = ceil_div(variant.ppo.nupdates, self.points)
        variant.validate()
        return variant


def plan(scale: Scale) -> list[Run]:
    """The runs of both figures, the longest first."""
    seeds = range(1, scale.seeds + 1)
    runs = []
    for episodes in sorted(scale.episodes, reverse=True):
        for labels, target, seed in itertools.product((None, *scale.labels), scale.targets, seeds):
            has_curve = target == scale.curve and episodes == max(scale.episodes)
            runs.append(Run(labels, target, episodes, seed, POINTS if has_curve else 1))
    return runs
