"""Setup of both trainings: ranks, checks before anything is spent, and a trainer that may go on."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from lm_human_preferences import lm_tasks, storage
from lm_human_preferences.distributed import comm as comms
from lm_human_preferences.errors import UserError
from lm_human_preferences.evaluation import evaluate
from lm_human_preferences.hparams import reward_options
from lm_human_preferences.language.adapters import shared
from lm_human_preferences.machine import processors, products
from lm_human_preferences.machine.hardware import hardware
from lm_human_preferences.machine.products import Library
from lm_human_preferences.reward_sources import source_of
from lm_human_preferences.runs import command_record, run_files, run_settings
from lm_human_preferences.training import console, loop, memory, precision
from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.core import default_device
from lm_human_preferences.utils.logging import (
    announce,
    configure_console,
    log_as_original,
    log_in_summary,
)

if TYPE_CHECKING:
    from lm_human_preferences.checkpointing.checkpointer import Checkpointer
    from lm_human_preferences.distributed.comm import Comm
    from lm_human_preferences.hparams import policy_options
    from lm_human_preferences.hparams.model_sizes import Sizes
    from lm_human_preferences.hparams.task_options import TaskHParams
    from lm_human_preferences.language.encodings import Encoder
    from lm_human_preferences.language.trained_models import TrainedModel
    from lm_human_preferences.runs.run_settings import AnyTraining

    Training = policy_options.HParams | reward_options.HParams


AnyTrainer = TypeVar('AnyTrainer', bound=loop.Trainer)


def connect(hparams: Training, comm: Comm | None) -> Comm:
    """Return `comm`, or the one of the ranks that were launched; UserError as `check_settings`."""
    comm = comm or comms.init_comm(hparams.run.allreduce, hparams.run.timeouts)
    configure_console(hparams.run.console)
    check_settings(hparams, comm.size)
    return comm


def pin(hparams: Training, comm: Comm) -> None:
    """Have all ranks use the commits, seeds and number of reward models of rank 0."""
    pins = {}
    if comm.rank == 0:
        pins = run_settings.pins(hparams)
        if run_settings.INITIAL_MODEL in pins:
            lm_tasks.initial_model(pins[run_settings.INITIAL_MODEL]).fetch()
        pins |= pinned_members(hparams)
    hparams.override_from_dict(comm.all_gather_object(pins)[0])


def pinned_members(hparams: Training) -> dict[str, int]:
    """Return {--rewards.ensemble: number of reward models of the given run}, if it is not set."""
    policy = hparams.policy
    if policy is None or policy.rewards.ensemble is not None:
        return {}
    members = source_of(policy).recorded_members()
    return {'rewards.ensemble': members} if members > 1 else {}


def check_settings(hparams: Training, ranks: int) -> None:
    """Raise UserError for settings that do not suit each other, the machine or the ranks."""
    hparams.check_ranks(ranks)
    for name in _precisions(hparams):
        precision.check(name, default_device())
    if hparams.new_reward_model is not None:
        _check_same_task(hparams.task, hparams.new_reward_model.task)


def _precisions(hparams: Training) -> list[str]:
    """Return the precision of a training, and that of its new reward model."""
    found = [hparams.run.precision]
    if hparams.new_reward_model is not None:
        found.append(hparams.new_reward_model.run.precision)
    return found


def precision_notes(hparams: Training) -> list[str]:
    """Return lines for the user where this processor is slow in a precision of the command."""
    names = dict.fromkeys(_precisions(hparams))
    notes = [products.note_on_bf16(name) for name in names]
    return [note for note in notes if note]


def show_precision_notes(hparams: Training, comm: Comm) -> None:
    """Print, once for the whole command, the notes of all hosts' processors."""
    own = precision_notes(hparams) if comm.local_rank == 0 else []
    of_ranks = comm.all_gather_object(own)
    if comm.rank == 0:
        announce(*dict.fromkeys(itertools.chain.from_iterable(of_ranks)))


def _check_same_task(task: TaskHParams, reward_task: TaskHParams) -> None:
    """Raise UserError unless a policy and its new reward model have the same task."""
    settings, of_reward = hyperparams.leaves(task), hyperparams.leaves(reward_task)
    for name in settings | of_reward:
        value, other = settings.get(name, 'off'), of_reward.get(name, 'off')
        if value != other:
            raise UserError(
                f'{task.option_name(name)} and {reward_task.option_name(name)} must be the same:'
                f' {value} != {other}'
            )


def check(
    hparams: AnyTraining,
    comm: Comm,
    memory_plans: Callable[[AnyTraining, Sizes, int], list[memory.MemoryEstimate]],
) -> Sizes:
    """Return the sizes of networks; UserError if they cannot be had, used or held."""
    lm_tasks.check_offline(hparams.task, _files(hparams))
    initial_model = lm_tasks.initial_model(hparams.task.policy.initial_model)
    sizes = shared.with_learned(initial_model.hparams(), initial_model.create, hparams)
    lm_tasks.check_task(hparams.task, initial_model.encoding, sizes)
    for estimate in memory_plans(hparams, sizes, comm.size):
        memory.check(estimate, comm, default_device())
    if comm.rank == 0:
        initial_model.check()
    return sizes


def _files(hparams: Training) -> list[str]:
    """Return the paths that a training reads before its first step, but for those of its task."""
    if hparams.reward_training is not None:
        return list(hparams.reward_training.labels.sources().values())
    policy = hparams.policy
    assert policy is not None
    return source_of(policy).files()


def check_queries(hparams: Training, encoder: Encoder) -> list[str]:
    """Return notes on the texts of a user's own file; UserError if they cannot be used."""
    notes = lm_tasks.end_notes(hparams.task, encoder)
    notes += lm_tasks.query_notes(hparams.task, encoder, 'train')
    if hparams.policy is not None and hparams.policy.run.evaluate:
        evaluate.check_queries(hparams.policy)
    return notes


def show_queries(hparams: Training) -> None:
    encoding = lm_tasks.initial_encoding(hparams.task.policy.initial_model)
    log_in_summary(*check_queries(hparams, encoding.get_encoder()))


def start(
    build: Callable[[TrainedModel], AnyTrainer],
    hparams: Training,
    checkpointer: Checkpointer,
    comm: Comm,
    *,
    records: Mapping[str, Any],
    command: str,
    network: str,
    saves: Callable[[AnyTrainer], int],
) -> AnyTrainer:
    """Return a trainer before its next step.

    records: {name: JSON or text} of the run's files. command: the whole command, which may train
    a policy after this. network: folder of the trained network in the run. saves: returns the
    number of checkpoints of the whole training.
    """
    initial_model = lm_tasks.initial_model(hparams.task.policy.initial_model)
    width = initial_model.hparams().n_embd
    library = agree_on_library(width, checkpointer, comm)
    precision.configure_for(width, hparams.run.precision, library)
    console.dump(initial_model.hparams(), name='model_hparams')
    initial_model = shared.on_one_base(initial_model, hparams, network, comm)
    checkpointer.set_seed(hparams.run.seed)  # whether a base was read now or before
    trainer = build(initial_model)
    checkpointer.restore(trainer, saves=saves(trainer))
    comm.barrier()
    if comm.rank == 0:
        record_start(
            hparams,
            initial_model,
            comm,
            records=records,
            command=command,
            network=network,
            seed=checkpointer.seed,
        )
    return trainer


def record_start(
    hparams: Training,
    initial_model: TrainedModel,
    comm: Comm,
    *,
    records: Mapping[str, Any],
    command: str,
    network: str,
    seed: int | None,
) -> None:
    """Write what a run's directory says of a training that begins; see start. On rank 0."""
    directory = hparams.run.directory
    if directory is None:
        return
    log_as_original(f'Will save to {hparams.run.save_dir}')
    for name, record in records.items():
        path = storage.join(directory, name)
        if isinstance(record, str):
            storage.write_bytes(path, record.encode())
        else:
            storage.write_json(path, record)
    origin = {'ranks': comm.size, **hardware(), **initial_model.parts()}
    files = run_files.COMMANDS[command]
    command_record.begin(directory, files, origin)
    command_record.note_seed(directory, files, network, seed)
    initial_model.write_files(storage.join(directory, network))


def agree_on_library(n_embd: int, checkpointer: Checkpointer, comm: Comm) -> Library:
    """Return the library for products of all ranks, from a run's beginning to its end."""
    if default_device().type != 'cpu':
        return 'default'
    own = products.choose(n_embd)
    here = str(processors.this_processor())
    of_ranks: list[Any] = comm.all_gather_object({'library': own, 'processor': here})
    begun = checkpointer.products
    if begun.get('library') not in products.LIBRARIES:  # a new run, or one of another version
        begun = of_ranks[0]
    library: Library = begun['library']
    checkpointer.products = begun
    note = products.note_on_another(library, own) if own != library else None
    notes = comm.all_gather_object(note)
    if comm.rank == 0:
        if begun['processor'] != here and (own == library or not products.rounds(library)):
            announce(
                f'note: this run began on {begun["processor"]} with products by'
                f' {products.name_of(library)}, and goes on with them; on {here} their last digits'
                ' may differ'
            )
        announce(*dict.fromkeys(note for note in notes if note))
    return library


@contextlib.contextmanager
def saved_or_scratch(save_dir: str | None, comm: Comm) -> Iterator[str]:
    """Yield SAVE_DIR, or else a scratch directory of rank 0, deleted with the block."""
    if save_dir is not None:
        yield save_dir
        return
    with tempfile.TemporaryDirectory() as scratch:
        yield comm.all_gather_object(scratch)[0]
