"""Starting ranks: how mpiexec is found and called, and two ranks as a user sees them."""

import contextlib
import fcntl
import os
import pty
import re
import shutil
import signal
import struct
import sys
import termios

import pytest
from command_line import succeed
from launched import (
    CONSOLE,
    MPIEXEC,
    REPOSITORY,
    SMALL,
    WITHOUT_TORCH,
    Launch,
    job,
    needs_mpi,
    set_launcher,
    start_job,
    torch_variables,
    torchrun,
)

from lm_human_preferences.checkpointing.tf_bundle import Bundle
from lm_human_preferences.cli import launch
from lm_human_preferences.distributed import channel, launch_methods, launcher, waiting, worker
from lm_human_preferences.errors import UserError
from lm_human_preferences.runs import command_record

SHORT = (*SMALL, '--ppo.total_episodes=256', '--run.log_interval=1')
BY_TORCH = '--run.allreduce=torch'
WITHOUT_MPI = """
import sys

for name in ('mpi4py', 'mpi4py.MPI', 'horovod'):
    sys.modules[name] = None
"""


@pytest.mark.parametrize(
    'is_open_mpi, processors, expected',
    [
        (False, 2, '-rmk user -launcher fork -n 4'),
        (True, 4, '--host localhost:4 --bind-to none -n 4'),
        (True, 3, '--host localhost:4 --bind-to none --oversubscribe -n 4'),
    ],
)
def test_options(is_open_mpi, processors, expected):
    assert launcher.mpiexec_options(is_open_mpi, 4, processors) == expected.split()


@pytest.mark.parametrize(
    'is_open_mpi, user, is_noted', [(True, 0, True), (True, 1000, False), (False, 0, False)]
)
def test_root_under_open_mpi(monkeypatch, capsys, is_open_mpi, user, is_noted):
    monkeypatch.setattr(os, 'geteuid', lambda: user)
    monkeypatch.delenv('OMPI_ALLOW_RUN_AS_ROOT', raising=False)
    monkeypatch.delenv('OMPI_ALLOW_RUN_AS_ROOT_CONFIRM', raising=False)
    variables = launcher.rank_environment('/job', 3, is_open_mpi)
    for name in ('OMPI_ALLOW_RUN_AS_ROOT', 'OMPI_ALLOW_RUN_AS_ROOT_CONFIRM'):
        assert variables.get(name) == ('1' if is_noted else None)
    assert ('root' in capsys.readouterr().err) == is_noted


@pytest.mark.parametrize(
    'paths, expected', [('', f'{REPOSITORY}'), ('/a:/b', f'{REPOSITORY}:/a:/b')]
)
def test_environment(monkeypatch, paths, expected):
    monkeypatch.setenv('INHERITED', 'yes')
    monkeypatch.setenv('PYTHONPATH', paths)
    variables = launcher.rank_environment('/job', 3, False)
    assert variables['INHERITED'] == 'yes'
    assert variables['LMHP_RANKS'] == '3'
    assert variables['TMPDIR'] == '/job'
    assert variables['PYTHONPATH'] == expected


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """The environment's own programs, and those on the PATH."""
    own, path = tmp_path / 'own', tmp_path / 'path'
    own.mkdir()
    path.mkdir()
    monkeypatch.setattr(sys, 'executable', str(own / 'python'))
    monkeypatch.setenv('PATH', str(path))
    return own, path


def install(folder, version):
    program = folder / 'mpiexec'
    program.write_text(f'#!/bin/sh\necho "{version}"\n')
    program.chmod(0o755)
    return str(program)


OPEN_MPI_5 = 'mpiexec (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/'
OPEN_MPI_4 = 'mpiexec (OpenRTE) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/'


@pytest.mark.parametrize(
    'version, is_open_mpi',
    [('HYDRA build details:', False), (OPEN_MPI_5, True), (OPEN_MPI_4, True)],
)
def test_mpiexec_on_path(folders, version, is_open_mpi):
    _, path = folders
    program = install(path, version)
    assert launcher.find_mpiexec() == (program, is_open_mpi)


def test_the_environments_own_mpiexec_comes_first(folders):
    own, path = folders
    program = install(own, 'HYDRA')
    install(path, OPEN_MPI_5)
    assert launcher.find_mpiexec() == (program, False)


def test_no_mpiexec(folders):
    with pytest.raises(UserError, match='no mpiexec to start ranks with: .* or use --mpi 1$'):
        launcher.launch_ranks('job:job', {}, 2)


def supervisor(directory, size, command):
    return launcher.RankSupervisor(
        str(directory), size, command, dict(os.environ), waiting.DEFAULT_TIMEOUTS
    )


@pytest.fixture
def supervised(tmp_path, monkeypatch):
    """Return a function (status of mpiexec) -> (supervisor of two ranks, their pipes)."""
    monkeypatch.setattr(launcher.RankSupervisor, '_signal_ranks', lambda self, number: None)
    supervisors = []

    def supervise(status):
        ranks = supervisor(tmp_path, 2, ['sh', '-c', f'exit {status}'])
        supervisors.append(ranks)
        pipes = [channel.StatusPipe(str(tmp_path), rank) for rank in range(2)]
        while not all(status.process for status in ranks.statuses):
            ranks._listen(1)
        return ranks, pipes

    yield supervise
    for ranks in supervisors:
        ranks.end()


def close(pipe):
    os.close(pipe.fd)
    os.close(pipe.life)


def failure_of(ranks, capsys):
    ranks.mpiexec.wait()
    ranks.follow([], saves=False)
    ranks.end()
    with pytest.raises(SystemExit, match='^1$'):
        ranks.raise_failure()
    return capsys.readouterr().err.splitlines()


def test_mpiexec_is_asked_to_end_before_it_is_killed(tmp_path):
    ranks = supervisor(tmp_path, 1, ['sleep', '1000'])
    ranks.end()
    assert ranks.mpiexec.returncode == -signal.SIGTERM


CRASH = 'Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):'
# MPICH's status is the bitwise OR of those of all ranks, and it kills all but the first.
MIXED = signal.SIGKILL | signal.SIGABRT
WAS_KILLED = 'was killed by SIGKILL, probably out of memory'


@pytest.mark.parametrize(
    'status, first, crashed, told',
    [
        (signal.SIGKILL, 0, None, WAS_KILLED),
        (signal.SIGKILL, 1, None, WAS_KILLED),
        (MIXED, 1, 1, 'was killed by SIGABRT'),
        (MIXED, 0, 1, WAS_KILLED),
        (0, 0, None, 'ended without reporting an error'),
    ],
)
def test_the_first_rank_that_ended(supervised, capsys, status, first, crashed, told):
    """Though the launcher comes to see it late, when the other has ended, and has more to read."""
    ranks, pipes = supervised(status)
    if status == signal.SIGKILL:
        pipes[first].report()
    for rank in (first, 1 - first):
        if rank == crashed:
            print(CRASH, file=pipes[rank].open_crash_file(), flush=True)
        close(pipes[rank])
    *shown, error = failure_of(ranks, capsys)
    assert shown == (CRASH.splitlines() if first == crashed else [])
    assert error == f'error: rank {first}, process {os.getpid()}, {told}'


def test_what_an_ended_rank_said_last_is_read(supervised):
    """Its end may be noticed before that is."""
    ranks, pipes = supervised(0)
    pipes[0].report(done=True)
    callbacks = [key.data for key in ranks.selector.get_map().values()]
    note_end, _ = (each for each in callbacks if each.func == ranks._note_end)
    note_end(b'')
    assert ranks.failed_rank is None and ranks.alive == {1}


def test_an_error_of_all_ranks_is_shown_once(supervised, capsys):
    ranks, pipes = supervised(1)
    for pipe in pipes:
        pipe.report(error='ArithmeticError: nobody can count\n')
        close(pipe)
    shown, told = failure_of(ranks, capsys)
    assert shown == 'ArithmeticError: nobody can count'
    assert re.fullmatch('error: rank [01] failed, so all 2 ranks were stopped', told)


OPEN_MPI = {'OMPI_COMM_WORLD_SIZE': '4', 'OMPI_COMM_WORLD_RANK': '3'}
MPICH = {'PMI_SIZE': '4', 'PMI_RANK': '3'}
SLURM = {'SLURM_STEP_NUM_TASKS': '2', 'SLURM_PROCID': '1'}
AZURE = {'WORLD_SIZE': '6', 'RANK': '5', 'MASTER_ADDR': 'first', 'MASTER_PORT': '29500'}
TORCHRUN = {**AZURE, 'TORCHELASTIC_RUN_ID': 'none'}


@pytest.mark.parametrize(
    'variables, method, size, rank',
    [
        ({}, 'LaunchMethod', 1, 0),
        (MPICH, 'MpichMpiexec', 4, 3),
        (OPEN_MPI, 'OpenMpiMpiexec', 4, 3),
        (SLURM, 'SrunWithoutMpi', 2, 1),
        ({**SLURM, 'PMIX_RANK': '1'}, 'SrunPmix', 2, 1),
        ({'LMHP_RANKS': '4', 'PMI_RANK': '3'}, 'OwnLauncher', 4, 3),
        ({**SLURM, **MPICH}, 'MpichMpiexec', 4, 3),  # srun started MPICH's mpiexec
        ({'PMI_SIZE': '1', 'PMI_RANK': '0', **OPEN_MPI}, 'OpenMpiMpiexec', 4, 3),
        ({'SLURM_STEP_NUM_TASKS': '1', 'SLURM_PROCID': '0'}, 'LaunchMethod', 1, 0),
        ({'PMI_SIZE': ''}, 'LaunchMethod', 1, 0),
        (TORCHRUN, 'Torchrun', 6, 5),
        ({**AZURE, **SLURM}, 'Torchrun', 6, 5),
        ({**TORCHRUN, **SLURM, **MPICH}, 'Torchrun', 6, 5),  # torchrun on each host by mpiexec
        ({**AZURE, **MPICH}, 'MpichMpiexec', 4, 3),
        ({**TORCHRUN, 'LMHP_RANKS': '4', 'PMI_RANK': '3'}, 'OwnLauncher', 4, 3),
        ({'WORLD_SIZE': '6', 'RANK': '5'}, 'LaunchMethod', 1, 0),  # nobody says where rank 0 is
        ({**TORCHRUN, 'WORLD_SIZE': '1', 'RANK': '0'}, 'Torchrun', 1, 0),
    ],
)
def test_size_and_rank(monkeypatch, variables, method, size, rank):
    set_launcher(monkeypatch, variables)
    launched = launch_methods.current()
    assert type(launched).__name__ == method
    assert (launched.size, launched.rank) == (size, rank)


@pytest.mark.parametrize('mpi', [None, 16])
def test_srun_starts_the_ranks_itself(monkeypatch, mpi):
    set_launcher(monkeypatch, {'SLURM_STEP_NUM_TASKS': '16'})
    jobs = []
    monkeypatch.setattr(worker, 'run_job', lambda *job, at_interrupt: jobs.append(job))
    launch.start_job('job:job', {'a': 1}, mpi)
    assert jobs == [('job:job', {'a': 1})]


def test_srun_and_mpi_disagree(monkeypatch):
    set_launcher(monkeypatch, {'SLURM_STEP_NUM_TASKS': '16'})
    with pytest.raises(UserError, match=r'^--mpi 8, but 16 rank\(s\) were started by '):
        launch.start_job('job:job', {}, 8)


def shape_of(text):
    """Return the console without numbers, samples and the engine, which differ between runs."""
    text = re.sub(r'^\d ranks, averaging by .*\n', '', text)
    text = re.sub(r'^[a-z.]*\n[a-z.]*\n(?=  score)', '', text, flags=re.MULTILINE)
    return re.sub(r'[-+]?\d+\.?\d*(e[-+]\d+)?', '0', text).splitlines()


@pytest.fixture(scope='module')
def one(tmp_path_factory):
    save_dir = tmp_path_factory.mktemp('one')
    result = succeed(
        ['train_policy', 'test', 'run', '--mpi=1', f'--save_dir={save_dir}', *CONSOLE, *SHORT]
    )
    return result.stdout, save_dir / 'run'


@pytest.fixture(scope='module')
def launched_at_once(tmp_path_factory):
    """Two ranks by our launcher, and at the same time by torchrun without mpi4py and Horovod."""
    blocker = tmp_path_factory.mktemp('blocker')
    (blocker / 'sitecustomize.py').write_text(WITHOUT_MPI)
    launches = [
        Launch(tmp_path_factory.mktemp('ours'), '--mpi=2', *SHORT),
        Launch(
            tmp_path_factory.mktemp('torchrun'),
            BY_TORCH,
            *SHORT,
            started_by=torchrun(2),
            PYTHONPATH=str(blocker),
        ),
    ]
    for launched in launches:
        assert launched.wait() == 0, launched.errors()
    return launches


@pytest.fixture
def two(launched_at_once):
    return launched_at_once[0]


@needs_mpi
def test_two_ranks_look_like_one(one, two):
    expected = shape_of(one[0].replace(str(one[1]), 'RUN'))
    assert shape_of(two.output().replace(str(two.run), 'RUN')) == expected
    assert expected.count('hparams:') == 2
    assert two.errors() == ''
    assert two.output().startswith('2 ranks, averaging by ')
    assert files_of(two.run) == files_of(one[1])


def files_of(run):
    """Paths in a run's directory, without the host and time that names of event files contain."""
    paths = [str(path.relative_to(run)) for path in run.rglob('*')]
    return {re.sub(r'tfevents.*', 'tfevents', path) for path in paths}


@needs_mpi
def test_what_was_typed_is_kept(two):
    """Though mpiexec gives the ranks other words."""
    [found] = command_record.read(str(two.run))
    assert found['command'].startswith('./launch.py train_policy ')
    assert found['ranks'] == 2 and found['launcher'] == 'OwnLauncher'


@needs_mpi
def test_launches_at_once_do_not_meet(launched_at_once):
    """All end with the same parameters, to the bit, and all clean up."""
    first, *others = (
        Bundle(str(launched.run / 'policy/checkpoints/model.ckpt-4'))
        for launched in launched_at_once
    )
    names = [name for name in first if name.startswith('policy/')]
    assert 'policy/model/wte' in names
    for other in others:
        for name in names:
            assert first[name].tobytes() == other[name].tobytes(), name
    for launched in launched_at_once:
        launched.assert_nothing_left(10)
        assert str(launched.run) in launched.output()
    by_torchrun = launched_at_once[1]
    assert by_torchrun.output().startswith('2 ranks, averaging by torch (gloo)\n')
    assert re.sub('.*torch/distributed/run.py.*', '', by_torchrun.errors()).strip() == ''


def test_one_of_two_ranks_evaluates(one, monkeypatch, tmp_path):
    """The other ends, as this command cannot share its work."""
    run = tmp_path / 'run'
    shutil.copytree(one[1], run)
    for variables in reversed(torch_variables(2, 'localhost', 29500)):
        set_launcher(monkeypatch, variables)
        result = succeed(['evaluate', str(run), '--queries=2'])
        is_rank_0 = variables['RANK'] == '0'
        note = 'note: one of 2 ranks does all of this command\n'
        assert result.stderr.count(note) == is_rank_0
        assert (run / 'evaluation-queries_2.json').exists() == is_rank_0


@needs_mpi
def test_an_error_of_one_rank_ends_all(tmp_path):
    failed = job(tmp_path, 'fail', PYTHONPATH=WITHOUT_TORCH)
    lines = failed.errors().splitlines()
    assert lines.count('ArithmeticError: rank 1 cannot count') == 1
    assert lines.count('Traceback (most recent call last):') == 1
    assert failed.process.returncode == 1
    assert lines[-1] == 'error: rank 1 failed, so all 2 ranks were stopped'


@needs_mpi
def test_ranks_of_another_mpi_are_recognised(tmp_path):
    """The other MPI's mpiexec starts two worlds of one rank each."""
    other = tmp_path / 'mpiexec'
    other.write_text(
        '#!/bin/sh\nshift 2\nexport PMI_SIZE=2\n'
        'PMI_RANK=1 "$@" &\nPMI_RANK=0 "$@"\nstatus=$?\nwait\nexit $status'
    )
    other.chmod(0o755)
    failed = job(tmp_path, 'talk', started_by=(other, '-n', '2'), PYTHONPATH=WITHOUT_TORCH)
    assert failed.process.returncode == 2
    assert 'error: 2 ranks were started, but each sees a world of 1: ' in failed.errors()


@needs_mpi
@pytest.mark.parametrize(
    'settings',
    # Ranks of the user's own mpiexec watch each other through a store of torch.
    [{'PYTHONPATH': WITHOUT_TORCH}, {'started_by': (MPIEXEC, '-n', '2')}],
    ids=['our launcher', 'own mpiexec'],
)
def test_only_one_rank_speaks_and_tells_the_error_of_all(tmp_path, settings):
    talk = job(tmp_path, 'talk', **settings)
    assert talk.output().splitlines() == ['rank 0 of [0, 1] speaks']
    # Once in the warning, once in the line of code that it shows.
    assert talk.errors().count('everybody warns') == 2
    assert 'error: /labels.json is not a label file' in talk.errors().splitlines()
    assert talk.errors().count('label file') == 1
    assert talk.process.returncode == 2
    if 'started_by' not in settings:
        assert talk.errors().splitlines()[-1] == 'error: /labels.json is not a label file'


@needs_mpi
def test_on_a_terminal(tmp_path):
    """Progress bars are as wide as it is, and lines appear above them."""
    terminal, terminal_of_job = pty.openpty()
    rows, columns = 24, 60
    size = struct.pack('4H', rows, columns, 0, 0)
    fcntl.ioctl(terminal_of_job, termios.TIOCSWINSZ, size)
    draw = start_job(
        tmp_path, 'draw', stdout=terminal_of_job, stderr=terminal_of_job, PYTHONPATH=WITHOUT_TORCH
    )
    os.close(terminal_of_job)
    text = read_until_closed(terminal)
    assert draw.wait() == 0
    bars = re.findall(r'\r(bar:.*?)(?=[\r\n])', text)
    assert bars
    assert {len(bar) for bar in bars} == {columns - 1}
    lines = re.findall('^line .*', text.replace('\r', '\n'), re.MULTILINE)
    assert lines == ['line 0', 'line 1', 'line 2']


def read_until_closed(terminal):
    content = b''
    with contextlib.suppress(OSError):  # raised at its end
        while True:
            content += os.read(terminal, 1 << 16)
    return content.decode()
