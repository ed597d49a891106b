"""Two ranks as a user sees them."""

import contextlib
import fcntl
import os
import pty
import re
import shutil
import struct
import sys
import termios

import pytest
from command_line import succeed
from launched import (
    CONSOLE,
    REPOSITORY,
    SMALL,
    Launch,
    needs_mpi,
    output_of,
    set_launcher,
    start_job,
    torch_variables,
)

from lm_human_preferences.cli import launch
from lm_human_preferences.distributed import worker
from lm_human_preferences.errors import UserError
from lm_human_preferences.runs import run_record

SHORT = (*SMALL, '--ppo.total_episodes=128', '--run.log_interval=1')


def test_srun_starts_the_ranks_itself(monkeypatch):
    set_launcher(monkeypatch, {'SLURM_STEP_NUM_TASKS': '16'})
    jobs = []
    monkeypatch.setattr(worker, 'run_job', lambda load, *job: jobs.append((load(), job[0])))
    launch.start_job('errors:UserError', {'a': 1}, None)
    assert jobs == [(UserError, {'a': 1})]
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
    words = ('--mpi=1', f'--save_dir={save_dir}', *CONSOLE, *SHORT)
    return succeed(['train_policy', 'test', 'run', *words]).stdout, save_dir / 'run'


@needs_mpi
def test_two_ranks_look_like_one(one, tmp_path):
    """In a folder of modules that neither they nor the process before, which has a note, import."""
    for name in ('torch', 'click', 'botocore', 'mpi4py', 'sitecustomize'):
        (tmp_path / f'{name}.py').write_text('raise SystemError("it was run")')
    two = Launch(tmp_path, '--mpi=2', '--run.save_dir=x', *SHORT)
    assert two.wait() == 0, two.errors()
    expected = shape_of(one[0].replace(str(one[1]), 'RUN'))
    assert shape_of(two.output().replace(str(two.run), 'RUN')) == expected
    assert expected.count('hparams:') == 2
    assert re.fullmatch('note: --run.save_dir has no effect.*', two.errors())
    assert two.output().startswith('2 ranks, averaging by ')
    assert files_of(two.run) == files_of(one[1])
    [found] = run_record.commands(run_record.read(str(two.run)))
    assert found['command'].startswith('./launch.py train_policy ')  # as it was typed
    assert found['ranks'] == 2 and found['launcher'] == 'mpiexec of MPICH'


def files_of(run):
    """Paths in a run's directory, without the host and time that names of event files contain."""
    paths = [str(path.relative_to(run)) for path in run.rglob('*')]
    return {re.sub(r'tfevents.*', 'tfevents', path) for path in paths}


@needs_mpi
def test_words_reach_the_ranks_as_they_were_typed(tmp_path):
    words = ['', 'a b', 'x\ny', '"q"', "it's", '$HOME', 'é', '-n']
    echo = tmp_path / 'echo.py'
    echo.write_text(
        'import os, sys\n'
        'from lm_human_preferences.distributed import launch_methods\n'
        'if "PMI_RANK" not in os.environ: launch_methods.become_mpiexec(2)\n'
        'print(sys.argv[1:])\n'
    )
    command = [sys.executable, str(echo), *words]
    output = output_of(command, {**os.environ, 'PYTHONPATH': str(REPOSITORY)})
    assert output.replace('\n', '') == str(words) * 2  # mpiexec may join lines


def test_one_of_two_ranks_evaluates(one, monkeypatch, tmp_path):
    """The other ends, as this command cannot share its work."""
    run = tmp_path / 'run'
    shutil.copytree(one[1], run)
    for variables in reversed(torch_variables(2, 'localhost', 29500)):
        set_launcher(monkeypatch, variables)
        succeed(['evaluate', str(run), '--queries=2'])
        assert (run / 'evaluation.json').exists() == (variables['RANK'] == '0')


@needs_mpi
def test_only_one_rank_speaks_and_tells_the_error_of_all(tmp_path):
    """Nor do they listen for other hosts, but at the port of mpiexec, which they inherit."""
    talk = start_job(tmp_path, 'talk')
    assert talk.end_within(60) == 2
    _, spoken, listening = talk.output().splitlines()
    assert spoken == 'rank 0 of [0, 1] speaks'
    assert {'0100007F'} <= {*listening.split()[2:]} <= {'00000000', '0100007F'}
    # Once in the warning, once in the line of code that it shows.
    assert talk.errors().count('everybody warns') == 2
    # A launcher joins the lines of its ranks in any order.
    assert talk.errors().splitlines().count('error: /labels.json is not a label file') == 1
    assert talk.errors().count('label file') == 1


@needs_mpi
def test_on_a_terminal(tmp_path):
    """Progress bars are as wide as it is, and lines appear above them."""
    terminal, terminal_of_job = pty.openpty()
    rows, columns = 24, 60
    size = struct.pack('4H', rows, columns, 0, 0)
    fcntl.ioctl(terminal_of_job, termios.TIOCSWINSZ, size)
    draw = start_job(tmp_path, 'draw', stdout=terminal_of_job, stderr=terminal_of_job)
    os.close(terminal_of_job)
    content = b''
    with contextlib.suppress(OSError):  # raised at its end
        while True:
            content += os.read(terminal, 1 << 16)
    assert draw.wait() == 0
    text = content.decode()
    bars = re.findall(r'\r(bar:.*?)(?=[\r\n])', text)
    assert bars
    assert {len(bar) for bar in bars} == {columns - 1}
    lines = re.findall('^line .*', text.replace('\r', '\n'), re.MULTILINE)
    assert lines == ['line 0', 'line 1', 'line 2']
