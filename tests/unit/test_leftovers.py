"""What tests leave outside of their own folders is removed, or fails their session."""

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import leftovers
import pytest

HELPERS = Path(leftovers.__file__).parent
TESTS = """
import os, tempfile
import leftovers

def test_leaves_a_folder():
    tempfile.mkdtemp(prefix='torchelastic_', dir={where})
    leftovers.others_are_at_work = lambda: False
"""


@pytest.mark.parametrize('where, status', [('None', 0), ("os.environ['OUTSIDE']", 1)])
def test_a_session_leaves_no_temporary_files(tmp_path, where, status):
    (tmp_path / 'test_it.py').write_text(TESTS.format(where=where))
    outside = tmp_path / 'outside'
    outside.mkdir()
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith('PYTEST_')
    }
    result = subprocess.run(
        [sys.executable, '-m', 'pytest', '-q', '-p', 'leftovers', '-p', 'no:xdist', 'test_it.py'],
        cwd=tmp_path,
        env={
            **variables,
            'PYTHONPATH': str(HELPERS),
            'TMPDIR': str(outside),
            'OUTSIDE': str(outside),
        },
        capture_output=True,
        text=True,
    )
    assert result.returncode == status, result.stdout
    left = [path.name for path in outside.iterdir() if not path.name.startswith('pytest-of-')]
    assert len(left) == status
    assert (f'ERROR: tests have left {outside}/torchelastic_' in result.stdout) == bool(status)


def test_files_of_mpich_are_removed_once_nobody_uses_them(tmp_path, monkeypatch):
    for name in ('mpich_shm_old', 'mpich_shm_mapped', 'mpich_shm_new', 'other'):
        (tmp_path / name).write_bytes(bytes(mmap.PAGESIZE))
    os.utime(tmp_path / 'mpich_shm_old', (1, 1))
    folders = {str(tmp_path): 'mpich_shm_*'}
    since = time.time() - 60
    left = {'mpich_shm_old', 'mpich_shm_mapped', 'other'}
    with open(tmp_path / 'mpich_shm_mapped', 'r+b') as file, mmap.mmap(file.fileno(), 0):
        # One that has been running since before could have made any of them.
        monkeypatch.setattr(leftovers, 'own_processes', lambda: [('hydra_pmi_proxy', since)])
        leftovers.remove_abandoned(since, folders)
        assert set(os.listdir(tmp_path)) == {*left, 'mpich_shm_new'}
        # One that began later could not.
        later = [('hydra_pmi_proxy', time.time() + 60), ('python', since)]
        monkeypatch.setattr(leftovers, 'own_processes', lambda: later)
        leftovers.remove_abandoned(since, folders)
        assert set(os.listdir(tmp_path)) == left


def test_processes_are_known_by_name_and_start():
    with subprocess.Popen(['sleep', '60']) as process:
        started = time.time()
        found = [start for name, start in leftovers.own_processes() if name == 'sleep']
        process.kill()
    assert any(abs(start - started) < 5 for start in found)
