"""What both trainings set up.

These are ranks and console, the checks before anything is spent, and a trainer that starts from
scratch or where its last checkpoint was taken.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from lm_human_preferences import lm_tasks, storage
from lm_human_preferences.distributed import comm as comms
from lm_human_preferences.errors import UserError
from lm_human_preferences.training import console, loop, memory, precision
from lm_human_preferences.utils.core import default_device
from lm_human_preferences.utils.logging import configure_console, log_as_original

if TYPE_CHECKING:
    from lm_human_preferences.checkpointing.checkpointer import Checkpointer
    from lm_human_preferences.distributed.comm import Comm
    from lm_human_preferences.hparams import train_policy, train_reward
    from lm_human_preferences.hparams.model import HParams as Sizes
    from lm_human_preferences.hparams.task import TaskHParams
    from lm_human_preferences.language.trained_models import TrainedModel

    Training = train_policy.HParams | train_reward.HParams


class Trainer(loop.Trainer, Protocol):
    """What `start` starts."""

    @property
    def planned_saves(self) -> int:
        """How many checkpoints the whole training writes."""
        ...


AnyTrainer = TypeVar('AnyTrainer', bound=Trainer)


def connect(hparams: Training, comm: Comm | None) -> Comm:
    """`comm`, or the one of the ranks that were launched.

    UserError if so many ranks cannot share the batches.
    """
    comm = comm or comms.init_comm(hparams.run.allreduce, hparams.run.timeouts)
    configure_console(hparams.run.console)
    hparams.check_ranks(comm.size)
    return comm


def check_same_task(task: TaskHParams, reward_task: TaskHParams) -> None:
    """UserError unless a policy and the reward model that is trained with it have the same task."""
    for name, value in vars(task).items():
        other = getattr(reward_task, name)
        if value != other:
            raise UserError(
                f'--task.{name} and --rewards.train_new_model.task.{name} must be the same: '
                f'{value} != {other}'
            )


def check(
    hparams: Training, comm: Comm, memory_plan: Callable[[Sizes], memory.MemoryEstimate]
) -> Sizes:
    """UserError if a training cannot run on this machine; warns if memory may be insufficient.

    Returns the sizes of the training's networks. memory_plan: what takes memory in a step of the
    training, given these sizes.
    """
    device = default_device()
    precision.check(hparams.run.precision, device)
    initial_model = lm_tasks.initial_model(hparams.task.policy.initial_model)
    sizes = initial_model.hparams()
    lm_tasks.check_task(hparams.task, initial_model.encoding, sizes.n_ctx)
    memory.check(memory_plan(sizes), comm, device)
    return sizes


def start(
    build: Callable[[TrainedModel], AnyTrainer],
    hparams: Training,
    checkpointer: Checkpointer,
    comm: Comm,
    *,
    records: Mapping[str, Any],
    model_dir: str,
) -> AnyTrainer:
    """A trainer that is ready for its next step: the first, or that after the last checkpoint.

    build: makes the trainer from the initial model, once precision and random seeds are set.
    records: JSON files that say how the run was made, by name; model_dir: where in the run's
    directory the model is saved, whose sizes and encoding are written there.
    """
    precision.configure(hparams.run.precision, default_device())
    checkpointer.set_seed(hparams.run.seed)
    initial_model = lm_tasks.initial_model(hparams.task.policy.initial_model)
    console.dump(initial_model.hparams(), name='model_hparams')
    trainer = build(initial_model)
    checkpointer.restore(trainer, saves=trainer.planned_saves)
    comm.barrier()
    directory = hparams.run.directory
    if directory is not None and comm.rank == 0:
        log_as_original(f'Will save to {hparams.run.save_dir}')
        for name, record in records.items():
            storage.write_json(storage.join(directory, name), record)
        initial_model.write_files(storage.join(directory, model_dir))
    return trainer


@contextlib.contextmanager
def saved_or_scratch(save_dir: str | None, comm: Comm) -> Iterator[str]:
    """SAVE_DIR; for a run that is not saved, rank 0's scratch directory, deleted with the block."""
    if save_dir is not None:
        yield save_dir
        return
    with tempfile.TemporaryDirectory() as scratch:
        yield comm.all_gather_object(scratch)[0]
