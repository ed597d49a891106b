"""Starts the ranks of a job by mpiexec, passes on what they print, and leaves none of them behind.

Launcher and ranks share a private directory. `job.json` in it says what to do. Rank r keeps the named pipe `rank-r`
open while it lives and says through it, one JSON object a line, what becomes of it (see utils/rank.py). So the launcher
knows which rank failed first, and how; and a rank knows when the launcher is gone.
"""
import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.errors import UserError

# How our launcher and those of Open MPI, MPICH and Slurm tell a process how many ranks there are, and which it is.
SIZE_VARIABLES = ('LMHP_RANKS', 'OMPI_COMM_WORLD_SIZE', 'PMI_SIZE', 'SLURM_STEP_NUM_TASKS')
RANK_VARIABLES = ('OMPI_COMM_WORLD_RANK', 'PMI_RANK', 'SLURM_PROCID')
PATIENCE = 3  # seconds that mpiexec has to end its ranks
LAST_WORDS = 1  # seconds that what was printed before the end has to arrive


def launched_size():
    """How many ranks the launcher of this process says it started; 1 outside of MPI."""
    return _number(SIZE_VARIABLES, 1)


def launched_rank():
    """Which of them this process is, from 0."""
    return _number(RANK_VARIABLES, 0) if launched_size() > 1 else 0


def _number(variables, default):
    return next((int(os.environ[name]) for name in variables if os.environ.get(name, '').isdecimal()), default)


def launch(job, arguments, size):
    """Run `job` (see launch.run) in `size` ranks on this host; return when all have ended well.

    UserError: a mistake that a rank found. SystemExit: 1 when a rank failed, 128 + N after signal N.
    """
    mpiexec, is_open_mpi = find_mpiexec()
    with (tempfile.TemporaryDirectory(prefix='lmhp-', ignore_cleanup_errors=True) as directory,
          _signals_caught() as signals):
        Path(directory, 'job.json').write_text(json.dumps({
            'job': job, 'on_terminal': sys.stderr.isatty(),
            'arguments': {name: value.to_nested_dict() if isinstance(value, hyperparams.HParams) else value
                          for name, value in arguments.items()}}), encoding='utf-8')
        ranks = _Ranks(directory, size)
        ranks.start([mpiexec, *options(is_open_mpi, size, os.cpu_count()), sys.executable, '-P', '-m',
                     'lm_human_preferences.utils.rank', directory], environment(directory, size, is_open_mpi))
        try:
            ranks.follow(signals)
        finally:
            ranks.end()
    if signals:
        sys.exit(128 + signals[0])
    ranks.report()


def find_mpiexec():
    """(path, whether it is Open MPI's) of this environment's mpiexec, else of the first one on PATH; UserError."""
    own = Path(sys.executable).with_name('mpiexec')
    path = str(own) if own.exists() else shutil.which('mpiexec')
    if path is None:
        raise UserError('there is no mpiexec to start ranks with: `sh tools/setup.sh` installs one, or take --mpi 1')
    version = subprocess.run([path, '--version'], capture_output=True, text=True, check=False)
    return path, 'open-mpi' in version.stdout.lower()


def options(is_open_mpi, size, processors):
    """mpiexec's options for `size` ranks, all on this host even where a batch system offers more of them."""
    if not is_open_mpi:
        return ['-rmk', 'user', '-launcher', 'fork', '-n', str(size)]
    crowded = ['--oversubscribe'] if size > processors else []
    return ['--host', f'localhost:{size}', '--bind-to', 'none', *crowded, '-n', str(size)]


def environment(directory, size, is_open_mpi):
    """Variables of the ranks. Their temporary files are in `directory`, and go with it."""
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get('PYTHONPATH')])]
    variables = {**os.environ, 'LMHP_RANKS': str(size), 'TMPDIR': directory, 'PYTHONPATH': os.pathsep.join(paths),
                 'COLUMNS': str(shutil.get_terminal_size().columns)}
    if is_open_mpi and os.geteuid() == 0:
        print('note: this is root, so Open MPI is told that it may run as root', file=sys.stderr)
        variables.update(OMPI_ALLOW_RUN_AS_ROOT='1', OMPI_ALLOW_RUN_AS_ROOT_CONFIRM='1')
    return variables


@contextlib.contextmanager
def _signals_caught():
    """Gather the signals that ask this process to end in a list, save those that it ignores."""
    caught = []
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    before = {n: signal.signal(n, lambda number, frame: caught.append(number)) for n in numbers}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Ranks:
    """The ranks of one job as their launcher sees them, and the mpiexec that runs them."""

    def __init__(self, directory, size):
        self.selector = selectors.DefaultSelector()
        self.said = [b''] * size
        self.alive = {}  # rank -> number of its process
        self.failure = None  # (rank, what it said) of the first that failed
        self.mid_line = False  # what was passed on to standard error ends in one, such as a progress bar
        for rank in range(size):
            path = os.path.join(directory, f'rank-{rank}')
            os.mkfifo(path, 0o600)
            self._read(os.open(path, os.O_RDONLY | os.O_NONBLOCK), rank)

    def _read(self, stream, of):
        self.selector.register(stream, selectors.EVENT_READ, of)

    def start(self, command, variables):
        """Start mpiexec, in a session of its own: the terminal's Ctrl-C is for the launcher only."""
        self.mpiexec = subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, start_new_session=True)
        self._read(self.mpiexec.stdout, sys.stdout)
        self._read(self.mpiexec.stderr, sys.stderr)

    def follow(self, signals):
        """Pass on what the ranks print until all have ended, one has failed, or a signal has come."""
        while self.mpiexec.poll() is None and not self.failure and not signals:
            self._listen(0.2)
        until = time.monotonic() + LAST_WORDS
        while not signals and time.monotonic() < until and self._listen(0.2):
            pass

    def _listen(self, seconds):
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

    def _hear(self, rank, data):
        self.said[rank] += data
        *lines, _ = self.said[rank].split(b'\n')
        words = {name: value for line in lines for name, value in json.loads(line).items()}
        if data:
            self.alive[rank] = words['process']
        else:
            del self.alive[rank]
        if 'error' in words or not data and 'done' not in words:
            self.failure = self.failure or (rank, words)

    def end(self):
        """End mpiexec, and the ranks that it leaves behind."""
        for key in list(self.selector.get_map().values()):
            if not isinstance(key.data, int):  # what mpiexec says of being ended is no news
                self.selector.unregister(key.fileobj)
        self._end_mpiexec()
        while self.alive and self._listen(0.2):
            pass
        for process in self.alive.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        while self.alive and self._listen(PATIENCE):
            pass
        if self.mid_line:
            print(file=sys.stderr)

    def _end_mpiexec(self):
        if self.failure and 'error' not in self.failure[1]:  # then it ends by itself, and its status says why
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.mpiexec.wait(PATIENCE)
        self.status = self.mpiexec.poll()
        self.mpiexec.terminate()
        try:
            self.mpiexec.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.mpiexec.kill()
            self.mpiexec.wait()

    def report(self):
        """Tell the user why the job did not end well, if it did not; UserError or status 1."""
        rank, words = self.failure or (None, {})
        if words.get('mistake'):
            raise UserError(words['error'])
        if 'error' in words:
            message = f'{words["error"]}error: rank {rank} failed, so all {len(self.said)} were ended'
        elif self.status is not None and self.status < 0:
            message = f'error: mpiexec was ended by {_signal_name(-self.status)}'
        elif self.failure:
            message = f'error: rank {rank}, process {words["process"]}, was ended by {_signal_name(self.status)}'
            if message.endswith('SIGKILL'):
                message += ': there was no memory left, or somebody did it'
        elif self.status:
            message = f'error: mpiexec ended with status {self.status}'
        else:
            return
        print(message, file=sys.stderr)
        sys.exit(1)


def _signal_name(status):
    """The signal that ended a process, of which Open MPI's mpiexec returns 128 + N, MPICH's N."""
    try:
        return signal.Signals(status - 128 if status > 128 else status).name
    except (TypeError, ValueError):
        return f'status {status}'
