"""Standard streams in another encoding, or closed, do not end a run; texts are safe to print."""

import io
import os
import subprocess
import sys

from command_line import succeed
from launched import PATIENCE, REPOSITORY, ROOT_MAY, eventually

from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.utils import streams

ASCII = {'LC_ALL': 'C', 'PYTHONUTF8': '0', 'PYTHONCOERCECLOCALE': '0', 'PYTHONIOENCODING': ''}
NAME = 'run“1”'  # neither ASCII nor Latin-1 has these quotes
FOREVER = ('--ppo.total_episodes=64_000_000', '--run.log_interval=1')


TRAINING = (
    'launch.py train_policy test {} --rewards.train_new_model=off --rewards.trained_model=test'
)


def environment(**variables):
    own = {'OMP_NUM_THREADS': '1', 'COLUMNS': '', 'PYTHONUNBUFFERED': ''}
    return {**os.environ, **own, **ROOT_MAY, **variables}


def closed_when(ready, *words):
    """(status, standard error) of a program whose output nobody reads any more once `ready()`."""
    process = subprocess.Popen(
        [sys.executable, REPOSITORY / words[0], *words[1:], '--mpi=1'],
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


def test_training_whose_output_nobody_reads_any_more(tmp_path):
    words = [*TRAINING.format('run').split(), f'--save_dir={tmp_path}', *FOREVER]
    status, errors = closed_when(lambda: list(tmp_path.rglob('events.*')), *words)
    assert status == 141 and b'Error' not in errors
    assert checkpoints.latest(str(tmp_path / 'run' / 'policy' / 'checkpoints'))


def test_output_that_nobody_reads():
    """It is still in the buffer when Python ends."""
    code = 'from lm_human_preferences.utils import streams\nstreams.make_safe()\nprint(1)'
    settings = dict(env=environment(), cwd=REPOSITORY)
    with subprocess.Popen(
        [sys.executable, '-c', code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **settings
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == b''


def test_output_on_a_full_disk():
    """One line, and not the traceback of what is printed at once, or in the end."""
    result = on_a_full_disk(['launch.py', '--help'])
    told = b'error: the output cannot be read or written (No space left on device): make room there'
    assert result.returncode == 2 and result.stderr.startswith(told)
    assert result.stderr.count(b'\n') == 1


def on_a_full_disk(words, **variables):
    command = [sys.executable, REPOSITORY / words[0], *words[1:]]
    with open('/dev/full', 'wb') as full:
        return subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, env=environment(**variables), check=False
        )


def test_a_training_goes_on_without_its_output(tmp_path):
    """Its name, which the locale lacks, has the bytes of a terminal that knows it."""
    words = [*TRAINING.format(NAME).split(), '--ppo.total_episodes=64', '--mpi=1']
    result = on_a_full_disk([*words, f'--save_dir={tmp_path}'], **ASCII)
    told = b'WARNING: the output cannot be written, and what follows is lost: No space left on devi'
    assert result.returncode == 0 and result.stderr.startswith(told), result.stderr
    assert result.stderr.count(b'\n') == 1
    assert 'is finished, at step 1' in succeed(['resume', str(tmp_path / NAME)]).stdout


def test_letters_that_cannot_be_printed_are_escaped(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding='latin-1')
    monkeypatch.setattr(sys, 'stdout', stream)
    streams.make_safe()
    stream.write('“no”')
    stream.flush()
    assert stream.buffer.getvalue() == rb'\u201cno\u201d'


def test_text_cannot_move_the_cursor():
    text = 'a\x1b[2Jb\u202ec\x07\u200b\ttab é日本'
    assert streams.printable(text) == r'a\x1b[2Jb\u202ec\x07\u200b\ttab é日本'
    # Two Hangul fillers, the grapheme joiner, variation selectors: of categories Lo and Mn
    unseen = 'a\u3164\u115f\u034f\ufe0f\U000e0100b'
    assert streams.printable(unseen) == unseen.encode('unicode_escape').decode()
