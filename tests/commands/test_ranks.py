"""Starting ranks: how mpiexec is found and asked, and what one sees of two ranks. Harder cases:
tests/faults."""

import contextlib
import fcntl
import os
import pty
import re
import struct
import sys
import termios

import pytest
from command_line import invoke
from launched import CONSOLE, MPIEXEC, REPOSITORY, Launch, job, needs_mpi, start_job

import sample
from lm_human_preferences.checkpointing.tf_bundle import Bundle
from lm_human_preferences.distributed import env, launcher, worker
from lm_human_preferences.errors import UserError
from lm_human_preferences.utils import launch

FEW = ('--ppo.total_episodes=256', '--run.log_interval=1')


# ---------------------------------------------------------------- asking mpiexec


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
    'is_open_mpi, user, is_told', [(True, 0, True), (True, 1000, False), (False, 0, False)]
)
def test_root_under_open_mpi(monkeypatch, capsys, is_open_mpi, user, is_told):
    monkeypatch.setattr(os, 'geteuid', lambda: user)
    monkeypatch.delenv('OMPI_ALLOW_RUN_AS_ROOT', raising=False)
    monkeypatch.delenv('OMPI_ALLOW_RUN_AS_ROOT_CONFIRM', raising=False)
    variables = launcher.rank_environment('/job', 3, is_open_mpi)
    allowed = {name: value for name, value in variables.items() if name.startswith('OMPI_ALLOW')}
    assert allowed == (
        {'OMPI_ALLOW_RUN_AS_ROOT': '1', 'OMPI_ALLOW_RUN_AS_ROOT_CONFIRM': '1'} if is_told else {}
    )
    assert ('root' in capsys.readouterr().err) == is_told


@pytest.mark.parametrize(
    'paths, expected',
    [(None, f'{REPOSITORY}'), ('', f'{REPOSITORY}'), ('/a:/b', f'{REPOSITORY}:/a:/b')],
)
def test_environment(monkeypatch, paths, expected):
    monkeypatch.setenv('KEPT', 'yes')
    monkeypatch.delenv('PYTHONPATH', raising=False)
    if paths is not None:
        monkeypatch.setenv('PYTHONPATH', paths)
    variables = launcher.rank_environment('/job', 3, False)
    assert (variables['KEPT'], variables['LMHP_RANKS'], variables['TMPDIR']) == ('yes', '3', '/job')
    assert variables['PYTHONPATH'] == expected


@pytest.fixture
def environments(tmp_path, monkeypatch):
    """Two folders for programs: that of this Python, and the only one on PATH."""
    own, other = tmp_path / 'own', tmp_path / 'other'
    own.mkdir()
    other.mkdir()
    monkeypatch.setattr(sys, 'executable', str(own / 'python'))
    monkeypatch.setenv('PATH', str(other))
    return own, other


def install(folder, says):
    (folder / 'mpiexec').write_text(f'#!/bin/sh\necho "{says}"\n')
    (folder / 'mpiexec').chmod(0o755)


OPEN_MPI_5 = 'mpiexec (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/'
OPEN_MPI_4 = 'mpiexec (OpenRTE) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/'


@pytest.mark.parametrize(
    'says, is_open_mpi', [('HYDRA build details:', False), (OPEN_MPI_5, True), (OPEN_MPI_4, True)]
)
def test_mpiexec_on_path(environments, says, is_open_mpi):
    install(environments[1], says)
    assert launcher.find_mpiexec() == (str(environments[1] / 'mpiexec'), is_open_mpi)


def test_the_environments_own_mpiexec_comes_first(environments):
    install(environments[0], 'HYDRA')
    install(environments[1], OPEN_MPI_5)
    assert launcher.find_mpiexec() == (str(environments[0] / 'mpiexec'), False)


def test_no_mpiexec(environments):
    with pytest.raises(
        UserError,
        match=(
            '^there is no mpiexec to start ranks with: `sh tools/setup.sh` installs one, '
            'or take --mpi 1$'
        ),
    ):
        launcher.launch_ranks('job:job', {}, 2)


# ---------------------------------------------------------------- being a rank


@pytest.fixture
def no_mpi(monkeypatch):
    for name in env.SIZE_VARIABLES + env.RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    'variables, size, number',
    [
        ({}, 1, 0),
        ({'PMI_SIZE': '4', 'PMI_RANK': '2'}, 4, 2),
        ({'LMHP_RANKS': '3', 'OMPI_COMM_WORLD_SIZE': '3', 'OMPI_COMM_WORLD_RANK': '1'}, 3, 1),
        ({'SLURM_STEP_NUM_TASKS': '8', 'SLURM_PROCID': '7'}, 8, 7),
        (
            {'SLURM_STEP_NUM_TASKS': '2', 'SLURM_PROCID': '1', 'PMI_SIZE': '4', 'PMI_RANK': '3'},
            4,
            3,
        ),  # hydra by srun
        (
            {
                'PMI_SIZE': '1',
                'PMI_RANK': '0',
                'OMPI_COMM_WORLD_SIZE': '4',
                'OMPI_COMM_WORLD_RANK': '3',
            },
            4,
            3,
        ),
        ({'SLURM_PROCID': '3'}, 1, 0),
        ({'PMI_SIZE': ''}, 1, 0),
    ],
)
def test_launched_as(no_mpi, monkeypatch, variables, size, number):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (env.launched_size(), env.launched_rank()) == (size, number)


@pytest.mark.parametrize('mpi', [None, 16])
def test_srun_starts_the_ranks_itself(no_mpi, monkeypatch, mpi):
    monkeypatch.setenv('SLURM_STEP_NUM_TASKS', '16')
    jobs = []
    monkeypatch.setattr(worker, 'run_job', lambda *job, at_interrupt: jobs.append(job))
    launch.run('job:job', {'a': 1}, mpi)
    assert jobs == [('job:job', {'a': 1})]


def test_srun_and_mpi_disagree(no_mpi, monkeypatch):
    monkeypatch.setenv('SLURM_STEP_NUM_TASKS', '16')
    with pytest.raises(
        UserError, match='^--mpi 8, but 16 ranks were started by mpiexec or srun: leave --mpi out$'
    ):
        launch.run('job:job', {}, 8)


# ---------------------------------------------------------------- two ranks


def shape_of(text):
    """What the console shows, without what differs from run to run: numbers, samples, the
    engine."""
    text = re.sub(r'^\d ranks, averaging by .*\n', '', text)
    text = re.sub(r'^[a-z.]*\n[a-z.]*\n(?=  score)', '', text, flags=re.MULTILINE)
    return re.sub(r'[-+]?\d+\.?\d*(e[-+]\d+)?', '0', text).splitlines()


@pytest.fixture(scope='module')
def one(tmp_path_factory):
    """What the embedded experiment prints with one rank, and its directory."""
    save_dir = tmp_path_factory.mktemp('one')
    result = invoke(
        ['train_policy', 'test', 'run', '--mpi=1', f'--save_dir={save_dir}', *CONSOLE, *FEW]
    )
    assert result.exit_code == 0, result.output
    return result.stdout, save_dir / 'run'


@pytest.fixture(scope='module')
def two(tmp_path_factory):
    """The same with two ranks, twice at the same time."""
    both = [Launch(tmp_path_factory.mktemp('two'), '--mpi=2', *FEW) for _ in range(2)]
    for launched in both:
        assert launched.wait() == 0, launched.errors()
    return both


@needs_mpi
def test_two_ranks_look_like_one(one, two):
    """As recorded of two: a line per fact, not one per rank."""
    expected = shape_of(one[0].replace(str(one[1]), 'RUN'))
    assert shape_of(two[0].output().replace(str(two[0].run), 'RUN')) == expected
    assert expected.count('hparams:') == 2
    assert two[0].errors() == ''
    assert two[0].output().startswith('2 ranks, averaging by ')


@needs_mpi
def test_two_ranks_leave_the_same_files(one, two):
    files, expected = (
        {re.sub(r'tfevents.*', 'tfevents', str(path.relative_to(run))) for path in run.rglob('*')}
        for run in (two[0].run, one[1])
    )
    assert files == expected and 'policy/checkpoints/model.ckpt-4.index' in files


@needs_mpi
def test_two_launches_at_once_do_not_meet(two):
    """Each trains, to the bit, as if it were alone; and each cleans up."""
    trained = [Bundle(str(launched.run / 'policy/checkpoints/model.ckpt-4')) for launched in two]
    names = [name for name in trained[0] if name.startswith('policy/')]
    assert names and all(trained[0][name].tobytes() == trained[1][name].tobytes() for name in names)
    for launched in two:
        launched.assert_nothing_left(10)
        assert str(launched.run) in launched.output()


@needs_mpi
def test_sampling_by_two_ranks(one, tmp_path):
    """The same queries in the same order, however many there are in all."""
    words = [f'--save_dir={one[1]}', '--nsamples=5', '--seed=1']
    sampling = Launch(tmp_path, *words, '--mpi=2', command=('sample.py', 'sample'))
    assert sampling.wait() == 0, sampling.errors()
    expected = invoke(['sample', '--mpi=1', *words], sample.cli).stdout
    queries, expected = (
        re.findall(r'^={80}\n(.*)\n.*$', text, re.MULTILINE)
        for text in (sampling.output(), expected)
    )
    assert queries == expected and len(queries) == 5


by_mpiexec = pytest.mark.parametrize(
    'started_by', [(), (MPIEXEC, '-n', '2')], ids=['our launcher', 'own mpiexec']
)


@needs_mpi
@by_mpiexec
def test_a_mistake_found_by_all_ranks_is_one_line(tmp_path, started_by):
    found = job(tmp_path, 'find_a_mistake', started_by=started_by)
    assert 'error: /labels.json is no label file' in found.errors().splitlines()
    assert found.errors().count('label file') == 1
    assert found.process.returncode == 2
    assert started_by or len(found.errors().splitlines()) == 1


@needs_mpi
@by_mpiexec
def test_an_error_of_one_rank_ends_all(tmp_path, started_by):
    failed = job(tmp_path, 'fail', started_by=started_by)
    lines = failed.errors().splitlines()
    assert (
        lines.count('ArithmeticError: rank 1 cannot count')
        == lines.count('Traceback (most recent call last):')
        == 1
    )
    assert failed.process.returncode == 1
    assert started_by or lines[-1] == 'error: rank 1 failed, so all 2 were ended'


@needs_mpi
def test_ranks_of_another_mpi_are_recognised(tmp_path):
    """Its mpiexec starts as many worlds of one rank."""
    other = tmp_path / 'mpiexec'
    other.write_text(
        '#!/bin/sh\nshift 2\nexport OMPI_COMM_WORLD_SIZE=2\n'
        'OMPI_COMM_WORLD_RANK=1 "$@" &\nOMPI_COMM_WORLD_RANK=0 "$@"\nstatus=$?\nwait\nexit $status'
    )
    other.chmod(0o755)
    found = job(tmp_path, 'talk', started_by=(other, '-n', '2'))
    assert found.process.returncode == 2
    assert (
        'error: 2 ranks were started, but each sees a world of 1: they were started by the mpiexec'
        ' of another MPI' in found.errors()
    )


@needs_mpi
@by_mpiexec
def test_only_one_rank_speaks(tmp_path, started_by):
    spoken = job(tmp_path, 'talk', started_by=started_by)
    assert spoken.process.returncode == 0
    assert spoken.output().splitlines() == ['rank 0 of [0, 1] speaks']
    assert (
        spoken.errors().count('everybody warns') == 2
    )  # in the warning and in the line of code that it shows


@needs_mpi
def test_on_a_terminal(tmp_path):
    """Progress bars are as wide as it is, and lines appear above them."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack('4H', 24, 60, 0, 0))
    drawn = start_job(tmp_path, 'draw', stdout=theirs, stderr=theirs)
    os.close(theirs)
    text = b''
    with contextlib.suppress(OSError):  # which says that nobody writes to the terminal any more
        while True:
            text += os.read(ours, 1 << 16)
    assert drawn.wait() == 0
    bars = re.findall(r'\r(bar:.*?)(?=[\r\n])', text.decode())
    assert bars and {len(bar) for bar in bars} == {59}
    assert re.findall('^line .*', text.decode().replace('\r', '\n'), re.MULTILINE) == [
        'line 0',
        'line 1',
        'line 2',
    ]
