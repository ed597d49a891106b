"""Ranks that fail, are killed or stopped, and their launchers: no hang, no leftover, one error.

Each fault is tried under launchers that differ in it. Runs that go on after it: test_resume_kill.py
and, under Slurm, here.
"""

import os
import re
import signal
import socket
import sys
from pathlib import Path

import documentation
import pytest
import real_launchers
from launched import FOREVER, MPIEXEC, REPOSITORY, eventually, start_job, torch_variables

from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.checkpointing.tf_bundle import Bundle

pytestmark = pytest.mark.slow
END = 20  # seconds in which everything has to end
TIMEOUT = 3  # seconds that ranks wait for each other
QUICK = ('--rewards.train_new_model=off', '--rewards.trained_model=test')
BATCH_SECONDS = 180  # for each part of the batch job, on a machine that has much else to do


@pytest.fixture
def launcher(name, request):
    return real_launchers.find(name, request)


@pytest.fixture
def working(launcher, tmp_path):
    launch = launcher.start_job(tmp_path, 'work', TIMEOUT=str(TIMEOUT))
    launch.reach_line('2 ranks work')
    return launch


@pytest.fixture
def training(launcher, tmp_path):
    launch = launcher.train(tmp_path, *FOREVER, *QUICK)
    launch.reach(3)
    return launch


@pytest.fixture
def start_unwatched(tmp_path):
    """Return a function that launches both ranks of a job without a launcher, which ends none."""
    with socket.create_server(('127.0.0.1', 0)) as free:
        of_ranks = torch_variables(2, 'localhost', free.getsockname()[1])
    return lambda name: [start_job(tmp_path / each['RANK'], name, **each) for each in of_ranks]


@pytest.mark.parametrize('name', ['our launcher', 'torchrun'])
def test_an_exception_of_one_rank_ends_all(launcher, tmp_path):
    launch = launcher.start_job(tmp_path, 'fail')
    assert launch.end_within(60) == 1
    assert launch.errors().startswith('Traceback (most recent call last):')
    assert launch.errors().count('ArithmeticError: rank 1 cannot count') == 1


@pytest.mark.parametrize('name', ['mpiexec of Open MPI'])
def test_a_wrong_option_is_told_once(launcher, tmp_path):
    """Before the ranks meet."""
    launch = launcher.train(tmp_path, '--ppo.batch=8')
    assert launch.end_within(60) == 2
    assert launch.errors().count("error: No such option '--ppo.batch'. ") == 1


def test_a_port_that_is_taken_is_told_in_one_line(tmp_path):
    with socket.create_server(('127.0.0.1', 0)) as server:
        port = server.getsockname()[1]
        [variables, _] = torch_variables(2, 'localhost', port)
        launch = start_job(tmp_path, 'work', **variables)
        assert launch.end_within(60) == 2
    told = f'error: rank 0 cannot listen at localhost, TCP port {port} .*: set MASTER_PORT to .*'
    assert re.fullmatch(told, launch.errors())


def test_only_one_of_two_unwatched_ranks_speaks_and_tells_the_error_of_all(start_unwatched):
    """The others do not lose the store, which rank 0 keeps, before they know that it is told."""
    first, second = start_unwatched('talk')
    assert (first.wait(), second.wait()) == (2, 2)
    assert first.output().splitlines()[1] == 'rank 0 of [0, 1] speaks'
    told = first.errors() + second.errors()  # the first rank that finds the error reports it
    assert told.count('error: /labels.json is not a label file') == told.count('label file') == 1
    assert second.output() == ''


def test_a_killed_rank_that_nobody_watches_ends_the_other(start_unwatched):
    """Though nothing but the connection tells."""
    first, second = start_unwatched('work')
    first.reach_line('2 ranks work')
    second.process.kill()
    assert first.wait(END) == 1
    assert re.fullmatch('error: rank 0 has lost another: .*', first.errors())


@pytest.mark.parametrize('name', ['mpiexec of Open MPI', 'srun by PMI2', 'srun without MPI'])
def test_a_killed_rank_ends_all(working):
    """By `--mpi 2`, in a training: test_resume_kill.py."""
    os.kill(working.ranks()[1], signal.SIGKILL)
    assert working.end_within(END) != 0
    assert 'lm_human_preferences' not in working.errors(), 'the traceback of a lost connection'


@pytest.mark.parametrize('name', ['our launcher', 'torchrun'])
def test_a_killed_launcher_leaves_no_rank_behind(working):
    working.process.kill()
    assert working.end_within(2) == -signal.SIGKILL


@pytest.mark.parametrize('name', ['our launcher'])
def test_a_killed_parent_of_the_ranks_leaves_none_behind(working):
    """mpiexec and its ranks do not notice by themselves."""
    rank = working.ranks()[0]
    # Else the files through which the ranks share memory would stay behind.
    mapped = re.findall(r'/dev/shm/.*', Path(f'/proc/{rank}/maps').read_text())
    assert mapped and all(each.endswith(' (deleted)') for each in mapped)
    status = Path(f'/proc/{rank}/stat').read_text()
    os.kill(int(status.rpartition(')')[2].split()[1]), signal.SIGKILL)
    assert working.end_within(END) != 0


@pytest.mark.parametrize('name, rank', [('our launcher', 0), ('our launcher, horovod', 1)])
def test_a_stopped_rank_ends_all(working, rank):
    os.kill(working.ranks()[rank], signal.SIGSTOP)
    assert working.end_within(TIMEOUT + END) == 1
    told = f'error: rank {1 - rank} has lost another: .*; see --run.allreduce_timeout'
    assert re.fullmatch(told, working.errors())


def test_a_rank_that_never_starts(tmp_path):
    """The other is inside MPI_Init, which ends at nothing else."""
    launch = start_job(tmp_path, 'work', started_by=(MPIEXEC, '-n', '2'), TIMEOUT='1')
    late = eventually(lambda: len(ranks := launch.ranks()) == 2 and ranks[1])
    os.kill(late, signal.SIGSTOP)
    assert launch.end_within(60) != 0
    lines = launch.errors().splitlines()
    assert lines[0] == 'Timeout (0:00:06)!'
    assert lines.count(lines[0]) == 1
    assert any(line.endswith(' in load_mpi') for line in lines)


def sigterm_to_the_launcher(launch):
    launch.process.terminate()


def ctrl_c(launch):
    """The terminal sends it to all of its process group."""
    os.killpg(launch.process.pid, signal.SIGINT)


def sigterm_to_a_rank(launch):
    """The file `lock` names the first one."""
    rank = re.match(r'process (\d+) on ', (launch.run / 'lock').read_text())
    os.kill(int(rank[1]), signal.SIGTERM)


@pytest.mark.parametrize(
    'name, ask, status',
    [
        ('torchrun', sigterm_to_the_launcher, 1),
        ('our launcher, horovod', ctrl_c, 130),
        ('mpiexec of MPICH', sigterm_to_a_rank, 130),
    ],
)
def test_a_signal_saves_the_step(training, ask, status):
    ask(training)
    assert training.end_within(END) == status
    saved = re.search(r'Step (\d+) of the policy is saved; to go on', training.errors())
    assert saved, training.errors()
    latest = checkpoints.latest(training.run / 'policy' / 'checkpoints')
    assert latest.endswith(f'model.ckpt-{saved[1]}')
    assert not (training.run / 'lock').exists()
    assert training.errors().count('Stopping: the current step is saved if') == 1


@pytest.mark.parametrize('name', ['srun by PMIx'])
def test_a_signal_leaves_a_whole_checkpoint(launcher, training):
    """Though Open MPI does not wait for another one. Slurm asks the ranks, as at a time limit."""
    (job,) = {env.get('SLURM_JOB_ID') for env in training.processes().values()} - {None}
    launcher.cluster.run('scancel', '--signal=TERM', job, check=True)
    assert training.end_within(END) != 0
    bundle = Bundle(checkpoints.latest(training.run / 'policy' / 'checkpoints'))
    assert {name: bundle[name].shape for name in bundle}['policy/model/wte'] == (27, 7)


def test_a_batch_job_goes_on_after_its_time_limit(slurm, tmp_path):
    """The signal is sent by `scancel --batch`: Slurm itself needs half a minute for it."""
    changes = {
        '#SBATCH --ntasks=8\n': '#SBATCH --ntasks=2\n',
        '#SBATCH --gpus-per-task=1\n': '',
        '.venv/bin/python ./launch.py': f'{sys.executable} {REPOSITORY}/launch.py',
        'descriptiveness': 'test',
        '/shared/runs': str(tmp_path),
        '--run.resume on': f'--run.resume on --run.console original {FOREVER[0]} {" ".join(QUICK)}',
    }
    script, output = tmp_path / 'job.sh', tmp_path / 'output'
    script.write_text(documentation.changed(documentation.page('docs/slurm.sh'), changes))
    words = ('--parsable', f'--output={output}', script)
    job = slurm.run('sbatch', *words, cwd=REPOSITORY, check=True).stdout.strip()

    def said(pattern):
        return re.search(pattern, output.read_text() if output.exists() else '')

    try:
        eventually(lambda: said(r'\[ppo_step 3\]'), BATCH_SECONDS)
        slurm.run('scancel', '--signal=TERM', '--batch', job, check=True)
        saved = eventually(lambda: said(r'Step (\d+) of the policy is saved'), BATCH_SECONDS)
        latest = checkpoints.latest(tmp_path / 'slurm' / 'policy' / 'checkpoints')
        assert latest.endswith(f'model.ckpt-{saved[1]}')
        following = rf'\[ppo_step {int(saved[1]) + 1}\]'
        eventually(lambda: said(rf'{saved[0]}[^~]*{following}'), BATCH_SECONDS)
    finally:
        # Else the script takes the end for that of its time, and goes back into the queue.
        slurm.run('scontrol', 'update', f'JobId={job}', 'Requeue=0')
        slurm.run('scancel', job)
        eventually(lambda: not slurm.run('squeue', '-h').stdout, BATCH_SECONDS)
    assert not re.search(following, output.read_text().partition(saved[0])[0])
