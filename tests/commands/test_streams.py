"""Standard streams in another encoding, or closed, do not end a run with a traceback."""

import json
import os
import subprocess
import sys

import pytest
from command_line import invoke
from golden_data import require, require_bpe
from launched import ONE_AND_TWO, PATIENCE, REPOSITORY, ROOT_MAY, eventually, needs_mpi

from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.utils import streams

LATIN = {'PYTHONIOENCODING': 'latin-1', 'PYTHONUTF8': '0'}
ASCII = {'LC_ALL': 'C', 'PYTHONUTF8': '0', 'PYTHONCOERCECLOCALE': '0', 'PYTHONIOENCODING': ''}
NAME = 'run“1”'  # neither ASCII nor Latin-1 has these quotes
FEW = ('--ppo.total_episodes=128', '--run.save_interval=1', '--run.console=original')
FOREVER = ('--ppo.total_episodes=64_000_000', '--run.log_interval=1')
sizes = pytest.mark.parametrize('size', ONE_AND_TWO)


def environment(**variables):
    return {
        **os.environ,
        'OMP_NUM_THREADS': '1',
        'COLUMNS': '',
        'PYTHONUNBUFFERED': '',
        **ROOT_MAY,
        **variables,
    }


def run(program, *words, size=1, started_by=(), **variables):
    """The finished `./PROGRAM WORDS`, whose output is bytes."""
    return subprocess.run(
        [*started_by, sys.executable, REPOSITORY / program, *words, f'--mpi={size}'],
        capture_output=True,
        env=environment(**variables),
        timeout=PATIENCE,
        check=False,
    )


def finished(*words, **settings):
    """The same, which has ended well; its output."""
    result = run(*words, **settings)
    assert result.returncode == 0, (result.stdout, result.stderr)
    return result.stdout


def training(folder, name, *words):
    return (
        'launch.py',
        'train_policy',
        'test',
        name,
        f'--save_dir={folder}',
        '--rewards.train_new_model=off',
        '--rewards.trained_model=test',
        *words,
    )


@pytest.fixture(scope='module')
def finished_run(tmp_path_factory):
    """A run whose name, which its settings hold, is not in Latin-1; a link to it has a name in
    ASCII."""
    folder = tmp_path_factory.mktemp('runs')
    _, *words = training(folder, NAME, *FEW)
    assert invoke(words).exit_code == 0
    (folder / 'link').symlink_to(NAME)
    return folder / 'link'


@needs_mpi
@pytest.mark.slow
def test_training_on_texts_that_cannot_be_printed(tmp_path):
    """On passages with curly quotes, by a model of GPT-2's encoding, in a folder with curly quotes,
    by two ranks. In ASCII, and by one: the sampling below."""
    model = require('original_save_dir_main')
    passages = tmp_path / 'passages.jsonl'
    passages.write_text(json.dumps('. He said “no” and “yes”. ') + '\n')
    words = {
        'task.policy.initial_model': model / 'policy',
        'task.query_dataset': passages,
        'task.query_length': 16,
        'rewards.trained_model': model,
        'run.log_interval': 1,
    }
    output = finished(
        *training(tmp_path, NAME, *FEW, *(f'--{key}={value}' for key, value in words.items())),
        size=2,
        LMHP_GPT2_ENCODINGS=str(require_bpe()),
        **LATIN,
    )
    assert rb'\u201cno' in output
    assert rb'run\u201c1\u201d' in output
    assert checkpoints.latest(str(tmp_path / NAME / 'policy' / 'checkpoints')).endswith(
        'model.ckpt-2'
    )


def test_sampling_what_cannot_be_printed(finished_run):
    output = finished(
        'sample.py',
        'sample',
        f'--save_dir={finished_run}',
        '--nsamples=4',
        '--console=original',
        **ASCII,
    )
    assert rb'run\u201c1\u201d' in output and output.count(b'=' * 80) == 4


def test_a_mistake_that_cannot_be_printed(finished_run, tmp_path):
    """Of a file in UTF-8, which every locale can hold."""
    path = tmp_path / 'queries.jsonl'
    path.write_text('"“abc”"', encoding='utf-8')
    result = run('sample.py', 'sample', f'--save_dir={finished_run}', f'--queries={path}', **LATIN)
    assert (
        result.returncode == 2
        and b'has 5 tokens' in result.stderr
        and b'Traceback' not in result.stderr
    )


def closed_when(ready, *words, size):
    """(status, standard error) of a program whose output nobody reads any more once `ready()`."""
    process = subprocess.Popen(
        [sys.executable, REPOSITORY / words[0], *words[1:], f'--mpi={size}'],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    try:
        eventually(lambda: ready() or process.poll() is not None)
    finally:
        process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    return process.wait(PATIENCE), errors


def test_sampling_whose_output_nobody_reads_any_more(finished_run, tmp_path):
    path = tmp_path / 'out.jsonl'
    found = closed_when(
        path.exists,
        'sample.py',
        'sample',
        f'--save_dir={finished_run}',
        f'--output={path}',
        size=1,
    )
    assert found == (141, b'') and path.read_text().endswith('}\n')


@sizes
def test_training_whose_output_nobody_reads_any_more(tmp_path, size):
    """It saves what it has done."""
    status, errors = closed_when(
        lambda: list(tmp_path.rglob('events.*')), *training(tmp_path, 'run', *FOREVER), size=size
    )
    assert status == 141 and b'Error' not in errors
    assert checkpoints.latest(str(tmp_path / 'run' / 'policy' / 'checkpoints'))


def test_standard_input_that_is_closed_is_empty(monkeypatch):
    """As by `<&-`, or where a service starts a command."""
    monkeypatch.setattr(sys, 'stdin', None)
    streams.make_safe()
    with sys.stdin:
        assert sys.stdin.buffer.read() == b''


@pytest.mark.parametrize(
    'words',
    [
        pytest.param([REPOSITORY / 'launch.py', '--help'], id='at once'),
        pytest.param(
            ['-c', 'from lm_human_preferences.utils import streams\nstreams.make_safe()\nprint(1)'],
            id='at exit',
        ),
    ],
)
def test_output_that_nobody_reads(words):
    """Whether it is written at once or is still in the buffer when Python ends."""
    process = subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        cwd=REPOSITORY,
    )
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    process.wait(PATIENCE)
    assert errors == b''


def test_without_standard_output(finished_run, tmp_path):
    path = tmp_path / 'out.jsonl'
    result = run(
        'sample.py',
        'sample',
        f'--save_dir={finished_run}',
        '--nsamples=4',
        f'--output={path}',
        size=1,
        started_by=('sh', '-c', 'exec "$@" >&-', 'sh'),
    )
    assert (result.returncode, result.stdout) == (0, b''), result.stderr
    assert len(path.read_text().splitlines()) == 4
