"""Launcher of ranks by mpiexec: passes on their output and ends them all."""

import contextlib
import functools
import json
import operator
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from lm_human_preferences.distributed import channel
from lm_human_preferences.distributed.waiting import (
    DEFAULT_TIMEOUTS,
    EXIT_GRACE_SECONDS,
    Timeouts,
    stopping_message,
)
from lm_human_preferences.errors import UserError
from lm_human_preferences.utils import stop_signals, streams

POLL_SECONDS = 0.2  # how long the launcher listens before it looks for signals again
_RANK_PREFIXES = ('OMPI_COMM_WORLD_', 'PMI_', 'PMIX_')
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def launch_ranks(
    job: str,
    arguments: dict[str, Any],
    size: int,
    timeouts: Timeouts = DEFAULT_TIMEOUTS,
    *,
    saves: bool = False,
) -> None:
    """Run `job` in `size` local ranks; raise a rank's UserError or SystemExit (1, 128 + signal).

    saves: the job saves what it has done when a signal ends it.
    """
    mpiexec, is_open_mpi = find_mpiexec()
    with (
        tempfile.TemporaryDirectory(prefix='lmhp-', ignore_cleanup_errors=True) as directory,
        _catch_signals() as signals,
    ):
        channel.write_job(
            directory,
            name=job,
            arguments=arguments,
            columns=_terminal_columns(),
            typed=sys.argv,
        )
        command = [
            mpiexec,
            *mpiexec_options(is_open_mpi, size, os.cpu_count()),
            sys.executable,
            '-P',
            '-m',
            'lm_human_preferences.distributed.worker',
            directory,
        ]
        variables = rank_environment(directory, size, is_open_mpi)
        ranks = RankSupervisor(directory, size, command, variables, timeouts)
        try:
            ranks.follow(signals, saves=saves)
        finally:
            ranks.end()
    if signals:
        sys.exit(128 + signals[0])
    ranks.raise_failure()


def find_mpiexec() -> tuple[str, bool]:
    """Return (path, whether it is Open MPI's) of this environment's mpiexec, else that on PATH."""
    own = Path(sys.executable).with_name('mpiexec')
    path = str(own) if own.exists() else shutil.which('mpiexec')
    if path is None:
        raise UserError(
            'no mpiexec to start ranks with: `sh tools/setup.sh` installs one, or use --mpi 1'
        )
    return path, is_of_open_mpi(path)


def is_of_open_mpi(mpiexec: str) -> bool:
    version = subprocess.run([mpiexec, '--version'], capture_output=True, text=True, check=False)
    return 'open-mpi' in version.stdout.lower()


def mpiexec_options(is_open_mpi: bool, size: int, processors: int | None) -> list[str]:
    """Return mpiexec's options for `size` ranks on this host, whatever a batch system offers."""
    if not is_open_mpi:
        return ['-rmk', 'user', '-launcher', 'fork', '-n', str(size)]
    options = ['--host', f'localhost:{size}', '--bind-to', 'none']
    assert processors is not None
    if size > processors:
        options.append('--oversubscribe')
    return [*options, '-n', str(size)]


def rank_environment(directory: str, size: int, is_open_mpi: bool) -> dict[str, str]:
    """Return the ranks' environment; their temporary files are deleted with `directory`."""
    variables = dict(os.environ)
    for name in os.environ:
        # From another launcher, which started this process.
        if name.startswith(_RANK_PREFIXES) and not name.startswith('PMIX_MCA_'):
            del variables[name]
    variables.update(LMHP_RANKS=str(size), TMPDIR=directory)
    # MPICH's ranks would listen on all networks, for others that there are not.
    variables.setdefault('UCX_NET_DEVICES', 'lo')
    paths = filter(None, [str(Path(__file__).parents[2]), os.environ.get('PYTHONPATH')])
    variables['PYTHONPATH'] = os.pathsep.join(paths)
    if is_open_mpi and os.geteuid() == 0 and 'OMPI_ALLOW_RUN_AS_ROOT' not in os.environ:
        print('note: this is root, so Open MPI is told that it may run as root', file=sys.stderr)
        variables.update(OMPI_ALLOW_RUN_AS_ROOT='1', OMPI_ALLOW_RUN_AS_ROOT_CONFIRM='1')
    return variables


def _terminal_columns() -> int | None:
    if sys.stdout.isatty() and sys.stderr.isatty():
        return max(2, shutil.get_terminal_size().columns)  # one less for progress bars
    return None


@contextlib.contextmanager
def _catch_signals() -> Iterator[list[int]]:
    """Append signals that ask this process to end to the list that is yielded."""
    caught: list[int] = []

    def catch(number: int, frame: FrameType | None) -> None:
        """Note a signal; SIGHUP only as the first, and not if another one follows."""
        # systemd ends a session by SIGTERM and SIGHUP.
        if caught == [signal.SIGHUP]:
            caught.clear()
        if number != signal.SIGHUP or not caught:
            caught.append(number)

    numbers = [each for each in STOP_SIGNALS if signal.getsignal(each) != signal.SIG_IGN]
    with stop_signals.handled(catch, *numbers):
        try:
            yield caught
        finally:
            # After the first signal this process is about to end: another one changes nothing.
            for number in numbers if caught else ():
                signal.signal(number, signal.SIG_IGN)


class RankSupervisor:
    """Supervisor of the ranks of one job, and of the mpiexec that runs them."""

    def __init__(
        self,
        directory: str,
        size: int,
        command: Sequence[str],
        variables: dict[str, str],
        timeouts: Timeouts,
    ) -> None:
        # The `data` of each key is the function that handles what arrives there.
        self.selector = selectors.DefaultSelector()
        self.directory = directory
        self.size = size
        self.unread = [b''] * size  # the beginning of each rank's next line of status
        self.statuses = [channel.RankStatus()] * size
        self.alive: set[int] = set()
        self.failed_rank: int | None = None  # the first one that failed
        self.timeouts = timeouts
        self.silence = dict.fromkeys(range(size), 0.0)  # seconds since a rank was heard of
        self.heard_at = time.monotonic()
        self.is_silent = False  # whether the failed rank gave no sign of life for too long
        self.exit_status: int | None = None  # mpiexec's, where it ended by itself
        self.crashes: list[tuple[signal.Signals | None, str]] = []  # see `channel.read_crash`
        # Whether standard error now ends in an unfinished line, such as a progress bar.
        self.mid_line = False
        for rank in range(size):
            status, life = channel.open_for_launcher(directory, rank)
            read_status = functools.partial(self._read_status, rank)
            self.selector.register(status, selectors.EVENT_READ, read_status)
            note_end = functools.partial(self._note_end, rank, status)
            self.selector.register(life, selectors.EVENT_READ, note_end)
        # In a session of its own: the terminal's Ctrl-C is for the launcher only.
        self.mpiexec = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.outputs: list[Any] = [self.mpiexec.stdout, self.mpiexec.stderr]
        for stream, destination in zip(self.outputs, (sys.stdout, sys.stderr)):
            pass_on = functools.partial(self._pass_on, destination)
            self.selector.register(stream, selectors.EVENT_READ, pass_on)

    def follow(self, signals: list[int], *, saves: bool) -> None:
        """Pass on output until all ranks ended, one failed, or a signal (or SIGPIPE) came."""
        while self._running() and not signals:
            try:
                self._listen(POLL_SECONDS)
            except BrokenPipeError:
                signals.append(signal.SIGPIPE)
            self._notice_silence()
        if not signals:
            self._pass_on_the_rest(signals)
            return
        seconds = self.timeouts.stop if saves else EXIT_GRACE_SECONDS
        if saves and signal.SIGPIPE not in signals:
            print(stopping_message(seconds), flush=True)
        self._let_step_end(signals, seconds)

    def end(self) -> None:
        """End mpiexec, and the ranks that it leaves behind."""
        self._mute()
        self.exit_status = self.mpiexec.poll()
        self.mpiexec.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.mpiexec.wait(EXIT_GRACE_SECONDS)
        self.mpiexec.kill()
        self.mpiexec.wait()
        self._signal_ranks(signal.SIGKILL)
        while self.alive and self._listen(EXIT_GRACE_SECONDS):
            pass
        self.crashes = [channel.read_crash(self.directory, rank) for rank in range(self.size)]
        if self.mid_line:
            print(file=sys.stderr)

    def raise_failure(self) -> None:
        """Raise a rank's UserError, or print the reason and exit: 130 on Ctrl-C, else 1."""
        error = ''
        if self.failed_rank is not None:
            status = self.statuses[self.failed_rank]
            _, stacks = self.crashes[self.failed_rank]
            error = status.error or stacks
            if status.is_user_error:
                raise UserError(error)
            if status.is_interrupt:
                sys.exit(128 + signal.SIGINT)
        reason = self._failure()
        if reason is not None:
            print(f'{error}error: {reason}', file=sys.stderr)
            sys.exit(1)

    def _failure(self) -> str | None:
        """Return why the job did not end well, in a line; None if it did."""
        rank = self.failed_rank
        exit_status = self.exit_status or 0
        status = channel.RankStatus() if rank is None else self.statuses[rank]
        if status.error is not None:
            return f'rank {rank} failed, so all {self.size} ranks were stopped'
        if self.is_silent:
            return (
                f'rank {rank}, process {status.process}, has given no sign of life for'
                f' {self.timeouts.rank} s (--run.rank_timeout), so all {self.size} ranks'
                ' were stopped'
            )
        if exit_status < 0:
            return f'mpiexec was killed by {_signal_name(-exit_status)}'
        if rank is not None:
            return f'rank {rank}, process {status.process}, {self._death_of(rank)}'
        return f'mpiexec ended with status {exit_status}' if exit_status else None

    def _death_of(self, rank: int) -> str:
        """Return the cause of death of a `rank` that could not report it."""
        signals = [number for number, _ in self.crashes]
        own = signals[rank]
        if own is not None:
            return f'was killed by {_signal_name(own)}'
        if not self.exit_status:
            return 'ended without reporting an error'
        # MPICH kills the other ranks, and its status is the bitwise OR of all of theirs.
        mixed = functools.reduce(operator.or_, filter(None, signals), signal.SIGKILL)
        number = signal.SIGKILL if self.exit_status == mixed else self.exit_status
        return f'was killed by {_signal_name(number)}'

    def _running(self) -> bool:
        return self.mpiexec.poll() is None and self.failed_rank is None

    def _notice_silence(self) -> None:
        """Count a rank as failed if it has given no sign of life for too long."""
        now = time.monotonic()
        # This process may have been stopped itself, with all ranks, and go on now.
        passed = min(now - self.heard_at, 2 * POLL_SECONDS)
        self.heard_at = now
        for rank in self.alive:
            self.silence[rank] += passed
            if self.failed_rank is None and self.silence[rank] >= self.timeouts.rank:
                self.failed_rank = rank
                self.is_silent = True

    def _pass_on_the_rest(self, signals: Sequence[int]) -> None:
        """Pass on what was printed before all ended or one failed, until a signal comes."""
        grace = EXIT_GRACE_SECONDS
        rank = self.failed_rank
        # Where a rank was killed, mpiexec ends by itself, and its status will say why.
        killed = rank is not None and self.statuses[rank].error is None and not self.is_silent
        if killed:
            grace *= 2
        deadline = time.monotonic() + grace
        while not signals and time.monotonic() < deadline:
            heard = self._listen(POLL_SECONDS)
            awaits_mpiexec = killed and self.mpiexec.poll() is None
            if not heard and not awaits_mpiexec:
                return

    def _let_step_end(self, signals: Sequence[int], seconds: int) -> None:
        """Ask the ranks to stop after this step; wait `seconds`, or until a second signal."""
        self._mute()
        self._signal_ranks(signal.SIGTERM)
        deadline = time.monotonic() + seconds
        while len(signals) == 1 and self._running() and time.monotonic() < deadline:
            self._listen(POLL_SECONDS)

    def _signal_ranks(self, number: int) -> None:
        for rank in self.alive:
            process = self.statuses[rank].process
            if process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, number)

    def _mute(self) -> None:
        """Pass on nothing more from mpiexec: it would report that it is being ended."""
        for stream in self.outputs:
            with contextlib.suppress(KeyError):
                self.selector.unregister(stream)

    def _listen(self, seconds: float) -> bool:
        """Handle the first event within `seconds`; return False if there is none."""
        ready = self.selector.select(seconds)
        for key, _ in ready:
            data = os.read(key.fd, 1 << 16)
            if not data:
                self.selector.unregister(key.fileobj)
            key.data(data)
        return bool(ready)

    def _pass_on(self, destination: TextIO, data: bytes) -> None:
        number = streams.STDERR if destination is sys.stderr else streams.STDOUT
        with streams.lost_output_is_told(number):
            destination.buffer.write(data)
            destination.buffer.flush()
        if destination is sys.stderr and data:
            self.mid_line = not data.endswith(b'\n')

    def _read_status(self, rank: int, data: bytes) -> None:
        """Update the status of `rank` by what it reported; no data: it has closed the pipe."""
        if not data:
            return
        self.alive.add(rank)
        self.silence[rank] = 0
        *lines, self.unread[rank] = (self.unread[rank] + data).split(b'\n')
        for line in lines:
            self.statuses[rank] = replace(self.statuses[rank], **json.loads(line))
        if self.failed_rank is None and self.statuses[rank].error is not None:
            self.failed_rank = rank

    def _note_end(self, rank: int, status: int, no_data: bytes) -> None:
        """Read the last report of `rank`, which has ended, from its pipe `status`."""
        with contextlib.suppress(BlockingIOError):  # that pipe is not quite closed yet
            while data := os.read(status, 1 << 16):
                self._read_status(rank, data)
        self.alive.discard(rank)
        if self.failed_rank is None and not self.statuses[rank].done:
            self.failed_rank = rank


def _signal_name(number: int) -> str:
    """Return the signal of an exit status: its number under MPICH, 128 more under Open MPI."""
    number %= 128
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f'status {number}'
    return f'{name}, probably out of memory' if name == 'SIGKILL' else name
