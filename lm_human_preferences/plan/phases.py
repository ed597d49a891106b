"""Plan of a command: phases with networks, memory and files, and checks before the start."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, ClassVar

from lm_human_preferences import label_types, lm_tasks, storage
from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.hparams import policy_options, reward_options
from lm_human_preferences.hparams.task_options import LoraHParams
from lm_human_preferences.language.adapters import shared
from lm_human_preferences.language.encodings import Encoder
from lm_human_preferences.language.networks.model_kinds import is_head
from lm_human_preferences.language.networks.network import Network
from lm_human_preferences.language.networks.scopes import REWARD_NETWORKS, Networks, Sizes
from lm_human_preferences.machine import hardware, precision
from lm_human_preferences.machine.hardware import default_device
from lm_human_preferences.policy import responses_in_a_row
from lm_human_preferences.runs import run_files
from lm_human_preferences.utils.core import exact_div
from lm_human_preferences.utils.logging import announce

if TYPE_CHECKING:
    import torch

    from lm_human_preferences.reward_sources.sources import RewardSource


UNSURE = 1.25  # factor by which a memory estimate may be too high, see benchmarks/memory.py
LESS_MEMORY = (
    'a smaller micro_batch_size (of --ppo or of the reward model) and --run.gradient_checkpointing'
    ' true take less, for the same gradients'
)
# Difference between seeds of an ensemble's models; seeds of two runs rarely differ by as much
MEMBER_SEED_STRIDE = 1_000_003


@dataclasses.dataclass(frozen=True)
class TrainReward:
    """Training of reward model number `member` (from 0), before or during a policy's training.

    run, command: options and files of the whole command, which may train a policy afterwards.
    """

    settings: reward_options.HParams
    run: reward_options.CommandRunHParams
    command: run_files.CommandFiles
    member: int = 0
    members: int = 1  # number of reward models that the command trains, one after another

    networks: ClassVar[Networks] = REWARD_NETWORKS

    @property
    def name(self) -> str:
        return 'reward model' if self.member == 0 else f'reward model {self.member + 1}'

    @property
    def files(self) -> run_files.CommandFiles:
        return run_files.REWARD.member_files(self.member)

    @property
    def seed(self) -> int:
        """Seed of the random numbers that differ between the models of an ensemble."""
        assert self.settings.run.seed is not None, 'see run_settings.pins: labels are the same'
        return self.settings.run.seed + self.member * MEMBER_SEED_STRIDE

    @property
    def adapters(self) -> dict[str, LoraHParams]:
        """LoRA options of each trainable network, {scope: options}; {} without LoRA."""
        lora = self.settings.task.policy.lora
        return {} if lora is None else {'reward_model': self.settings.lora or lora}

    def path(self, name: str) -> str | None:
        """Return the path of the run's file `name`; None if the run saves nothing."""
        directory = self.settings.run.directory
        return directory and storage.join(directory, name)

    def is_finished(self) -> bool:
        """Return whether the run has the checkpoint of the finished model."""
        directory = self.path(self.files.finished)
        return directory is not None and checkpoints.latest(directory) is not None

    def memory(self, sizes: Sizes, ranks: int, device: torch.device) -> float:
        """Return the bytes of memory that a step takes on each of `ranks` ranks."""
        settings, task = self.settings, self.settings.task
        responses = len(label_types.get(settings.labels.type).samples)
        return self.networks.memory(
            sizes,
            settings.run,
            device,
            rows=exact_div(settings.batch_size, ranks),
            micro_batch_size=settings.micro_batch_size,
            tokens=task.query_length + responses * task.response_length,
            predicted=0,
        )


@dataclasses.dataclass(frozen=True)
class FitHead(TrainReward):
    """Fit of a head on frozen hidden states, with a single network and without training steps."""

    networks: ClassVar[Networks] = Networks(learning=(), frozen=('ref_policy',))

    def is_finished(self) -> bool:
        """Return whether the run has a saved head."""
        place = self.path(self.files.network)
        return place is not None and is_head(place)


@dataclasses.dataclass(frozen=True)
class TrainPolicy:
    """Training of a policy. retraining: training of its reward models during an online run."""

    settings: policy_options.HParams
    source: RewardSource
    retraining: TrainReward | None = None

    name: ClassVar[str] = 'policy'
    files: ClassVar[run_files.CommandFiles] = run_files.POLICY
    command: ClassVar[run_files.CommandFiles] = run_files.POLICY

    @property
    def run(self) -> policy_options.RunHParams:
        return self.settings.run

    @property
    def networks(self) -> Networks:
        """Networks of the training, including the reward's networks."""
        return self.source.networks

    @property
    def adapters(self) -> dict[str, LoraHParams]:
        """LoRA options of each trainable network, {scope: options}; {} without LoRA."""
        lora, new_model = self.settings.task.policy.lora, self.settings.new_reward_model
        if lora is None or new_model is None:
            return {} if lora is None else {'policy': lora}
        return {'policy': lora, 'reward_model': new_model.lora or lora}

    def memory(self, sizes: Sizes, ranks: int, device: torch.device) -> float:
        """Return the bytes of memory that a step takes on each of `ranks` ranks."""
        task, ppo = self.settings.task, self.settings.ppo
        # Responses that share a row also share the computation of their query.
        query = task.query_length / responses_in_a_row(ppo.samples_per_query)
        return self.networks.memory(
            sizes,
            self.run,
            device,
            rows=exact_div(ppo.batch_size, ranks) // ppo.nminibatches,
            micro_batch_size=ppo.micro_batch_size,
            tokens=query + task.response_length,
            predicted=task.response_length,
        )


Training = TrainReward | TrainPolicy
Settings = policy_options.Training


@dataclasses.dataclass(frozen=True)
class Plan:
    """Phases of a command, in order. settings: all settings of the command."""

    settings: Settings
    rewards: tuple[TrainReward, ...]  # reward models to train before the policy
    policy: TrainPolicy | None = None

    @property
    def trainings(self) -> list[Training]:
        """Phases that train a model, in order."""
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
        """Return a line about the memory that a rank needs: a warning if a rank surely has less."""
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
    """Return the phase that trains a reward model. command: settings of the whole command."""
    if command is None:
        assert isinstance(settings, reward_options.CommandHParams)
        command = settings
    kind = FitHead if settings.is_head else TrainReward
    return kind(settings, command.run, run_files.COMMANDS[command.command])


def policy_phase(settings: policy_options.HParams, *, ask: bool = True) -> TrainPolicy:
    """Return the phase that trains a policy with `settings`. ask: see make_plan."""
    # reward_sources.sources imports all kinds of rewards, which only a policy needs.
    from lm_human_preferences.reward_sources.sources import source_of

    retraining = None
    if settings.rewards.online is not None and settings.new_reward_model is not None:
        retraining = reward_phase(settings.new_reward_model, settings)
    return TrainPolicy(settings, source_of(settings, ask=ask), retraining)


def check_settings(settings: Settings, ranks: int) -> None:
    """Raise UserError for settings that do not suit each other, the machine or the ranks."""
    settings.check_ranks(ranks)
    for name in _precisions(settings):
        precision.check_available(name, default_device())


def check_start(plan: Plan, comm: Comm) -> None:
    """Warn if networks may not fit in memory; UserError if the initial model cannot be used."""
    initial_model = lm_tasks.initial_model(plan.settings.task.policy.initial_model)
    sizes = sizes_of(plan, initial_model.sizes(), initial_model.create)
    lm_tasks.check_task(plan.settings.task, initial_model.encoding, sizes)
    free = min(comm.all_gather_object(hardware.free_bytes(comm.local_size)))
    if comm.rank == 0:
        line = plan.memory_line(sizes, comm.size, free)
        if line.startswith('WARNING'):
            announce(line)
        initial_model.check_runs()


def sizes_of(plan: Plan, sizes: Sizes, create: Callable[[Iterable[str]], Network]) -> Sizes:
    """Return the initial model's `sizes`, including the number of adapters' parameters, if any."""
    adapters = plan.trainings[-1].adapters
    return shared.with_learned(sizes, create, adapters) if adapters else sizes


def check_queries(plan: Plan, encoder: Encoder, *, with_test: bool = False) -> list[str]:
    """Return lines that say which tokens end a response, and how many texts are used as queries.

    UserError if no token ends a response, or no text is usable. with_test: also return lines on the
    evaluation's queries, which a training does not check.
    """
    notes = lm_tasks.end_notes(plan.settings.task, encoder)
    notes += lm_tasks.query_notes(plan.settings.task, encoder, 'train')
    if plan.policy is not None and plan.policy.run.is_evaluated:
        of_test = lm_tasks.query_notes(plan.settings.task, encoder, 'test')
        notes += of_test if with_test else []
    return notes


def notes(settings: Settings) -> list[str]:
    """Return a note for the user on a KL coefficient of 0."""
    rewards = settings.policy and settings.policy.rewards
    if rewards and rewards.adaptive_kl and not rewards.kl_coef:
        kl_coef = rewards.setting('kl_coef')
        return [f'note: {kl_coef} stays 0 however it adapts: the KL costs nothing']
    return []


def _precisions(settings: Settings) -> list[str]:
    """Return the precisions of the run and of the new reward model that it trains, if any."""
    found = [settings.run.precision]
    if settings.new_reward_model is not None:
        found.append(settings.new_reward_model.run.precision)
    return found
