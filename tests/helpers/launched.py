"""Jobs of several ranks, started by the command line and watched from outside."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
# Seconds for what has to happen at some time, on a machine that has much else to do, too.
PATIENCE = 300
FAULTS = int(os.environ.get('LMHP_FAULTS', 2))  # how often a test that interrupts at random does so
ROOT_MAY = {'OMPI_ALLOW_RUN_AS_ROOT': '1', 'OMPI_ALLOW_RUN_AS_ROOT_CONFIRM': '1'}
FOREVER = ('--ppo.total_episodes=64_000_000', '--run.save_interval=1')
# A reward model that is trained in a moment, where it is not the point.
SMALL = (
    '--rewards.train_new_model.labels.num_train=64',
    '--rewards.train_new_model.normalize_samples=16',
)
PYTHONPATH = f'{REPOSITORY}:{REPOSITORY}/tests/helpers'  # of the programs in tests/helpers
EVERYWHERE = ('auto', 'torch')  # for --run.allreduce on every machine with MPI
MPIEXEC = Path(sys.executable).with_name('mpiexec')
needs_mpi = pytest.mark.skipif(
    not MPIEXEC.exists(), reason='this environment has no mpiexec of its own'
)
# Variables by which launchers tell a process its rank, and all that they set, by how names begin.
RANK_VARIABLES = ('PMI_RANK', 'OMPI_COMM_WORLD_RANK', 'PMIX_RANK', 'RANK', 'SLURM_PROCID')
LAUNCH_VARIABLES = ('MPI_LOCALRANKID', 'RANK', 'LOCAL_RANK', 'WORLD_SIZE')
LAUNCH_PREFIXES = ('OMPI_', 'PMI_', 'PMIX_', 'SLURM_', 'MASTER_', 'TORCHELASTIC_')
CONSOLE = ('--run.console=original',)  # prints lines such as `[ppo_step N]`, which tests wait for
TRAININGS = {'train_policy', 'train_reward', 'resume'}

_started = []  # by the present test


def torch_variables(size, address, port):
    """Return the variables of each of `size` ranks, as Kubernetes and clouds set them."""
    common = {'WORLD_SIZE': str(size), 'MASTER_ADDR': address, 'MASTER_PORT': str(port)}
    return [{**common, 'RANK': str(rank)} for rank in range(size)]


def output_of(command, environment=os.environ, seconds=PATIENCE):
    """Return what a command prints, which ends well; each of its processes has one thread."""
    environment = {**environment, 'OMP_NUM_THREADS': '1'}
    streams = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT, 'text': True}
    done = subprocess.run(command, env=environment, timeout=seconds, **streams)
    assert done.returncode == 0, done.stdout
    return done.stdout


def with_console(words) -> list[str]:
    """Add CONSOLE to the words of a command line, if it is a training."""
    words = list(map(str, words))
    return [*words, *CONSOLE] if TRAININGS & set(words[:2]) else words


def set_launcher(monkeypatch, variables):
    """Let a launcher that sets these variables have started this process; {}: none has."""
    for name in list(os.environ):
        if name in LAUNCH_VARIABLES or name.startswith(LAUNCH_PREFIXES):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def eventually(found, seconds=PATIENCE):
    """Return what `found()` returns as soon as it is true, within so many seconds."""
    until = time.monotonic() + seconds
    while not (result := found()):
        assert time.monotonic() < until, f'not within {seconds} seconds: {found}'
        time.sleep(0.02)
    return result


def end_what_was_started():
    """Kill the processes that the present test has left running, as one that failed may have."""
    while _started:
        launch = _started.pop()
        if launch.process.poll() is None:
            for process in launch.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            launch.process.wait()


class Launch:
    """A command with all files in `directory`; its processes share a mark in the environment."""

    def __init__(
        self,
        directory,
        *words,
        command=('launch.py', 'train_policy', 'test', 'run'),
        started_by=(),
        stdout=None,
        stderr=None,
        **env,
    ):
        self.run = directory / 'run'
        self.temporary = directory / 'tmp'
        self.temporary.mkdir(parents=True)
        self.stdout, self.stderr = directory / 'stdout', directory / 'stderr'
        self.mark = f'LAUNCHED_BY_TEST={uuid.uuid4()}'
        save_dir = [f'--save_dir={directory}'] if 'train_policy' in command else []
        program = [sys.executable, REPOSITORY / command[0]]
        # COLUMNS and PYTHONWARNINGS: what a tester has set would be seen in what is printed.
        own = {'OMP_NUM_THREADS': '1', 'COLUMNS': '', 'PYTHONWARNINGS': '', **ROOT_MAY}
        own.update({'TMPDIR': str(self.temporary), **env, **dict([self.mark.split('=')])})
        self.process = subprocess.Popen(
            [*started_by, *program, *with_console([*command[1:], *save_dir, *words])],
            env={**os.environ, **own},
            stdout=stdout or self.stdout.open('wb'),
            stderr=stderr or self.stderr.open('wb'),
            cwd=directory,
            start_new_session=True,
        )
        _started.append(self)

    def output(self):
        return self.stdout.read_text()

    def errors(self):
        return re.sub(r'.*\r|(reward model|policy):.*', '', self.stderr.read_text()).strip()

    def wait(self, seconds=PATIENCE):
        return self.process.wait(seconds)

    def reach(self, step):
        self.reach_line(f'[ppo_step {step}]')

    def reach_line(self, line):
        eventually(lambda: line in self.output() or self.process.poll() is not None)
        assert self.process.poll() is None, self.errors()

    def processes(self):
        """Return {process: its environment variables}."""
        found = {}
        for path in Path('/proc').glob('[0-9]*/environ'):
            with contextlib.suppress(OSError):  # it has ended
                variables = path.read_bytes().decode(errors='replace').split('\0')
                if self.mark in variables:
                    found[int(path.parent.name)] = dict(v.partition('=')[::2] for v in variables)
        return found

    def ranks(self):
        """Return the processes of the ranks, in their order."""
        numbered = {}
        for process, env in self.processes().items():
            rank = next((env[name] for name in RANK_VARIABLES if name in env), None)
            numbered[rank] = process
        return [numbered[rank] for rank in sorted(numbered.keys() - {None})]

    def end_within(self, seconds):
        """Return the exit status; within so many seconds everything has to end."""
        since = time.monotonic()
        status = self.wait(seconds)
        self.assert_nothing_left(since + seconds - time.monotonic())
        return status

    def assert_nothing_left(self, seconds):
        """All processes end within so many seconds."""
        eventually(lambda: not self.processes(), seconds)


def start_job(directory, name, **settings):
    """Launch two ranks of a job in rank_jobs.py."""
    settings = {'PYTHONPATH': PYTHONPATH, **settings}
    return Launch(directory, command=('tests/helpers/rank_jobs.py', name), **settings)
