"""Failure detection by heartbeats in a shared store, for ranks without our launcher."""

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from lm_human_preferences.distributed import launch_methods
from lm_human_preferences.distributed.waiting import (
    BEAT_SECONDS,
    LAST_WORD_SECONDS,
    OTHER_STACKS_SECONDS,
)
from lm_human_preferences.utils.streams import escaped


class RankLost(Exception):
    """Error: another rank is gone, or has not come in time."""


@contextlib.contextmanager
def noticing_lost_ranks() -> Iterator[None]:
    """Turn a lost connection within the block into a `RankLost`."""
    try:
        yield
    except RuntimeError as error:
        from torch.distributed import DistError

        # Gloo's errors have no class of their own, nor do all name it in their texts. What else may
        # fail in a process group has one, as lack of a GPU's memory.
        if not isinstance(error, DistError) and type(error) is not RuntimeError:
            raise
        reason = str(error).partition('\n')[0]
        raise RankLost(f'the connection to another rank is lost: {reason}') from error


@contextlib.contextmanager
def ending_a_start_after(seconds: int) -> Iterator[None]:
    """End this process and print its threads' stacks if MPI_Init in the block takes too long."""
    # The first stacks are enough: when one rank has ended, what started them ends the others.
    seconds += OTHER_STACKS_SECONDS if launch_methods.current().rank else 0
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


class Lifeline:
    """Signs of life of this rank; the process ends when another rank has failed or is gone."""

    # Through it ranks without MPI learn that another has failed; MPI ends them otherwise.
    of_failures: ClassVar['Lifeline | None'] = None

    def __init__(self, store: Any, rank: int, size: int, timeout: int) -> None:
        self.store = store  # a connection of its own: other threads may wait for theirs
        self.rank = rank
        self.next_rank = (rank + 1) % size
        self.timeout = timeout
        self.closed = threading.Event()
        self.place = [os.getpid(), socket.gethostname(), _process_space()]
        self.beats = 0
        self.answers = 0  # of the store
        self.next_sign = ''
        self.is_failure_of_another = False
        with contextlib.suppress(RuntimeError):  # the store is gone; `_watch` will notice
            self._beat()  # here, so that the others know this rank whenever it is stopped
        # Two threads, as one that asks the store waits for as long as that does not answer.
        self.threads = [
            threading.Thread(target=work, daemon=True) for work in (self._beat_on, self._watch)
        ]
        for thread in self.threads:
            thread.start()

    def close(self) -> None:
        """Give no more signs, and expect none."""
        self.closed.set()
        # Python aborts (SIGABRT) when it ends while one is inside the store.
        for thread in self.threads:
            thread.join(LAST_WORD_SECONDS)

    def claim_failure(self) -> bool:
        """Return whether this rank reported a failure first, or the store is unreachable."""
        claimed = []

        def claim() -> None:
            own = str(self.rank)
            with contextlib.suppress(RuntimeError):
                claimed.append(self.store.compare_set('failed', '', own).decode() == own)

        thread = threading.Thread(target=claim, daemon=True)
        thread.start()
        thread.join(LAST_WORD_SECONDS)
        return all(claimed)

    def _beat_on(self) -> None:
        with contextlib.suppress(RuntimeError):  # as in `__init__`
            while not self.closed.wait(BEAT_SECONDS):
                self._beat()

    def _beat(self) -> None:
        """Give a sign of life, and look for what other ranks have said."""
        self.beats += 1
        self.store.set(f'sign/{self.rank}', json.dumps([*self.place, self.beats]))
        if self.store.check([f'sign/{self.next_rank}']):
            sign = self.store.get(f'sign/{self.next_rank}')
            self.next_sign = sign.decode(errors='replace')
        if self.store.check(['failed']):
            failed = self.store.get('failed').decode(errors='replace')
            self.is_failure_of_another = failed != str(self.rank)
        self.answers += 1

    def _watch(self) -> None:
        store = _Silence(lambda: self.answers)
        next_rank = _Silence(lambda: self.next_sign)
        while not self.closed.wait(1):
            if self.is_failure_of_another:
                os._exit(1)
            if store.seconds() >= self.timeout:
                self._end(
                    f'rank {self.rank} has had no answer for {self.timeout} s from the host of rank'
                    ' 0, or of torchrun: it is gone or stopped'
                )
            if next_rank.seconds() >= self.timeout:
                process, host, _ = self._place_of_next_rank()
                place = f'process {process} on {host:.80}' if process else 'never heard of'
                self._end(
                    f'rank {self.next_rank}, {place}, has given no sign of life for'
                    f' {self.timeout} s: it is stopped, or its host is gone'
                )

    def _end(self, reason: str) -> None:
        if self.claim_failure():
            message = f'error: {reason}; see --run.rank_timeout'
            report(f'\n{message}', message)  # below a progress bar
        self._kill_next_rank_if_stopped()
        os._exit(1)

    def _place_of_next_rank(self) -> tuple[int, str, str]:
        """Return its process, host and process space; 0 and empty if it was never heard of."""
        # Others may reach the store, and write into it what they like.
        try:
            process, host, space, _ = json.loads(self.next_sign)
            return int(process), str(host), str(space)
        except (OverflowError, RecursionError, TypeError, ValueError):
            return 0, '', ''

    def _kill_next_rank_if_stopped(self) -> None:
        """Kill a stopped process, which SIGTERM does not end: torchrun would wait 30 s for it."""
        process, _, space = self._place_of_next_rank()
        if not space or space != _process_space():
            return  # it is on another host, or may be
        with contextlib.suppress(OSError):  # it is gone
            if _is_rank(process) and _state_of(process) == 'T':
                os.kill(process, signal.SIGKILL)


def report(message: str, summary: str) -> None:
    """Print an error; its summary goes to the launcher, for its own report."""
    print(message, file=sys.__stderr__, flush=True)
    launch_methods.current().write_summary(escaped(summary))


def _process_space() -> str:
    """Return the namespace of process ids, of this host or container; empty where unknown."""
    try:
        boot_id = Path('/proc/sys/kernel/random/boot_id').read_text(encoding='ascii').strip()
        return f'{boot_id} {os.readlink("/proc/self/ns/pid")}'
    except OSError:
        return ''


def _is_rank(process: int) -> bool:
    """Return whether a process is this user's, by the same command; OSError if there is none."""
    its, own = Path('/proc', str(process)), Path('/proc/self')
    is_own = process > 1 and its.stat().st_uid == os.geteuid()
    return is_own and (its / 'cmdline').read_bytes() == (own / 'cmdline').read_bytes()


def _state_of(process: int) -> str:
    """Return Linux's letter for its state, T for stopped; OSError if it does not exist."""
    status = Path(f'/proc/{process}/stat').read_text(encoding='utf-8', errors='replace')
    return status.rpartition(')')[2].split()[0]


class _Silence:
    """Seconds that `read()` has returned the same, while this process itself was running."""

    def __init__(self, read: Callable[[], object]) -> None:
        self.read = read
        self.last = read()
        self.ticks = 0

    def seconds(self) -> int:
        """Return the seconds of silence; call it once a second."""
        now = self.read()
        self.ticks = self.ticks + 1 if now == self.last else 0
        self.last = now
        return self.ticks
