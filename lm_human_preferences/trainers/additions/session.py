"""Run of a training command: its ranks, settings, directory and record."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lm_human_preferences import lm_tasks, storage
from lm_human_preferences.checkpointing.checkpointer import Checkpointer
from lm_human_preferences.distributed import comm as comms
from lm_human_preferences.errors import UserError
from lm_human_preferences.language.adapters.shared import Bases
from lm_human_preferences.machine import hardware, precision
from lm_human_preferences.machine.hardware import default_device
from lm_human_preferences.machine.precision import Library
from lm_human_preferences.plan import phases
from lm_human_preferences.plan.phases import LESS_MEMORY, make_plan, policy_phase
from lm_human_preferences.runs import run_dir, run_files, run_record, run_settings
from lm_human_preferences.trainers.additions import console
from lm_human_preferences.training import loop
from lm_human_preferences.utils.core import ceil_div
from lm_human_preferences.utils.logging import (
    announce,
    configure_console,
    log_as_original,
    log_in_summary,
)

if TYPE_CHECKING:
    from lm_human_preferences.distributed.comm import Comm
    from lm_human_preferences.language.trained_models import TrainedModel
    from lm_human_preferences.plan.phases import Plan, Settings, Training, TrainReward

OUT_OF_MEMORY = re.compile(
    r"[^:]*out of memory.*|can't allocate memory.*|Unable to allocate.*"
)  # out-of-memory messages of PyTorch on GPUs, PyTorch on CPUs and numpy


@dataclasses.dataclass(frozen=True)
class Run:
    """Run of a training command, whose directory this process has locked.

    settings: settings of the whole command. experiment: name of the experiment, for the record.
    place: directory for new reward models. bases: base models that networks with adapters share.
    upload: uploads the directory if it is remote.
    """

    settings: Settings
    comm: Comm
    experiment: str | None
    place: str
    bases: Bases = dataclasses.field(default_factory=Bases)
    upload: Callable[[], None] | None = None

    def plan(self) -> Plan:
        """Give all ranks the same, fixed settings, and return the plan made from these settings."""
        pin(self.settings, self.comm)
        training = self.settings.reward_training
        if self.settings.policy is not None and training is not None:
            training.run.save_dir = self.place
            network = storage.join(self.place, run_files.REWARD.network)
            self.settings.policy.rewards.trained_model = network
        return make_plan(self.settings)

    def check_start(self, plan: Plan) -> None:
        """Check that the phases of `plan` can start; on rank 0, print what starts."""
        if self.comm.rank == 0:
            announce(*phases.notes(self.settings))
        phases.check_start(plan, self.comm)
        if self.comm.rank != 0:
            return
        console.show_start(self.settings, self.comm)
        if len(plan.names) > 1:
            log_in_summary(plan.phases_line())
        encoding = lm_tasks.initial_encoding(self.settings.task.policy.initial_model)
        log_in_summary(*phases.check_queries(plan, encoding.get_encoder()))

    def checkpointer(self, files: run_files.CommandFiles, max_to_keep: int) -> Checkpointer:
        """Return the checkpointer of a network; with --save_dir None it saves nothing."""
        run = self.settings.run
        return Checkpointer(
            run.directory and storage.join(run.directory, files.unfinished),
            self.comm,
            resume=run.resume,
            max_to_keep=max_to_keep,
            stop_timeout=run.stop_timeout,
            after_save=self.upload,
        )

    def prepare(self, phase: Training, checkpointer: Checkpointer) -> TrainedModel:
        """Configure this process for a training and seed it; return the initial model."""
        settings = phase.settings
        initial_model = lm_tasks.initial_model(settings.task.policy.initial_model)
        sizes = initial_model.sizes()
        library = agree_on_library(sizes.n_embd, checkpointer, self.comm)
        precision.configure_for(
            sizes.n_embd,
            settings.run.precision,
            library,
            deterministic=settings.run.deterministic,
        )
        console.dump(sizes, name='model_hparams')
        network = phase.files.network
        if phase.adapters:
            initial_model = self.bases.under(
                initial_model, phase.adapters, settings.run, network, self.comm
            )
        checkpointer.set_seed(settings.run.seed)  # loading may draw random numbers, so seed last
        return initial_model

    def restore(
        self,
        trainer: loop.Trainer,
        phase: Training,
        initial_model: TrainedModel,
        checkpointer: Checkpointer,
    ) -> None:
        """Resume the trainer if there is a checkpoint, and record that the training begins."""
        saves = ceil_div(trainer.total_steps, phase.settings.run.save_interval)
        checkpointer.restore(trainer, saves, phase.networks.frozen)
        self.comm.barrier()
        self.begin(phase, initial_model, checkpointer.seed)

    def record_labels(self, phase: TrainReward, about: Mapping[str, Any]) -> None:
        """Record which labels a reward model learns from. about: see run_record."""
        if self.settings.run.directory is not None:
            run_record.write_labels(self.settings.run.directory, phase.command.command, about)

    def begin(self, phase: Training, initial_model: TrainedModel, seed: int | None) -> None:
        """Write a run's records at the beginning of a training, on rank 0."""
        run, network = phase.settings.run, phase.files.network
        if run.directory is None or self.comm.rank != 0:
            return
        log_as_original(f'Will save to {run.save_dir}')
        ranks = self.comm.size
        run_settings.write(self.settings, run.directory, experiment=self.experiment, ranks=ranks)
        origin = {'ranks': ranks, **hardware.description()}
        run_record.begin(run.directory, phase.command.command, origin, {network: seed})
        initial_model.write_files(storage.join(run.directory, network))


@contextlib.contextmanager
def oom_explained() -> Iterator[None]:
    """Turn out-of-memory errors within the block into a UserError."""
    try:
        yield
    except (MemoryError, RuntimeError) as e:  # PyTorch on CPUs raises RuntimeError, not MemoryError
        message = OUT_OF_MEMORY.search(str(e))
        if message is None:
            raise
        raise UserError(f'out of memory ({message[0]:.100}): {LESS_MEMORY}') from e


@contextlib.contextmanager
def opened(settings: Settings, comm: Comm | None, experiment: str | None) -> Iterator[Run]:
    """Connect the ranks, and yield the run whose directory is locked within the block.

    comm: communication of ranks that are connected already. UserError for settings that do not
    suit the ranks or this machine.
    """
    comm = comm or comms.init_comm(settings.run.allreduce, settings.run.allreduce_timeout)
    configure_console(settings.run.console)
    phases.check_settings(settings, comm.size)
    with (
        run_dir.lock_run_dir(settings, comm) as upload,
        _saved_or_scratch(settings.run.save_dir, comm) as place,
        oom_explained(),
    ):
        yield Run(settings, comm, experiment, place, upload=upload)


@contextlib.contextmanager
def _saved_or_scratch(save_dir: str | None, comm: Comm) -> Iterator[str]:
    """Yield SAVE_DIR, or a scratch directory on rank 0 that is deleted after the block."""
    if save_dir is not None:
        yield save_dir
        return
    with tempfile.TemporaryDirectory() as scratch:
        yield comm.all_gather_object(scratch)[0]


def pin(settings: Settings, comm: Comm) -> None:
    """Set the commits of hub models, the seeds and the ensemble size on all ranks to rank 0's."""

    def pinned() -> dict[str, Any]:
        """Fetch the initial model; return the settings that must be equal on all ranks."""
        found = pins(settings)
        if run_settings.INITIAL_MODEL in found:
            lm_tasks.initial_model(found[run_settings.INITIAL_MODEL]).fetch()
        return found

    settings.override_from_dict(comm.on_rank_0(pinned))


def pins(settings: Settings, *, ask: bool = True) -> dict[str, Any]:
    """Return what a run records: seeds, ensemble size and commits of hub models.

    ask: whether to look on the hub.
    """
    found = run_settings.pins(settings, ask=ask)
    policy = settings.policy
    if policy is not None and policy.rewards.ensemble is None:
        source = policy_phase(policy, ask=ask).source
        members = source.recorded_members() if ask or not source.elsewhere() else 1
        if members > 1:
            found['rewards.ensemble'] = members
    return found


def agree_on_library(n_embd: int, checkpointer: Checkpointer, comm: Comm) -> Library:
    """Return the matrix-product library that all ranks use throughout a run, resumed or not."""
    if default_device().type != 'cpu':
        return 'default'
    of_rank_0: Any = comm.all_gather_object(precision.fastest_library(n_embd))[0]
    checkpointer.library = checkpointer.library or of_rank_0
    return checkpointer.library
