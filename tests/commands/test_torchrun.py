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
from command_line import invoke
from launched import PYTHONPATH, REPOSITORY, SMALL, TORCHRUN, Launch, job, needs_mpi, start_by_slurm

import sample
from lm_human_preferences.checkpointing import checkpoints
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
    """Two trainings by torchrun at the same time, and one by our launcher, all with one engine."""
    launches = [
        Launch(
            tmp_path_factory.mktemp('torchrun'),
            '--run.allreduce=torch',
            *SHORT,
            started_by=TORCHRUN,
            PYTHONPATH=without_mpi,
        )
        for _ in range(2)
    ]
    ours = Launch(tmp_path_factory.mktemp('ours'), '--mpi=2', '--run.allreduce=torch', *SHORT)
    for launched in (*launches, ours):
        assert launched.wait() == 0, launched.errors()
    return *launches, ours


def parameters_of(launched):
    bundle = Bundle(str(launched.run / 'policy/checkpoints/model.ckpt-4'))
    return {name: bundle[name].tobytes() for name in bundle if name.startswith('policy/')}


@needs_mpi
def test_same_parameters_as_by_our_launcher(trained):
    """To the bit; and runs at once do not meet."""
    first, second, ours = map(parameters_of, trained)
    assert 'policy/model/wte' in ours
    assert first == ours
    assert second == ours


@needs_mpi
def test_same_console_as_by_our_launcher(trained):
    *by_torchrun, ours = trained
    expected = without_times(ours)
    assert expected.startswith('2 ranks, averaging by torch (gloo)\n')
    for launched in by_torchrun:
        assert without_times(launched) == expected
        assert re.sub('.*torch/distributed/run.py.*', '', launched.errors()).strip() == ''
        launched.assert_nothing_left(10)


def without_times(launched):
    """What it printed, without what differs between runs that are the same."""
    text = launched.output().replace(str(launched.run), 'RUN')
    return re.sub(r'(eps/s|step_time)=\S+|.*(fps|elapsed).*', '', text)


def queries_in(text):
    return re.findall(r'^={80}\n(.*)\n.*$', text, re.MULTILINE)


def test_sampling(trained, tmp_path):
    """The same queries in the same order as by one process."""
    options = [f'--save_dir={trained[0].run}', '--nsamples=5', '--seed=1']
    sampling = Launch(
        tmp_path, *options, '--mpi=2', command=('sample.py', 'sample'), started_by=TORCHRUN
    )
    by_one = invoke(['sample', '--mpi=1', *options], sample.cli)
    assert sampling.wait() == 0, sampling.errors()
    queries = queries_in(sampling.output())
    assert len(queries) == 5
    assert queries == queries_in(by_one.stdout)


def launch(directory, program, *words):
    """A command by torchrun that has ended well."""
    launched = Launch(directory, *words, command=(program,), started_by=TORCHRUN)
    assert launched.wait() == 0, launched.errors()
    return launched


def test_reward_training(tmp_path):
    """One line per fact, and a model in the end."""
    settings = '--labels.num_train=64', '--normalize_samples=16', f'--save_dir={tmp_path}'
    launched = launch(tmp_path, 'launch.py', 'train_reward', 'test', 'run', *settings)
    assert launched.output().startswith('2 ranks, averaging by torch (gloo)\n')
    assert launched.output().splitlines().count('hparams:') == 1
    bundle = Bundle(checkpoints.latest(launched.run / 'reward_model/checkpoints'))
    assert 'reward_model/reward_norm/gain' in bundle


def test_evaluation(trained, tmp_path):
    """One rank does it; the other ends, as this command cannot share its work."""
    run = tmp_path / 'run'
    shutil.copytree(trained[0].run, run)
    launched = launch(tmp_path, 'launch.py', 'evaluate', run, '--queries=2')
    assert launched.errors().count('note: one of 2 ranks does all of this command') == 1
    assert (run / 'evaluation.json').exists()


def test_a_user_error_on_all_ranks_is_one_line(tmp_path):
    """torchrun's own report repeats it, and its exit status is always 1."""
    failed = job(tmp_path, 'raise_user_error', started_by=TORCHRUN)
    lines = failed.errors().splitlines()
    assert lines.count('error: /labels.json is no label file') == 1
    assert failed.errors().count('no label file') == 2
    assert '  traceback : /labels.json is no label file' in lines
    assert re.search(r'exitcode  : 2 \(pid: \d+\)', failed.errors())
    assert failed.process.returncode == 1


def test_an_error_of_one_rank_ends_all(tmp_path):
    failed = job(tmp_path, 'fail', started_by=TORCHRUN)
    lines = failed.errors().splitlines()
    assert lines.count('ArithmeticError: rank 1 cannot count') == 1
    assert lines.count('error: rank 1 failed') == 1
    assert lines.count('  traceback : ArithmeticError: rank 1 cannot count') == 1
    assert 'closed by peer' not in failed.errors()
    assert failed.process.returncode == 1


def test_an_engine_that_needs_mpi(tmp_path, without_mpi):
    failed = Launch(
        tmp_path, '--run.allreduce=horovod', started_by=TORCHRUN, PYTHONPATH=without_mpi
    )
    assert failed.wait() == 1
    error = (
        'error: --run.allreduce horovod needs MPI, which these ranks were started without: take'
        ' auto or torch, or start them by mpiexec'
    )
    assert failed.errors().splitlines().count(error) == 1


def test_a_wrong_option_is_told_once(tmp_path):
    """Before the ranks meet: once by rank 0, once in torchrun's report."""
    failed = Launch(tmp_path, '--ppo.batch=8', started_by=TORCHRUN)
    assert failed.wait() == 1
    lines = failed.errors().splitlines()
    told = 'no such option: --ppo.batch (did you mean --ppo.batch_size?)'
    assert lines.count(f'error: {told}') == 1
    assert lines.count(f'  traceback : {told}') == 1


# ---------------------------------------------------------------- srun without MPI


def test_plain_srun(tmp_path):
    first, second = start_by_slurm(tmp_path, 'talk')
    assert first.wait() == 0, first.errors()
    assert second.wait() == 0, second.errors()
    assert first.output().splitlines() == ['rank 0 of [0, 1] speaks']
    assert second.output() == ''


def test_a_user_error_under_srun_is_one_line(tmp_path):
    """The others do not lose the store, which rank 0 keeps, before they know that it is told."""
    first, second = start_by_slurm(tmp_path, 'raise_user_error')
    assert (first.wait(), second.wait()) == (2, 2)
    assert first.errors() == 'error: /labels.json is no label file'
    assert second.errors() == ''


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
