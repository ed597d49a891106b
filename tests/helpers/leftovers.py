"""Temporary files of the tests: all in TMPDIR of the session, but for those of MPICH."""

import contextlib
import multiprocessing.util
import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest
import surroundings

# Where MPICH's processes leave files if they are killed outright.
OF_MPICH = {'/tmp': 'hydra_hwloc_xmlfile_*', '/dev/shm': 'mpich_shm_*'}
MPICH_PROGRAMS = ('mpiexec', 'hydra_pmi_proxy')
BEGAN = time.time()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish():
    """Remove them after all other plugins: pytest-xdist ends its processes here."""
    result = yield
    if surroundings.IS_MAIN:
        multiprocessing.util._exit_function()  # its folder is in this one
        shutil.rmtree(surroundings.FOLDER, ignore_errors=True)
        # on_mpi.py goes on with another session
        os.environ['TMPDIR'] = tempfile.tempdir = surroundings.OUTSIDE
        _remove_files_of_mpich()
    return result


def _remove_files_of_mpich():
    """Remove those of this session that no process can be using."""
    if any(name.startswith(MPICH_PROGRAMS) for name in _texts('comm')):
        return
    mapped = '\n'.join(_texts('maps'))
    for folder, pattern in OF_MPICH.items():
        for path in Path(folder).glob(pattern):
            with contextlib.suppress(FileNotFoundError):  # another session has removed it
                status = path.stat()
                is_ours = status.st_uid == os.getuid() and status.st_mtime >= BEGAN
                if is_ours and str(path) not in mapped:
                    path.unlink()


def _texts(name):
    found = []
    for path in Path('/proc').glob(f'[0-9]*/{name}'):
        try:
            found.append(path.read_text())
        except OSError:  # it has ended, or is another user's
            continue
    return found
