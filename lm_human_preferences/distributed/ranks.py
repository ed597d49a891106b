"""Starts the ranks of a job by mpiexec, passes on what they print, and leaves none of them behind.

`launch` is the launcher's side. mpiexec runs this module for each rank, whose side is `main`; where
the user's own mpiexec or srun has started launch.py itself, that calls `run` instead.

Launcher and ranks share a private directory. `job.json` in it says what to do. Rank r keeps the
named pipe `rank-r` open while it lives and says through it, one JSON object a line, what becomes of
it. So the launcher knows which rank failed first, and how; and a rank knows when the launcher is
gone.
"""

import contextlib
import importlib
import io
import json
import os
import select
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lm_human_preferences.errors import UserError
from lm_human_preferences.utils import streams

# How our launcher and those of Open MPI, MPICH and Slurm tell a process how many ranks there are,
# and which it is.
SIZE_VARIABLES = ('LMHP_RANKS', 'OMPI_COMM_WORLD_SIZE', 'PMI_SIZE', 'SLURM_STEP_NUM_TASKS')
RANK_VARIABLES = ('OMPI_COMM_WORLD_RANK', 'PMI_RANK', 'SLURM_PROCID')
PATIENCE = 2  # seconds that mpiexec has to end its ranks, and what was printed before to arrive
# Seconds that news of a rank takes: that it has died, if this is what made others fail; its last
# words.
ECHO = 0.5
STEP = 5  # seconds that a training which is asked to end has to finish its step
ENDING = f'Ending: a step that is done within {STEP} s is saved; once more, and it ends at once'
FIRST_WORD = 2  # seconds that rank 0 has to name what went wrong on all ranks before the others do


def launched_size() -> int:
    """How many ranks the launcher of this process says it started; 1 outside of MPI."""
    return _number(SIZE_VARIABLES, 1)


def launched_rank() -> int:
    """Which of them this process is, from 0."""
    return _number(RANK_VARIABLES, 0) if launched_size() > 1 else 0


def _number(variables: Sequence[str], default: int) -> int:
    return next(
        (int(os.environ[name]) for name in variables if os.environ.get(name, '').isdecimal()),
        default,
    )


def launch(job: str, arguments: dict[str, Any], size: int) -> None:
    """Run `job` (see start_job) in `size` ranks on this host; return when all have ended well.

    UserError: a mistake that a rank found. SystemExit: 1 when a rank failed, 128 + N after signal
    N.
    """
    mpiexec, is_open_mpi = find_mpiexec()
    with (
        tempfile.TemporaryDirectory(prefix='lmhp-', ignore_cleanup_errors=True) as directory,
        _signals_caught() as signals,
    ):
        columns = (
            shutil.get_terminal_size().columns
            if sys.stdout.isatty() and sys.stderr.isatty()
            else None
        )
        Path(directory, 'job.json').write_text(
            json.dumps(
                {'job': job, 'arguments': arguments, 'columns': columns},
                default=lambda hparams: hparams.to_nested_dict(),
            ),
            encoding='utf-8',
        )
        ranks = _Ranks(
            directory,
            size,
            [
                mpiexec,
                *options(is_open_mpi, size, os.cpu_count()),
                sys.executable,
                '-P',
                '-m',
                'lm_human_preferences.distributed.ranks',
                directory,
            ],
            environment(directory, size, is_open_mpi),
        )
        try:
            ranks.follow(signals, saves='hparams' in arguments)
        finally:
            ranks.end()
    if signals:
        sys.exit(128 + signals[0])
    ranks.report()


def find_mpiexec() -> tuple[str, bool]:
    """(path, whether it is Open MPI's) of this environment's mpiexec, else of the first one on
    PATH; UserError."""
    own = Path(sys.executable).with_name('mpiexec')
    path = str(own) if own.exists() else shutil.which('mpiexec')
    if path is None:
        raise UserError(
            'there is no mpiexec to start ranks with: `sh tools/setup.sh` installs one, or take'
            ' --mpi 1'
        )
    version = subprocess.run([path, '--version'], capture_output=True, text=True, check=False)
    return path, 'open-mpi' in version.stdout.lower()


def options(is_open_mpi: bool, size: int, processors: int | None) -> list[str]:
    """mpiexec's options for `size` ranks, all on this host even where a batch system offers more of
    them."""
    if not is_open_mpi:
        return ['-rmk', 'user', '-launcher', 'fork', '-n', str(size)]
    assert processors is not None
    crowded = ['--oversubscribe'] if size > processors else []
    return ['--host', f'localhost:{size}', '--bind-to', 'none', *crowded, '-n', str(size)]


def environment(directory: str, size: int, is_open_mpi: bool) -> dict[str, str]:
    """Variables of the ranks. Their temporary files are in `directory`, and go with it."""
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get('PYTHONPATH')])]
    variables = {
        **os.environ,
        'LMHP_RANKS': str(size),
        'TMPDIR': directory,
        'PYTHONPATH': os.pathsep.join(paths),
    }
    if is_open_mpi and os.geteuid() == 0 and 'OMPI_ALLOW_RUN_AS_ROOT' not in os.environ:
        print('note: this is root, so Open MPI is told that it may run as root', file=sys.stderr)
        variables.update(OMPI_ALLOW_RUN_AS_ROOT='1', OMPI_ALLOW_RUN_AS_ROOT_CONFIRM='1')
    return variables


@contextlib.contextmanager
def _signals_caught() -> Iterator[list[int]]:
    """A list of the signals that have asked this process to end; it does so when it is done with
    its ranks."""
    caught: list[int] = []
    numbers = [
        n
        for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(n) != signal.SIG_IGN
    ]
    before = {n: signal.signal(n, lambda number, frame: caught.append(number)) for n in numbers}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(
                number, signal.SIG_IGN if caught else handler
            )  # an impatient user changes nothing


class _Ranks:
    """The ranks of one job as their launcher sees them, and the mpiexec that runs them."""

    def __init__(
        self, directory: str, size: int, command: Sequence[str], variables: dict[str, str]
    ) -> None:
        self.selector = selectors.DefaultSelector()
        self.unread = [b''] * size
        # what each rank has said of itself, by name
        self.words: list[dict[str, Any]] = [{} for _ in range(size)]
        self.alive: set[int] = set()
        self.failure: int | None = None  # number of the first rank that failed
        self.mid_line = (
            False  # what was passed on to standard error ends in one, such as a progress bar
        )
        for rank in range(size):
            path = os.path.join(directory, f'rank-{rank}')
            os.mkfifo(path, 0o600)
            self.selector.register(
                os.open(path, os.O_RDONLY | os.O_NONBLOCK), selectors.EVENT_READ, rank
            )
        # In a session of its own: the terminal's Ctrl-C is for the launcher only.
        self.mpiexec = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.mpiexec.stdout is not None and self.mpiexec.stderr is not None
        self.selector.register(self.mpiexec.stdout, selectors.EVENT_READ, sys.stdout)
        self.selector.register(self.mpiexec.stderr, selectors.EVENT_READ, sys.stderr)

    def follow(self, signals: list[int], *, saves: bool) -> None:
        """Pass on what the ranks print until all have ended, one has failed, or a signal has come.

        saves: whether the ranks save a step before they end. Standard output that nobody reads any
        more counts as the signal SIGPIPE.
        """
        while self.mpiexec.poll() is None and self.failure is None and not signals:
            try:
                self._listen(0.2)
            except BrokenPipeError:
                signals.append(signal.SIGPIPE)
        if signals:
            if saves and signal.SIGPIPE not in signals:
                print(ENDING, flush=True)
            self._let_step_end(signals)
        # Where a rank was killed, mpiexec ends by itself, and its status will say why.
        killed = self.failure is not None and 'error' not in self.words[self.failure]
        until = time.monotonic() + PATIENCE * (2 if killed else 1)
        while (
            not signals
            and time.monotonic() < until
            and (self._listen(0.2) or (killed and self.mpiexec.poll() is None))
        ):
            pass

    def _let_step_end(self, signals: Sequence[int]) -> None:
        """Ask the ranks to end, which those that train do after their step; wait for it, unless
        asked once more."""
        self._mute()
        self._send(signal.SIGTERM)
        until = time.monotonic() + STEP
        while (
            len(signals) == 1
            and self.failure is None
            and self.mpiexec.poll() is None
            and time.monotonic() < until
        ):
            self._listen(0.2)

    def _send(self, number: int) -> None:
        for rank in self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.words[rank]['process'], number)

    def _mute(self) -> None:
        """Listen no more to mpiexec: what it says of being ended is no news."""
        for stream in (self.mpiexec.stdout, self.mpiexec.stderr):
            assert stream is not None
            with contextlib.suppress(KeyError):
                self.selector.unregister(stream)

    def _listen(self, seconds: float) -> bool:
        """Take what is said within so many seconds; False if nothing is."""
        ready = self.selector.select(seconds)
        for key, _ in ready:
            data = os.read(key.fd, 1 << 16)
            if not data:
                self.selector.unregister(key.fileobj)
            if isinstance(key.data, int):
                self._hear(key.data, data)
            else:
                key.data.buffer.write(data)
                key.data.buffer.flush()
                if key.data is sys.stderr and data:
                    self.mid_line = not data.endswith(b'\n')
        return bool(ready)

    def _hear(self, rank: int, data: bytes) -> None:
        *lines, self.unread[rank] = (self.unread[rank] + data).split(b'\n')
        for line in lines:
            self.words[rank].update(json.loads(line))
        self.alive = self.alive | {rank} if data else self.alive - {rank}
        if self.failure is None and (
            'error' in self.words[rank] or (not data and 'done' not in self.words[rank])
        ):
            self.failure = rank

    def end(self) -> None:
        """End mpiexec, and the ranks that it leaves behind."""
        self._mute()
        self.status = self.mpiexec.poll()
        self.mpiexec.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.mpiexec.wait(PATIENCE)
        self.mpiexec.kill()
        self.mpiexec.wait()
        self._send(signal.SIGKILL)
        while self.alive and self._listen(PATIENCE):
            pass
        if self.mid_line:
            print(file=sys.stderr)

    def report(self) -> None:
        """Say why the job did not end well, if it did not; UserError or status 1."""
        words, status = {} if self.failure is None else self.words[self.failure], self.status or 0
        if words.get('mistake'):
            raise UserError(words['error'])
        if 'error' in words:
            reason = f'rank {self.failure} failed, so all {len(self.words)} were ended'
        elif self.failure is not None or status < 0:
            ended = (
                'mpiexec' if status < 0 else f'rank {self.failure}, process {words.get("process")},'
            )
            reason = f'{ended} was ended by {_signal_name(abs(status) % 128)}'
        elif status:
            reason = f'mpiexec ended with status {status}'
        else:
            return
        print(f'{words.get("error", "")}error: {reason}', file=sys.stderr)
        sys.exit(1)


def _signal_name(number: int) -> str:
    """The signal that ended a process: Open MPI's mpiexec returns 128 + its number, MPICH's the
    number."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f'status {number}'
    return f'{name}: probably out of memory' if name == 'SIGKILL' else name


class _Launcher:
    """The process that prepared `directory`, and hears what becomes of this rank."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        path = os.path.join(directory, f'rank-{launched_rank()}')
        self.pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # fails where nobody listens
        os.set_blocking(self.pipe, True)
        self.tell(process=os.getpid())

    def tell(self, **words: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self.pipe, json.dumps(words).encode() + b'\n')


def main(directory: str) -> None:
    """Do the job that `directory` describes."""
    launcher = _Launcher(directory)
    job = json.loads(Path(directory, 'job.json').read_text(encoding='utf-8'))
    streams.make_safe()
    speak_only_if_first()
    if job['columns']:  # of the terminal to which mpiexec passes on what this rank prints
        os.environ['TQDM_NCOLS'] = str(job['columns'] - 1)
        sys.stderr.isatty = lambda: True
        os.dup2(2, 1)  # lines and progress bars stay in order
    run(job['job'], job['arguments'], launcher)
    launcher.tell(done=True)


def run(
    job: str,
    arguments: dict[str, Any],
    launcher: _Launcher | None = None,
    at_interrupt: Callable[[], None] = lambda: None,
) -> None:
    """Do `job` (see start_job) in this process, which is a rank; whatever ends it before its time
    ends all ranks.

    launcher: ours; None where somebody's own mpiexec or srun started the ranks. at_interrupt:
    called on rank 0 when the user interrupts it.
    """
    threading.Thread(target=_watch, args=(os.getppid(), launcher), daemon=True).start()
    try:
        from lm_human_preferences.distributed import comm

        call, hparams = function(job), arguments.get('hparams')
        if isinstance(hparams, dict):
            arguments['hparams'] = importlib.import_module(call.__module__).HParams()
            arguments['hparams'].override_from_nested_dict(hparams)
        # A job without hyperparameters averages nothing, so by which engine is no news.
        with contextlib.redirect_stdout(sys.stdout if hparams else io.StringIO()):
            world = comm.init_comm(arguments['hparams'].run.allreduce if hparams else 'auto')
        call(**arguments, comm=world)
    except BaseException as e:
        if isinstance(e, KeyboardInterrupt) and launched_rank() == 0:
            at_interrupt()
        _fail(e, launcher)


def function(job: str) -> Callable[..., Any]:
    """What 'module:function' names."""
    module, name = job.split(':')
    return getattr(importlib.import_module(module), name)


def speak_only_if_first() -> None:
    """Let rank 0 write to the console, to standard output line by line, and no other."""
    if launched_rank():
        sys.stdout = sys.stderr = open(os.devnull, 'w', encoding='utf-8')
    elif launched_size() > 1:
        stdout: Any = sys.stdout  # its declared type has no `reconfigure`
        stdout.reconfigure(line_buffering=True)


def _watch(parent: int, launcher: _Launcher | None) -> None:
    """End this rank, whatever it is waiting for, when mpiexec or the launcher is gone."""
    heard = select.poll()
    if launcher:
        heard.register(launcher.pipe, 0)
    while os.getppid() == parent and not heard.poll(1000):
        pass
    if launcher:
        launcher.tell(error="mpiexec's process that started this rank was killed\n", mistake=False)
        shutil.rmtree(launcher.directory, ignore_errors=True)
    os._exit(1)


def _fail(error: BaseException, launcher: _Launcher | None) -> None:
    """Let the user know of `error`, once, and end all ranks."""
    mistake, interrupted = isinstance(error, UserError), isinstance(error, KeyboardInterrupt)
    text = (
        ' '.join(str(error).splitlines()) if mistake else ''.join(traceback.format_exception(error))
    )
    if not mistake:
        time.sleep(ECHO)
    if launcher:
        launcher.tell(error=text, mistake=mistake)
        time.sleep(60)  # the launcher ends all ranks
    elif not interrupted:
        time.sleep(FIRST_WORD if launched_rank() else 0)
        message = f'error: {text}' if mistake else f'{text}error: rank {launched_rank()} failed'
        print(message, file=sys.__stderr__, flush=True)
        time.sleep(ECHO)  # mpiexec drops what it has not yet passed on when ranks abort
    try:
        from lm_human_preferences.distributed import comm

        comm.abort(2 if mistake else 130 if interrupted else 1)
    finally:
        os._exit(1)


if __name__ == '__main__':
    main(sys.argv[1])
