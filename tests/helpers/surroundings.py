"""Folders of the session's own in place of the user's; conftest.py imports this first."""

import os
import shutil
import tempfile

IS_MAIN = 'PYTEST_XDIST_WORKER' not in os.environ
OUTSIDE = tempfile.gettempdir()

if IS_MAIN:
    # pytest itself keeps the files of the last sessions, for who looks for a failure.
    os.environ.setdefault('PYTEST_DEBUG_TEMPROOT', OUTSIDE)
    FOLDER = tempfile.mkdtemp(prefix='lmhp-tests-')
    os.environ['TMPDIR'] = tempfile.tempdir = FOLDER
    # The processes of pytest-xdist, and those that they start, share the caches: the language
    # model of the reviews is trained once for all tests.
    for _name, _folder in {'HOME': 'home', 'LMHP_CACHE': 'cache', 'HF_HOME': 'hub'}.items():
        os.environ[_name] = os.path.join(FOLDER, _folder)
        os.mkdir(os.environ[_name])
    for _name in list(os.environ):
        if _name.startswith('XDG_') or _name in ('MPLCONFIGDIR', 'TORCH_HOME', 'HF_HUB_CACHE'):
            del os.environ[_name]

# Of this process, and empty for each test: where runs are kept by default, and where tests stand.
SAVES = os.path.join(tempfile.gettempdir(), f'saves-{os.getpid()}')
HERE = os.path.join(tempfile.gettempdir(), f'here-{os.getpid()}')
os.environ['LMHP_SAVE_DIR'] = SAVES


def make() -> None:
    """Make both folders, for each session of a process."""
    for folder in (SAVES, HERE):
        os.makedirs(folder, exist_ok=True)


def empty() -> None:
    for folder in (SAVES, HERE):
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                os.unlink(entry.path)
