"""Background saving of training runs; a resumed run has the result of an uninterrupted run."""

import concurrent.futures
import contextlib
import os
import secrets
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Protocol

import numpy as np
import torch

from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.checkpointing.names import VariableNames
from lm_human_preferences.checkpointing.tf_bundle import Bundle
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.distributed.meeting import AllStopped
from lm_human_preferences.errors import UserError
from lm_human_preferences.machine import hardware
from lm_human_preferences.utils import stop_signals
from lm_human_preferences.utils.core import set_seed
from lm_human_preferences.utils.logging import Logger, announce


class Trainer(Protocol):
    """Interface of a trainer whose named tensors and other state (as JSON) can be saved."""

    logger: Logger

    @property
    def variable_names(self) -> VariableNames: ...

    def tensors(self) -> Mapping[str, torch.Tensor]: ...

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def variables_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return the tensors of `trainer` by their names in checkpoints, without copying them."""
    return trainer.variable_names.variables(trainer.tensors())


class Checkpointer(contextlib.AbstractContextManager):
    """Object that saves and resumes a trainer. Each rank has a Checkpointer; only rank 0 writes.

    directory: local directory; None: nothing is saved. stop_timeout: seconds for the current step
    to end after a signal. after_save: called in the background after a checkpoint is complete.
    """

    def __init__(
        self,
        directory: str | None,
        comm: Comm,
        *,
        resume: bool,
        max_to_keep: int = 20,
        stop_timeout: int = stop_signals.STOP_TIMEOUT,
        after_save: Callable[[], None] | None = None,
    ) -> None:
        self.directory = directory
        self.comm = comm
        self.resume = resume
        self.frozen: tuple[str, ...] = ()  # name prefixes of tensors that never change
        self.max_to_keep = max_to_keep
        self.stop_timeout = stop_timeout
        self.after_save = after_save
        checkpoint = None
        if resume and directory and comm.rank == 0:
            checkpoint = checkpoints.latest_resumable(directory)
        # Rank 0 sends the prefix and state of the checkpoint to resume from to all ranks.
        prefix, state = comm.all_gather_object(checkpoint)[0] or (None, {})
        self.prefix: str | None = prefix
        self.state: dict[str, Any] = state
        self.seed: int | None = None
        self.library: Any = state.get('library')  # library for matrix products when the run began
        self.saved_step: int | None = None
        self.writing: concurrent.futures.Future[None] | None = None
        self.host_buffers: dict[str, torch.Tensor] = {}
        self.failed = False
        self.stop_requested = False
        self.was_signalled = False  # True after a signal that is not in stop_signals.WARNINGS
        self.thread = concurrent.futures.ThreadPoolExecutor(1)

    def __exit__(self, *error: object) -> None:
        with self.thread:
            self.wait()

    def set_seed(self, seed: int | None) -> None:
        """Seed this rank. seed: None for the resumed run's seed, or a random one in a new run."""
        if seed is None:
            drawn = self.comm.all_gather_object(secrets.randbits(31))[0]
            seed = self.state.get('seed', drawn)
        self.seed = seed
        set_seed(seed, self.comm.rank)

    @property
    def steps_done(self) -> int:
        """Return the number of steps that the resumed training has done; 0 for a new one."""
        return self.state['trainer']['step'] if self.prefix else 0

    def restore(self, trainer: Trainer, saves: int, frozen_scopes: Sequence[str] = ()) -> None:
        """Restore `trainer` from the checkpoint, if any; UserError if the disk has too little room.

        saves: number of checkpoints that the whole training saves. frozen_scopes: name prefixes of
        tensors that never change, so that saving need not copy them.
        """
        self.frozen = tuple(f'{scope}/' for scope in frozen_scopes)
        if self.resume:
            trainer.logger.purge_from(self.steps_done)
        if self.prefix:
            trainer.load_state_dict(self.state['trainer'])
            self.saved_step = self.steps_done
            load(self.prefix, variables_of(trainer))
            self._restore_random_state(self.state['random'], self.comm.size)
            self.comm.barrier()
        self.make_latest()
        if self.directory and self.comm.rank == 0:
            if self.prefix:
                announce(f'Going on from {self.prefix}')
            size = checkpoints.size_of(variables_of(trainer))
            checkpoints.check_disk_space(self.directory, saves, size, self.max_to_keep)

    def make_latest(self) -> None:
        """List the resumed checkpoint as the latest, in case the killed run has not listed it."""
        if self.directory and self.prefix and self.comm.rank == 0:
            checkpoints.discard_after(self.directory, os.path.basename(self.prefix))

    def _restore_random_state(self, states: Sequence[dict[str, Any]], size: int) -> None:
        """Restore this rank's random generators; seed them anew if seed, ranks or device differ."""
        assert self.seed is not None and self.saved_step is not None
        before = f'{len(states)} rank(s) on {"GPU" if "cuda" in states[0] else "CPU"}'
        now = f'{size} rank(s) on {"GPU" if torch.cuda.is_available() else "CPU"}'
        has_own_seed = self.seed != self.state['seed']  # the user has given another seed
        if has_own_seed or before != now:
            set_seed((self.seed + self.saved_step) % 2**31, self.comm.rank)
            if self.comm.rank == 0 and not has_own_seed:
                announce(
                    f'note: {now}, before {before}: results differ from those of an uninterrupted'
                    ' run, as other random numbers are drawn and sums are rounded differently'
                )
            return
        set_random_state(states[self.comm.rank])

    def position(self, trainer: Trainer) -> dict[str, Any]:
        """Return what this rank needs, besides tensors, to resume from the current step."""
        return {'trainer': trainer.state_dict(), 'random': random_state()}

    def save(
        self,
        trainer: Trainer,
        position: Mapping[str, Any] | None = None,
        *,
        resumable: bool = True,
    ) -> None:
        """Save `trainer` in the background.

        resumable: False for a save by rank 0 alone in the middle of a step. position: position to
        resume from, if the tensors have not changed since then; None: the current position.
        """
        if not self.directory:
            return
        step = trainer.state_dict()['step']
        state = None
        if resumable:
            self.comm.on_rank_0(self.wait)  # the previous save may take long on a slow disk
            position = position or self.position(trainer)
            random = self.comm.all_gather_object(position['random'])
            state = {**position, 'seed': self.seed, 'library': self.library, 'random': random}
        if self.comm.rank == 0:
            self.wait()
            tensors = self._copy(variables_of(trainer))
            self.writing = self.thread.submit(self._write, f'model.ckpt-{step}', tensors, state)
        self.saved_step = step

    def _write(self, name: str, tensors: Mapping[str, torch.Tensor], state: Any) -> None:
        assert self.directory is not None
        checkpoints.save(self.directory, name, tensors, state=state, max_to_keep=self.max_to_keep)
        if self.after_save is not None:
            self.after_save()

    def save_on_error(self, trainer: Trainer) -> None:
        """Save `trainer` in the middle of a step, unless the step is saved or a save has failed."""
        if not self.directory or self.comm.rank != 0 or self.failed:
            return
        if self.saved_step != trainer.state_dict()['step']:
            self.save(trainer, resumable=False)

    def _copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return copies of `tensors` in reused host buffers; frozen tensors are not copied."""
        if not self.host_buffers:
            hardware.release_freed_memory()
        for name, tensor in tensors.items():
            if name.startswith(self.frozen):
                continue
            if name not in self.host_buffers:
                self.host_buffers[name] = torch.empty_like(tensor, device='cpu')
            self.host_buffers[name].copy_(tensor)
        return {**tensors, **self.host_buffers}

    @contextlib.contextmanager
    def defer_signals(self) -> Iterator[None]:
        """Defer the first stop signal until `after_step`, for at most `stop_timeout` seconds."""
        numbers = (signal.SIGINT, signal.SIGALRM, *stop_signals.TO_STOP)
        with stop_signals.handled(self._request_stop, *numbers):
            try:
                yield
            finally:
                stop_signals.set_deadline(None)

    def _request_stop(self, number: int, frame: FrameType | None) -> None:
        """Remember the first stop signal; raise KeyboardInterrupt at the second, or at SIGALRM.

        Signals in WARNINGS do not count: systemd ends a session by SIGTERM and SIGHUP, and Slurm
        ends a job by SIGUSR1 and SIGTERM.
        """
        is_warning = number in stop_signals.WARNINGS
        if number == signal.SIGALRM or (self.was_signalled and not is_warning):
            raise KeyboardInterrupt
        self.was_signalled = self.was_signalled or not is_warning
        if self.stop_requested:
            return
        self.stop_requested = True
        stop_signals.set_deadline(self.stop_timeout)
        if self.comm.rank == 0:
            # print() is unsafe in a signal handler, as the signal may have interrupted a print().
            text = (
                '\nStopping: the current step is saved if it finishes within'
                f' {self.stop_timeout} s; interrupt again to stop at once\n'
            )
            with contextlib.suppress(OSError):
                os.write(2, text.encode())

    def after_step(self, trainer: Trainer) -> None:
        """Raise the error of a background save; after a stop signal, save and raise AllStopped."""
        if self.writing and self.writing.done():
            self.wait()
        if any(self.comm.all_gather_object(self.stop_requested)):
            stop_signals.set_deadline(None)
            self.save(trainer)
            self.comm.on_rank_0(self.wait)
            raise AllStopped

    def wait(self) -> None:
        """Wait until the background save has ended; raise its error, if any."""
        if self.writing:
            # After an interrupted wait, `writing` stays set, as the thread still reads the buffers.
            self.failed = self.writing.exception() is not None
            writing = self.writing
            self.writing = None
            writing.result()


def load(prefix: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy a checkpoint's values into `tensors`, by name; UserError if a dtype or shape differs."""
    bundle = Bundle(prefix)
    for name, tensor in tensors.items():
        # A missing variable is read as complex, which no tensor is, so that the check below fails.
        missing = 0j
        value = torch.from_numpy(np.array(bundle.get(name, missing)))
        if (value.dtype, value.shape) != (tensor.dtype, tensor.shape):
            raise UserError(
                f'{prefix} has no {name} of {tensor.dtype} {tuple(tensor.shape)}: it belongs to'
                ' another model'
            )
        tensor.copy_(value)


def random_state() -> dict[str, Any]:
    """Return the states of numpy's and torch's random generators as JSON values."""
    _, keys, *rest = np.random.get_state()
    state = {
        'numpy': [np.asarray(keys).tobytes().hex(), *rest],
        'torch': torch.get_rng_state().numpy().tobytes().hex(),
    }
    if torch.cuda.is_available():
        state['cuda'] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore random generators to the states that `random_state` returned."""
    keys, *rest = state['numpy']
    np.random.set_state(('MT19937', np.frombuffer(bytes.fromhex(keys), np.uint32), *rest))
    torch.set_rng_state(torch.tensor(bytearray.fromhex(state['torch']), dtype=torch.uint8))
    if 'cuda' in state:
        cuda = torch.tensor(bytearray.fromhex(state['cuda']), dtype=torch.uint8)
        torch.cuda.set_rng_state(cuda)
