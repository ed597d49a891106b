"""Keeping a training: checkpoints written in the background, from which it goes on as if nothing
had happened.

TensorFlow's variables are in the checkpoint itself, exactly. The rest is the state beside it: the
trainer's counts, the seed, and the random generators of every rank.
"""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import os
import secrets
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.checkpointing.tf_bundle import Bundle
from lm_human_preferences.distributed.env import STEP_GRACE_SECONDS, STOPPING
from lm_human_preferences.errors import UserError
from lm_human_preferences.utils.core import set_seed
from lm_human_preferences.utils.logging import Logger, log_line

if TYPE_CHECKING:
    from lm_human_preferences.distributed.comm import Comm

SEEDS = range(-(2**63), 2**63)
RANDOM = {
    'numpy': (str, range(625), range(2), float),
    'torch': str,
}  # numpy does not check the position itself


class Trainer(Protocol):
    """What a Checkpointer saves, and puts where its checkpoint was taken."""

    logger: Logger

    def tf_variables(self) -> Mapping[str, torch.Tensor]:
        """What a checkpoint holds, tensors by TensorFlow's variable name."""
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """What else it needs, as JSON; `step` is the number of the next step."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned; the variables are filled in afterwards."""
        ...


class Checkpointer(contextlib.AbstractContextManager):
    """Saves a trainer to a local `directory` (None: nowhere), and puts it where its newest
    checkpoint was taken.

    Every rank has one; rank 0 writes. resume: whether to go on from what is there. frozen_scopes:
    the scopes of variables that do not change. A trainer has `logger`, `tf_variables()`, `state()`
    (what else it needs, its `step` among it, as JSON, of the schema `schema`) and `restore(state)`.
    Closing it waits for what is being written.
    """

    def __init__(
        self,
        directory: str | None,
        comm: Comm,
        *,
        resume: bool,
        schema: Any = dict,
        frozen_scopes: Iterable[str] = (),
        max_to_keep: int = 20,
    ) -> None:
        self.directory, self.comm, self.resume = directory, comm, resume
        self.frozen_scopes, self.max_to_keep = (
            tuple(f'{scope}/' for scope in frozen_scopes),
            max_to_keep,
        )
        found = (
            checkpoints.latest_resumable(
                directory, {'trainer': schema, 'seed': SEEDS, 'random': [RANDOM]}
            )
            if (resume and directory and comm.rank == 0)
            else None
        )
        self.prefix: str | None
        self.state: dict[str, Any]
        self.prefix, self.state = comm.all_gather_object(found)[0] or (None, {})
        self.seed: int | None = None
        self.saved_step: int | None = None
        self.writing: concurrent.futures.Future[str] | None = None
        self.host_buffers: dict[str, torch.Tensor] = {}
        self.failed, self.stop_requested = False, False
        self.thread = concurrent.futures.ThreadPoolExecutor(1)

    def __exit__(self, *error: object) -> None:
        with self.thread:
            self.wait()

    def set_seed(self, seed: int | None) -> None:
        """Seed this rank as the run that goes on was seeded; a new one by `seed`, None: by
        chance."""
        if seed is None:
            seed = self.state.get('seed', self.comm.all_gather_object(secrets.randbits(31))[0])
        self.seed = seed
        set_seed(seed, self.comm.rank)

    def restore(self, trainer: Trainer, saves: int) -> None:
        """Put a new `trainer` where the checkpoint was taken, if one was; UserError if `saves` in
        all have no room."""
        if self.resume:
            trainer.logger.purge_from(self.state['trainer']['step'] if self.prefix else 0)
        if self.prefix:
            trainer.load_state_dict(self.state['trainer'])
            self.saved_step = self.state['trainer']['step']
            load(self.prefix, trainer.tf_variables())
            self._restore_random_state(self.state['random'], self.comm.size)
            self.comm.barrier()
        self.make_latest()
        if self.directory and self.comm.rank == 0:
            if self.prefix:
                log_line(f'Going on from {self.prefix}')
            checkpoints.check_disk_space(
                self.directory, trainer.tf_variables(), saves, max_to_keep=self.max_to_keep
            )

    def make_latest(self) -> None:
        """List the checkpoint that was found as the newest: a kill may have come between its files
        and the list."""
        if self.directory and self.prefix and self.comm.rank == 0:
            checkpoints.discard_after(self.directory, os.path.basename(self.prefix))

    def _restore_random_state(self, states: Sequence[dict[str, Any]], size: int) -> None:
        assert self.seed is not None and self.saved_step is not None
        if self.seed != self.state['seed']:  # the user has named another one
            set_seed((self.seed + self.saved_step) % 2**31, self.comm.rank)
            return
        before, now = (
            f'{n} rank(s) on {["CPU", "GPU"][has_gpu]}'
            for n, has_gpu in (
                (len(states), 'cuda' in states[0]),
                (size, torch.cuda.is_available()),
            )
        )
        if before == now:
            try:
                set_random_state(states[self.comm.rank])
            except (IndexError, RuntimeError, TypeError, ValueError) as e:
                raise UserError(
                    f'{self.prefix} holds no state of random generators ({e}): go on from the'
                    ' checkpoint before by deleting its files'
                ) from e
            return
        set_seed((self.seed + self.saved_step) % 2**31, self.comm.rank)
        if self.comm.rank == 0:
            log_line(
                f'note: {now}, before {before}: responses and minibatches are drawn from other'
                ' random streams and sums are rounded otherwise, so this is not bit for bit the'
                ' run that it would have been'
            )

    def save(self, trainer: Trainer, *, resumable: bool = True) -> None:
        """Save `trainer` in the background, from a copy, as soon as the checkpoint before is
        written.

        resumable: it is between two steps, on all ranks, which all are here; else only rank 0
        counts. Raises what went wrong with the checkpoint before.
        """
        if not self.directory:
            return
        state, step = None, trainer.state_dict()['step']
        if resumable:
            state = {
                'trainer': trainer.state_dict(),
                'seed': self.seed,
                'random': self.comm.all_gather_object(random_state()),
            }
        if self.comm.rank == 0:
            self.wait()
            trainer.logger.flush()
            self.writing = self.thread.submit(
                checkpoints.save,
                self.directory,
                f'model.ckpt-{step}',
                self._copy(trainer.tf_variables()),
                state=state,
                max_to_keep=self.max_to_keep,
            )
            self.saved_step = step

    def save_on_error(self, trainer: Trainer) -> None:
        """Save `trainer`, which may be in the midst of a step, unless that has been done or cannot
        be."""
        if (
            self.directory
            and self.comm.rank == 0
            and self.saved_step != trainer.state_dict()['step']
            and not self.failed
        ):
            self.save(trainer, resumable=False)

    def _copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """{name: tensor in host memory}, which is used for every checkpoint; what is fixed is not
        copied."""
        copied = {
            name: tensor
            for name, tensor in tensors.items()
            if not name.startswith(self.frozen_scopes)
        }
        for name, tensor in copied.items():
            self.host_buffers.setdefault(name, torch.empty_like(tensor, device='cpu')).copy_(tensor)
        return {**tensors, **self.host_buffers}

    @contextlib.contextmanager
    def defer_signals(self) -> Iterator[None]:
        """Within the block, the first SIGINT or SIGTERM waits until `after_step`, but no longer
        than STEP_GRACE_SECONDS."""
        in_main = threading.current_thread() is threading.main_thread()
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM) if in_main else ()
        before = {number: signal.signal(number, self._ask) for number in numbers}
        try:
            yield
        finally:
            signal.alarm(0)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.stop_requested or number == signal.SIGALRM:
            raise KeyboardInterrupt
        self.stop_requested = True
        signal.alarm(STEP_GRACE_SECONDS)
        if self.comm.rank == 0:
            os.write(2, f'\n{STOPPING}\n'.encode())  # this may be in the midst of a print

    def after_step(self, trainer: Trainer) -> None:
        """Raise what went wrong in the background; or, if a rank was asked to end, save `trainer`
        and do so."""
        if self.writing and self.writing.done():
            self.wait()
        if any(self.comm.all_gather_object(self.stop_requested)):
            signal.alarm(0)
            self.save(trainer)
            self.wait()
            self.comm.barrier()
            raise KeyboardInterrupt

    def wait(self) -> None:
        """Return when nothing is being written; raises what went wrong."""
        if self.writing:
            self.failed = (
                self.writing.exception() is not None
            )  # this may be interrupted: the copy is still in use then
            writing, self.writing = self.writing, None
            writing.result()


def load(prefix: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy the values of the checkpoint `prefix` into `tensors`, {variable name: tensor}; UserError
    if one differs."""
    bundle = Bundle(prefix)
    for name, tensor in tensors.items():
        value = torch.from_numpy(np.array(bundle.get(name, 0j)))  # no variable is complex
        if (value.dtype, value.shape) != (tensor.dtype, tensor.shape):
            raise UserError(
                f'{prefix} has no {name} of {tensor.dtype} {tuple(tensor.shape)}: it is of another'
                ' model'
            )
        tensor.copy_(value)


def random_state() -> dict[str, Any]:
    """The states of numpy's and torch's generators of this process, as JSON."""
    _, keys, *rest = np.random.get_state()
    state = {
        'numpy': [pack(keys), *rest],  # pyright: ignore[reportArgumentType]
        'torch': pack(torch.get_rng_state().numpy()),
    }
    if torch.cuda.is_available():
        state['cuda'] = pack(torch.cuda.get_rng_state().numpy())
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore what `random_state` returned."""
    keys, *rest = state['numpy']
    np.random.set_state(('MT19937', unpack(keys, np.uint32), *rest))
    torch.set_rng_state(torch.from_numpy(unpack(state['torch'], np.uint8)))
    if 'cuda' in state:
        torch.cuda.set_rng_state(torch.from_numpy(unpack(state['cuda'], np.uint8)))


def pack(array: np.ndarray) -> str:
    """The bytes of an array as text."""
    values = np.ascontiguousarray(array)
    return base64.b64encode(values).decode()  # pyright: ignore[reportArgumentType]


def unpack(text: str, dtype: type[np.generic]) -> np.ndarray:
    """The array that `pack` got."""
    return np.frombuffer(base64.b64decode(text), dtype).copy()
