"""Nothing that tests make in folders for temporary files is there after them.

The session has a folder of its own, TMPDIR of all that it starts, which is removed at its end. The
paths of MPICH's files are compiled in. Where its processes were killed outright, these files have
no owner any more, and are removed as well.
"""

import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest

# Where MPICH's processes leave files if they are killed outright.
OF_MPICH = {'/tmp': 'hydra_hwloc_xmlfile_*', '/dev/shm': 'mpich_shm_*'}
MPICH_PROGRAMS = ('mpiexec', 'hydra_pmi_proxy')
OF_TORCH = ('torchelastic_*', 'torchinductor_*')  # they belong into TMPDIR
IS_MAIN = 'PYTEST_XDIST_WORKER' not in os.environ


class Folder:
    """TMPDIR of this session. `outside`: where that would be without it."""

    def __init__(self):
        self.outside = Path(tempfile.gettempdir())
        self.since = time.time()
        self.before = set(self._left_outside())
        self.path = tempfile.mkdtemp(prefix='lmhp-tests-')
        # pytest itself keeps the files of the last sessions, for who looks for a failure.
        os.environ.setdefault('PYTEST_DEBUG_TEMPROOT', str(self.outside))
        os.environ['TMPDIR'] = tempfile.tempdir = self.path

    def _left_outside(self):
        return [path for pattern in OF_TORCH for path in self.outside.glob(pattern)]

    def remove(self):
        """Remove it, and return what tests have left outside of it."""
        tempfile.tempdir = None
        os.environ['TMPDIR'] = str(self.outside)
        shutil.rmtree(self.path, ignore_errors=True)
        remove_abandoned(self.since)
        left = [path for path in self._left_outside() if path not in self.before]
        return [] if others_are_at_work() else left


def remove_abandoned(since, folders=OF_MPICH):
    """Remove MPICH's files of this user, made after `since`, that no process can be using."""
    processes = [started for name, started in own_processes() if name.startswith(MPICH_PROGRAMS)]
    mapped = mapped_files()
    for folder, pattern in folders.items():
        for path in Path(folder).glob(pattern):
            try:
                status = path.lstat()
            except FileNotFoundError:
                continue
            is_new = status.st_uid == os.getuid() and status.st_mtime >= since
            # A process that is older than the file may have made it.
            may_be_in_use = str(path) in mapped or any(
                started <= status.st_mtime + 1 for started in processes
            )
            if is_new and not may_be_in_use:
                path.unlink(missing_ok=True)


def own_processes():
    """(name, when it started, in seconds since 1970) of each process of this user."""
    now = time.time()
    with open('/proc/uptime', encoding='ascii') as f:
        uptime = float(f.read().split()[0])
    ticks = os.sysconf('SC_CLK_TCK')
    found = []
    for folder in Path('/proc').glob('[0-9]*'):
        try:
            if folder.stat().st_uid == os.getuid():
                name, _, rest = (folder / 'stat').read_text().partition('(')[2].rpartition(') ')
                found.append((name, now - uptime + int(rest.split()[19]) / ticks))
        except (OSError, ValueError):  # it has ended meanwhile
            continue
    return found


def mapped_files():
    """The text of all memory maps that may be read."""
    texts = []
    for path in Path('/proc').glob('[0-9]*/maps'):
        try:
            texts.append(path.read_text())
        except OSError:
            continue
    return '\n'.join(texts)


def others_are_at_work():
    """Whether another session of tests, or a run outside of tests, may have made what is new."""
    for path in Path('/proc').glob('[0-9]*/cmdline'):
        try:
            words = path.read_bytes().split(b'\0')
        except OSError:
            continue
        names = {os.path.basename(word) for word in words}
        is_ours = names & {b'launch.py', b'sample.py', b'pytest', b'py.test'}
        if is_ours and int(path.parent.name) not in (os.getpid(), os.getppid()):
            return True
    return False


_folder = Folder() if IS_MAIN else None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session):
    """After all other plugins: pytest-xdist ends its processes here."""
    result = yield
    if _folder is not None:
        left = _folder.remove()
        if left:
            names = ', '.join(map(str, left))
            session.config.get_terminal_writer().line(f'\nERROR: tests have left {names}', red=True)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
    return result
