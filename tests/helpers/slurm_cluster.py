"""A Slurm cluster of this machine alone, for tests and benchmarks.

All its files are in one folder, and its ports, its munge and the key of that are its own. It needs
root, Debian's slurm-wlm and munge, and for `srun --mpi=pmix` also libpmix-dev.
"""

import contextlib
import functools
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest
from launched import eventually

PROGRAMS = ('slurmctld', 'slurmd', 'srun', 'sbatch', 'scancel', 'sinfo', 'munged', 'setpriv')
# Programs of the system are not on everybody's PATH.
PATH = f'{os.environ["PATH"]}:/usr/sbin:/sbin'
SECONDS = 60  # to start, and for a command
# Of CPUs there are more than the machine has: jobs that have ended hold theirs for a moment.
CONFIGURATION = """
ClusterName=one
FirstJobId={first_job}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait=5
JobRequeue=1
SchedulerParameters=sched_interval=1,batch_sched_delay=0
NodeName={host} NodeAddr=127.0.0.1 CPUs=16 RealMemory=1000 State=UNKNOWN
PartitionName=p Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def why_not():
    """Return why there can be no cluster on this machine; None if there can."""
    missing = [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]
    if missing:
        return f'a cluster of Slurm needs {", ".join(missing)}: apt install slurm-wlm munge'
    return 'a cluster of Slurm is started as root' if os.geteuid() else None


class Cluster:
    """Daemons with all files in `folder`. `variables` are for commands that are to find them."""

    def __init__(self, folder, stack):
        self.folder, self.stack = Path(folder), stack
        self.variables = {'SLURM_CONF': f'{folder}/slurm.conf', 'PATH': PATH}
        self.environment = {**os.environ, **self.variables}
        munge = self.folder / 'munge'
        for each in (munge, self.folder / 'state', self.folder / 'spool'):
            each.mkdir()
        (munge / 'key').write_bytes(os.urandom(1024))
        (munge / 'key').chmod(0o600)
        own = ('127.0.0.1', 0)
        with socket.create_server(own) as first, socket.create_server(own) as second:
            ports = [each.getsockname()[1] for each in (first, second)]
        # MPICH names its shared memory by the job: clusters side by side must not share them.
        settings = {'folder': folder, 'ports': ports, 'first_job': random.randrange(1, 60_000_000)}
        host = socket.gethostname().partition('.')[0]
        (self.folder / 'slurm.conf').write_text(CONFIGURATION.format(host=host, **settings))
        files = {'socket': 'socket', 'key-file': 'key', 'log-file': 'log', 'seed-file': 'seed'}
        options = [f'--{option}={munge / name}' for option, name in files.items()]
        self.start('munged', '--foreground', '--force', f'--pid-file={munge}/pid', *options)
        eventually((munge / 'socket').exists, SECONDS)
        self.start('slurmctld', '-D')
        self.start('slurmd', '-D')
        eventually(lambda: 'idle' in self.run('sinfo', '-h', '-o', '%t').stdout, SECONDS)

    def start(self, program, *options):
        """Start a daemon that ends with the stack, and with this process, however that ends."""
        settings = {'env': self.environment, 'stdin': subprocess.DEVNULL, 'start_new_session': True}
        with (self.folder / f'{program}.log').open('wb') as log:
            command = ['setpriv', '--pdeathsig', 'TERM', program, *options]
            daemon = subprocess.Popen(command, stdout=log, stderr=log, **settings)
        self.stack.callback(daemon.wait)
        self.stack.callback(daemon.kill)

    def run(self, *command, **settings):
        settings = {'capture_output': True, 'text': True, 'timeout': SECONDS, **settings}
        return subprocess.run(command, env=self.environment, **settings)

    def kill_jobs(self):
        """Kill what the cluster has started: a batch script outlives its job."""
        mark = f'SLURM_CONF={self.variables["SLURM_CONF"]}'.encode()
        for path in Path('/proc').glob('[0-9]*/environ'):
            with contextlib.suppress(OSError):
                if mark in path.read_bytes().split(b'\0'):
                    os.kill(int(path.parent.name), signal.SIGKILL)

    @functools.cached_property
    def speaks_pmix(self):
        """Return whether Slurm finds the library for `srun --mpi=pmix`."""
        lines = self.run('srun', '--mpi=list').stdout.splitlines()
        return 'pmix' in [line.strip() for line in lines]


@contextlib.contextmanager
def on_demand():
    """Yield a function that returns a Cluster, started at its first call, until the block ends."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def cluster():
            # A short path, as those of sockets are limited to 108 characters.
            folder = tempfile.TemporaryDirectory(prefix='lmhp-slurm-', ignore_cleanup_errors=True)
            started = Cluster(stack.enter_context(folder), stack)
            stack.callback(started.kill_jobs)
            return started

        yield cluster


@pytest.fixture(scope='session')
def slurm():
    """The cluster of this process of pytest; each has its own."""
    if reason := why_not():
        pytest.skip(reason)
    with on_demand() as cluster:
        yield cluster()
