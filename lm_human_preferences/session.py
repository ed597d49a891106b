"""Setup of both trainings: ranks, pinned settings, and a trainer that may be resumed."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from lm_human_preferences import lm_tasks, storage
from lm_human_preferences.checkpointing.checkpointer import Checkpointer
from lm_human_preferences.distributed import comm as comms
from lm_human_preferences.machine import processors, products
from lm_human_preferences.machine.hardware import hardware
from lm_human_preferences.machine.products import Library
from lm_human_preferences.plan import checks
from lm_human_preferences.plan.making import policy_phase
from lm_human_preferences.runs import run_record, run_settings
from lm_human_preferences.training import console, loop, precision
from lm_human_preferences.utils.core import ceil_div, default_device
from lm_human_preferences.utils.logging import (
    announce,
    configure_console,
    log_as_original,
    log_in_summary,
)

if TYPE_CHECKING:
    from lm_human_preferences.distributed.comm import Comm
    from lm_human_preferences.language.adapters.shared import Bases
    from lm_human_preferences.language.trained_models import TrainedModel
    from lm_human_preferences.plan.making import Plan, Settings
    from lm_human_preferences.plan.phases import Training


def connect(settings: Settings, comm: Comm | None) -> Comm:
    """Return `comm`, or that of the ranks that were launched; UserError as check_settings."""
    comm = comm or comms.init_comm(settings.run.allreduce, settings.run.allreduce_timeout)
    configure_console(settings.run.console)
    checks.check_settings(settings, comm.size)
    return comm


def pin(settings: Settings, comm: Comm) -> None:
    """Have all ranks use the commits, seeds and number of reward models of rank 0."""

    def pinned() -> dict[str, Any]:
        """Return the pinned settings, once the model's small files are here."""
        found = pins(settings)
        if run_settings.INITIAL_MODEL in found:
            lm_tasks.initial_model(found[run_settings.INITIAL_MODEL]).fetch()
        return found

    settings.override_from_dict(comm.on_rank_0(pinned))


def pins(settings: Settings, *, ask: bool = True) -> dict[str, Any]:
    """Return the pinned {setting: value}. ask: False for a dry run, which asks no server."""
    found = run_settings.pins(settings, ask=ask)
    policy = settings.policy
    if policy is not None and policy.rewards.ensemble is None:
        source = policy_phase(policy, ask=ask).source
        members = source.recorded_members() if ask or not source.elsewhere() else 1
        if members > 1:
            found['rewards.ensemble'] = members
    return found


def show_notes(settings: Settings, comm: Comm) -> None:
    """Print the notes on the settings, and on the processor of rank 0."""
    if comm.rank == 0:
        announce(*checks.notes(settings))


def show_start(plan: Plan, comm: Comm) -> None:
    """Print the settings that start, and how texts become queries."""
    console.show_start(plan.settings, comm)
    if len(plan.names) > 1:
        log_in_summary(plan.phases_line())
    encoding = lm_tasks.initial_encoding(plan.settings.task.policy.initial_model)
    log_in_summary(*checks.check_queries(plan, encoding.get_encoder()))


def checkpointer_of(phase: Training, comm: Comm, max_to_keep: int) -> Checkpointer:
    """Return the checkpointer of a training, which saves nothing if the command saves nothing."""
    directory = None
    if phase.run.save_dir is not None and phase.settings.run.directory is not None:
        directory = storage.join(phase.settings.run.directory, phase.files.unfinished)
    return Checkpointer(
        directory,
        comm,
        resume=phase.run.resume,
        frozen_scopes=phase.networks.frozen,
        max_to_keep=max_to_keep,
        stop_timeout=phase.run.stop_timeout,
    )


def prepare(phase: Training, checkpointer: Checkpointer, bases: Bases, comm: Comm) -> TrainedModel:
    """Set this process up for a training, and seed it; return the initial model."""
    settings = phase.settings
    initial_model = lm_tasks.initial_model(settings.task.policy.initial_model)
    width = initial_model.sizes().n_embd
    library = agree_on_library(width, checkpointer, comm)
    precision.configure_for(
        width, settings.run.precision, library, deterministic=settings.run.deterministic
    )
    console.dump(initial_model.sizes(), name='model_hparams')
    network = phase.files.network
    initial_model = bases.under(initial_model, phase.adapters, settings.run, network, comm)
    checkpointer.set_seed(settings.run.seed)  # the same whether a base was read now or before
    return initial_model


def restore(
    trainer: loop.Trainer,
    phase: Training,
    initial_model: TrainedModel,
    checkpointer: Checkpointer,
    write_settings: Callable[[str], None],
) -> None:
    """Resume the trainer if there is a checkpoint, and record that the training begins.

    write_settings: writes the settings of the whole run into its directory.
    """
    comm = trainer.comm
    saves = ceil_div(trainer.total_steps, phase.settings.run.save_interval)
    checkpointer.restore(trainer, saves)
    comm.barrier()
    if comm.rank == 0:
        record_start(phase, initial_model, comm.size, write_settings, checkpointer.seed)


def record_start(
    phase: Training,
    initial_model: TrainedModel,
    ranks: int,
    write_settings: Callable[[str], None],
    seed: int | None,
) -> None:
    """Write the records of a training that begins, on rank 0; see restore."""
    run, network = phase.settings.run, phase.files.network
    if run.directory is None:
        return
    log_as_original(f'Will save to {run.save_dir}')
    write_settings(run.directory)
    origin = {'ranks': ranks, **hardware(), **initial_model.parts()}
    run_record.begin(run.directory, phase.command.command, origin, {network: seed})
    initial_model.write_files(storage.join(run.directory, network))


def agree_on_library(n_embd: int, checkpointer: Checkpointer, comm: Comm) -> Library:
    """Return the library for products of all ranks, from a run's beginning to its end."""
    if default_device().type != 'cpu':
        return 'default'
    own = {'library': products.choose(n_embd), 'processor': str(processors.this_processor())}
    of_ranks: list[dict[str, Any]] = comm.all_gather_object(own)
    begun = checkpointer.products or of_ranks[0]
    checkpointer.products = begun
    others = dict.fromkeys(each['processor'] for each in of_ranks)
    others.pop(begun['processor'], None)
    if others and comm.rank == 0:
        announce(
            f'note: this run began on {begun["processor"]} with products by'
            f' {products.name_of(begun["library"])}, and goes on with them; on {", ".join(others)}'
            ' they may be slower, and differ in their last digits'
        )
    return begun['library']


@contextlib.contextmanager
def saved_or_scratch(save_dir: str | None, comm: Comm) -> Iterator[str]:
    """Yield SAVE_DIR, or a scratch directory on rank 0 that is deleted after the block."""
    if save_dir is not None:
        yield save_dir
        return
    with tempfile.TemporaryDirectory() as scratch:
        yield comm.all_gather_object(scratch)[0]
