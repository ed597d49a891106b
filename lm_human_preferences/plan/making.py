"""Construction of a command's plan from its settings."""

from __future__ import annotations

import dataclasses

from lm_human_preferences.hparams import policy_options, reward_options
from lm_human_preferences.plan.phases import FitHead, Training, TrainPolicy, TrainReward
from lm_human_preferences.runs import run_files
from lm_human_preferences.training.model_sizes import Sizes
from lm_human_preferences.utils.core import default_device

UNSURE = 1.25  # factor by which an estimate may be too high; benchmarks/memory.py measures it
LESS_MEMORY = (
    'a smaller micro_batch_size (of --ppo or of the reward model) and --run.gradient_checkpointing'
    ' true take less, for the same gradients'
)

Settings = policy_options.HParams | reward_options.CommandHParams


@dataclasses.dataclass(frozen=True)
class Plan:
    """Phases of a command, in order; settings: all its settings, for the record and the console."""

    settings: Settings
    rewards: tuple[TrainReward, ...]  # trainings of reward models before the policy's
    policy: TrainPolicy | None = None

    @property
    def trainings(self) -> list[Training]:
        """All trainings, in order."""
        return [*self.rewards, *filter(None, [self.policy])]

    @property
    def names(self) -> list[str]:
        """Names of all phases, in order."""
        names = [phase.name for phase in self.trainings]
        if self.policy is not None and self.policy.run.is_evaluated:
            names.append('evaluation')
        return names

    def phases_line(self) -> str:
        """Return the line that shows the user the phases in order."""
        return f'phases: {", then ".join(self.names)}'

    def memory_line(self, sizes: Sizes, ranks: int, free: int) -> str:
        """Return a line about the memory that a rank needs; a warning if it surely lacks some."""
        device = default_device()
        needed = max(phase.memory(sizes, ranks, device) for phase in self.trainings)
        line = f'{needed / 1e9:.2f} GB of memory for each rank, which has {free / 1e9:.1f} GB'
        if needed <= UNSURE * free:
            return f'training takes about {line}'
        return f'WARNING: training takes about {line}: {LESS_MEMORY}'


def make_plan(settings: Settings, *, ask: bool = True) -> Plan:
    """Return the plan of a command with `settings`. ask: see sources.source_of."""
    rewards: list[TrainReward] = []
    if settings.reward_training is not None:
        first = reward_phase(settings.reward_training, settings)
        for member in range(settings.members):
            rewards.append(dataclasses.replace(first, member=member, members=settings.members))
    if settings.policy is None:
        return Plan(settings, tuple(rewards))
    return Plan(settings, tuple(rewards), policy_phase(settings.policy, ask=ask))


def reward_phase(settings: reward_options.HParams, command: Settings | None = None) -> TrainReward:
    """Return the training of a reward model. command: settings of a command that includes it."""
    if command is None:
        assert isinstance(settings, reward_options.CommandHParams)
        command = settings
    kind = FitHead if settings.is_head else TrainReward
    return kind(settings, command.run, run_files.COMMANDS[command.command])


def policy_phase(settings: policy_options.HParams, *, ask: bool = True) -> TrainPolicy:
    """Return the training of the policy that these settings ask for; ask: see make_plan."""
    # Imported here because it imports all kinds of rewards, which only a policy needs.
    from lm_human_preferences.reward_sources.sources import source_of

    retraining = None
    if settings.rewards.online is not None and settings.new_reward_model is not None:
        retraining = reward_phase(settings.new_reward_model, settings)
    return TrainPolicy(settings, source_of(settings, ask=ask), retraining)
