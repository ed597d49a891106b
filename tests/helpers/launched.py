"""Jobs of several ranks, started by the command line and watched from outside."""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.checkpointing.tf_bundle import Bundle

REPOSITORY = Path(__file__).resolve().parents[2]
# Seconds for what has to happen at some time, on a machine that has much else to do, too.
PATIENCE = 300
FAULTS = int(os.environ.get('LMHP_FAULTS', 2))  # how often a test that interrupts at random does so
# Open MPI's mpiexec, too.
ROOT_MAY = {'OMPI_ALLOW_RUN_AS_ROOT': '1', 'OMPI_ALLOW_RUN_AS_ROOT_CONFIRM': '1'}
# A checkpoint after every step.
FOREVER = ('--ppo.total_episodes=64_000_000', '--run.save_interval=1')
# A reward model that is trained in a moment, where it is not the point.
SMALL = (
    '--rewards.train_new_model.labels.num_train=64',
    '--rewards.train_new_model.normalize_samples=16',
)
PYTHONPATH = f'{REPOSITORY}:{REPOSITORY}/tests/helpers'  # of the programs in tests/helpers
EVERYWHERE = ('auto', 'torch')  # for --run.allreduce on every machine with MPI
MPIEXEC = Path(sys.executable).with_name('mpiexec')


def torchrun(ranks):
    # As the script torchrun; nothing that is imported is garbage to look for.
    program = 'import gc; gc.disable(); from torch.distributed.run import main; main()'
    words = ('--standalone', '--no-python', f'--nproc-per-node={ranks}')
    return (sys.executable, '-c', program, *words)


def torch_variables(size, address, port):
    """Return the variables of each of `size` ranks, as Kubernetes and clouds set them."""
    common = {'WORLD_SIZE': str(size), 'MASTER_ADDR': address, 'MASTER_PORT': str(port)}
    return [{**common, 'RANK': str(rank)} for rank in range(size)]


def output_of(command, environment=os.environ, seconds=PATIENCE):
    """Return what a command prints, which ends well; each of its processes has one thread."""
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        env={**environment, 'OMP_NUM_THREADS': '1'},
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


# By which launchers tell a process which rank it is.
RANK_VARIABLES = ('PMI_RANK', 'OMPI_COMM_WORLD_RANK', 'PMIX_RANK', 'RANK', 'SLURM_PROCID')
# All that launchers tell it, by name or by how the names begin.
LAUNCH_VARIABLES = ('MPI_LOCALRANKID', 'RANK', 'LOCAL_RANK', 'WORLD_SIZE')
LAUNCH_PREFIXES = ('OMPI_', 'PMI_', 'PMIX_', 'SLURM_', 'MASTER_', 'TORCHELASTIC_')
needs_mpi = pytest.mark.skipif(
    not MPIEXEC.exists(), reason='this environment has no mpiexec of its own'
)
# Numbers of ranks that a test is done with.
ONE_AND_TWO = [1, pytest.param(2, marks=[pytest.mark.slow, needs_mpi])]

_started = []  # by the present test

CONSOLE = ('--run.console=original',)  # prints lines such as `[ppo_step N]`, which tests wait for
TRAININGS = {'train_policy', 'train_reward', 'resume'}


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
        # COLUMNS and PYTHONWARNINGS: what a tester has set would be seen in what is printed.
        environment = {
            **os.environ,
            'OMP_NUM_THREADS': '1',
            'COLUMNS': '',
            'PYTHONWARNINGS': '',
            'TMPDIR': str(self.temporary),
            **ROOT_MAY,
            **env,
            **dict([self.mark.split('=')]),
        }
        self.process = subprocess.Popen(
            [
                *started_by,
                sys.executable,
                REPOSITORY / command[0],
                *with_console([*command[1:], *save_dir, *words]),
            ],
            env=environment,
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

    def assert_checkpoint_is_intact(self):
        bundle = Bundle(checkpoints.latest(self.run / 'policy' / 'checkpoints'))
        assert {name: bundle[name].shape for name in bundle}['policy/model/wte'] == (27, 7)

    def wait(self, seconds=PATIENCE):
        return self.process.wait(seconds)

    def reach(self, step):
        eventually(lambda: f'[ppo_step {step}]' in self.output() or self.process.poll() is not None)
        assert self.process.poll() is None, self.errors()

    def reach_line(self, line):
        eventually(lambda: line in self.output() or self.process.poll() is not None)
        assert self.process.poll() is None, self.errors()

    def processes(self):
        found = {}
        for path in Path('/proc').glob('[0-9]*/environ'):
            try:
                variables = path.read_bytes().decode(errors='replace').split('\0')
            except OSError:
                continue
            if self.mark in variables:
                found[int(path.parent.name)] = dict(v.partition('=')[::2] for v in variables)
        return found

    def ranks(self):
        numbered = {}
        for process, env in self.processes().items():
            rank = next((env[name] for name in RANK_VARIABLES if name in env), None)
            numbered[rank] = process
        return [numbered[rank] for rank in sorted(numbered.keys() - {None})]

    def assert_shared_memory_is_nameless(self):
        """The files through which the ranks share memory would stay behind if they had names."""
        for process in self.ranks():
            mapped = Path(f'/proc/{process}/maps').read_text()
            assert re.search(r'/dev/shm/.* \(deleted\)$', mapped, re.MULTILINE)
            assert not re.search(r'/dev/shm/[^ \n]+$', mapped, re.MULTILINE)

    def end_within(self, seconds):
        """Return the exit status; within so many seconds everything has to end."""
        since = time.monotonic()
        status = self.wait(seconds)
        self.assert_nothing_left(since + seconds - time.monotonic())
        return status

    def assert_nothing_left(self, seconds):
        """All processes end within so many seconds."""
        eventually(lambda: not self.processes(), seconds)


def job(directory, name, **settings):
    launch = start_job(directory, name, **settings)
    launch.wait()
    launch.assert_nothing_left(10)
    return launch


def start_job(directory, name, **settings):
    return Launch(
        directory,
        command=('tests/helpers/rank_jobs.py', name),
        **{'PYTHONPATH': PYTHONPATH, **settings},
    )


def start_by_slurm(directory, name):
    """Launch both ranks of one of rank_jobs, with the variables of an srun without MPI."""
    job_id = random.randrange(10**6)
    return [
        start_job(
            directory / str(rank),
            name,
            SLURM_STEP_NUM_TASKS='2',
            SLURM_PROCID=str(rank),
            SLURM_JOB_ID=str(job_id),
            SLURM_STEP_ID='0',
            SLURM_STEP_NODELIST='localhost',
            SLURM_STEP_NUM_NODES='1',
        )
        for rank in range(2)
    ]
