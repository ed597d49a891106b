"""Making of a plan, from the settings of a command."""

from __future__ import annotations

import dataclasses

from lm_human_preferences.hparams import policy_options, reward_options
from lm_human_preferences.plan.phases import FitHead, Training, TrainPolicy, TrainReward
from lm_human_preferences.runs import run_files
from lm_human_preferences.training.memory import MemoryEstimate
from lm_human_preferences.training.model_sizes import Sizes

Settings = policy_options.HParams | reward_options.CommandHParams


@dataclasses.dataclass(frozen=True)
class Plan:
    """Phases of a command, in their order; settings: all of it, for the record and the console."""

    settings: Settings
    rewards: tuple[TrainReward, ...]  # that are trained before the policy
    policy: TrainPolicy | None = None

    @property
    def trainings(self) -> list[Training]:
        """All trainings, one after another."""
        return [*self.rewards, *filter(None, [self.policy])]

    @property
    def names(self) -> list[str]:
        """Names of all phases, in their order."""
        names = [phase.name for phase in self.trainings]
        if self.policy is not None and self.policy.run.is_evaluated:
            names.append('evaluation')
        return names

    def phases_line(self) -> str:
        """Return the line that tells the user what comes after what."""
        return f'phases: {", then ".join(self.names)}'

    def memory(self, sizes: Sizes, ranks: int) -> list[MemoryEstimate]:
        """Estimate the memory of each training on one of `ranks`; members take the same."""
        different = [*self.rewards[:1], *self.trainings[len(self.rewards) :]]
        return [phase.memory(sizes, ranks) for phase in different]


def make_plan(settings: Settings, *, ask: bool = True) -> Plan:
    """Return the plan of a command with these settings; ask: see sources.source_of."""
    rewards: list[TrainReward] = []
    if settings.reward_training is not None:
        first = reward_phase(settings.reward_training, settings)
        for member in range(settings.members):
            rewards.append(dataclasses.replace(first, member=member, members=settings.members))
    if settings.policy is None:
        return Plan(settings, tuple(rewards))
    return Plan(settings, tuple(rewards), policy_phase(settings.policy, ask=ask))


def reward_phase(settings: reward_options.HParams, command: Settings | None = None) -> TrainReward:
    """Return the training of a reward model, alone or as a part of a `command`."""
    if command is None:
        assert isinstance(settings, reward_options.CommandHParams)
        command = settings
    kind = FitHead if settings.is_head else TrainReward
    return kind(settings, command.run, run_files.COMMANDS[command.command])


def policy_phase(settings: policy_options.HParams, *, ask: bool = True) -> TrainPolicy:
    """Return the training of the policy that these settings ask for; ask: see make_plan."""
    # Only a policy needs it, and all kinds of reward with it.
    from lm_human_preferences.reward_sources.sources import source_of

    retraining = None
    if settings.rewards.online is not None and settings.new_reward_model is not None:
        retraining = reward_phase(settings.new_reward_model, settings)
    return TrainPolicy(settings, source_of(settings, ask=ask), retraining)
