"""Ranks that torchrun starts, or an srun without MPI: what a user sees of them, and what they do.

Ranks that are killed or stopped: tests/faults/test_torchrun_kill.py.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys

import pytest
from launched import PYTHONPATH, REPOSITORY, SMALL, TORCHRUN, Launch, job, needs_mpi, start_by_slurm

from lm_human_preferences.checkpointing.tf_bundle import Bundle

pytestmark = pytest.mark.slow
SHORT = (*SMALL, '--ppo.total_episodes=256', '--run.log_interval=1')
BLOCKER = """
import sys

for name in ('mpi4py', 'mpi4py.MPI', 'horovod'):
    sys.modules[name] = None
"""


@pytest.fixture(scope='module')
def without_mpi(tmp_path_factory):
    """A folder for PYTHONPATH in which neither mpi4py nor Horovod can be imported."""
    folder = tmp_path_factory.mktemp('blocker')
    (folder / 'sitecustomize.py').write_text(BLOCKER)
    return str(folder)


@pytest.fixture(scope='module')
def trained(tmp_path_factory, without_mpi):
    """A training by torchrun, and one by our launcher at the same time, with the same engine."""
    by_torchrun = Launch(
        tmp_path_factory.mktemp('torchrun'),
        '--run.allreduce=torch',
        *SHORT,
        started_by=TORCHRUN,
        PYTHONPATH=without_mpi,
    )
    ours = Launch(tmp_path_factory.mktemp('ours'), '--mpi=2', '--run.allreduce=torch', *SHORT)
    for launched in by_torchrun, ours:
        assert launched.wait() == 0, launched.errors()
    return by_torchrun, ours


def parameters_of(launched):
    bundle = Bundle(str(launched.run / 'policy/checkpoints/model.ckpt-4'))
    return {name: bundle[name].tobytes() for name in bundle if name.startswith('policy/')}


@needs_mpi
def test_same_parameters_as_by_our_launcher(trained):
    """To the bit; and runs at once do not meet."""
    by_torchrun, ours = map(parameters_of, trained)
    assert 'policy/model/wte' in ours
    assert by_torchrun == ours


@needs_mpi
def test_same_console_as_by_our_launcher(trained):
    by_torchrun, ours = trained
    expected = without_times(ours)
    assert expected.startswith('2 ranks, averaging by torch (gloo)\n')
    assert without_times(by_torchrun) == expected
    assert re.sub('.*torch/distributed/run.py.*', '', by_torchrun.errors()).strip() == ''
    by_torchrun.assert_nothing_left(10)


def without_times(launched):
    """What it printed, without what differs between runs that are the same."""
    text = launched.output().replace(str(launched.run), 'RUN')
    return re.sub(r'(eps/s|step_time)=\S+|.*(fps|elapsed).*', '', text)


def launch(directory, program, *words):
    """A command by torchrun that has ended well."""
    launched = Launch(directory, *words, command=(program,), started_by=TORCHRUN)
    assert launched.wait() == 0, launched.errors()
    return launched


def test_evaluation(trained, tmp_path):
    """One rank does it; the other ends, as this command cannot share its work."""
    run = tmp_path / 'run'
    shutil.copytree(trained[0].run, run)
    launched = launch(tmp_path, 'launch.py', 'evaluate', run, '--queries=2')
    assert launched.errors().count('note: one of 2 ranks does all of this command') == 1
    assert (run / 'evaluation-queries_2.json').exists()


def test_an_error_of_one_rank_ends_all(tmp_path):
    failed = job(tmp_path, 'fail', started_by=TORCHRUN)
    lines = failed.errors().splitlines()
    assert lines.count('ArithmeticError: rank 1 cannot count') == 1
    assert lines.count('error: rank 1 failed') == 1
    assert lines.count('  traceback : ArithmeticError: rank 1 cannot count') == 1
    assert 'closed by peer' not in failed.errors()
    assert failed.process.returncode == 1


def test_a_wrong_option_is_told_once(tmp_path):
    """Before the ranks meet: once by rank 0, once in torchrun's report.

    The exit status of torchrun itself is always 1.
    """
    failed = Launch(tmp_path, '--ppo.batch=8', started_by=TORCHRUN)
    assert failed.wait() == 1
    lines = failed.errors().splitlines()
    told = 'no such option: --ppo.batch (did you mean --ppo.batch_size?)'
    assert lines.count(f'error: {told}') == 1
    assert lines.count(f'  traceback : {told}') == 1
    assert re.search(r'exitcode  : 2 \(pid: \d+\)', failed.errors())


# ---------------------------------------------------------------- srun without MPI


def test_only_one_rank_speaks_and_tells_the_error_of_all(tmp_path):
    """The others do not lose the store, which rank 0 keeps, before they know that it is told."""
    first, second = start_by_slurm(tmp_path, 'talk')
    assert (first.wait(), second.wait()) == (2, 2)
    assert first.output().splitlines() == ['rank 0 of [0, 1] speaks']
    assert first.errors().splitlines()[-1] == 'error: /labels.json is no label file'
    assert first.errors().count('label file') == 1
    assert second.output() == second.errors() == ''


def test_a_killed_rank_under_srun_ends_the_other(tmp_path):
    """Though nothing but the connection tells."""
    first, second = start_by_slurm(tmp_path, 'wait_for_rank_1')
    first.reach_line('2 ranks wait for ever')
    second.process.send_signal(signal.SIGKILL)
    assert first.wait(60) == 1
    assert re.fullmatch('error: rank 0: the connection to another rank is lost: .*', first.errors())


def test_a_taken_port_is_one_line(tmp_path):
    with socket.create_server(('127.0.0.1', 0)) as server:
        port = server.getsockname()[1]
        failed = subprocess.run(
            [sys.executable, REPOSITORY / 'tests/helpers/rank_jobs.py', 'talk'],
            env={
                **os.environ,
                'PYTHONPATH': PYTHONPATH,
                'SLURM_STEP_NUM_TASKS': '2',
                'SLURM_PROCID': '0',
                'MASTER_ADDR': '127.0.0.1',
                'MASTER_PORT': str(port),
            },
            capture_output=True,
            text=True,
        )
    assert failed.returncode == 2
    (line,) = failed.stderr.splitlines()
    assert line.startswith(f'error: rank 0 cannot listen at 127.0.0.1, TCP port {port} (')
    assert line.endswith(
        "): set MASTER_PORT to a free port, and MASTER_ADDR to its host's name, for all ranks"
    )
