"""What is computed when it is first needed, and then kept in the cache for all processes."""

import hashlib
import inspect
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

import torch

from lm_human_preferences import storage


def directory(name: str, create: Callable[[str], None], depends_on: Iterable[ModuleType]) -> str:
    """A directory in the cache, which `create(path)` fills where it is missing.

    It appears when it is complete; of several processes one makes it, and the others wait.
    depends_on: modules; where their sources or PyTorch's version differ, it is another directory.
    StorageError if the cache cannot be written.
    """
    import filelock

    path = os.path.join(storage.cache_root(), f'{name}-{_digest(depends_on)}')
    if not os.path.exists(path):
        storage.make_cache_folder(os.path.dirname(path))
        with filelock.FileLock(f'{path}.lock'):  # the kernel frees it when its holder dies
            if not os.path.exists(path):
                _create(path, create)
    return path


def _create(path: str, create: Callable[[str], None]) -> None:
    part = f'{path}.part'
    # One may be left from a killed process; nobody else writes there, as we hold the lock.
    shutil.rmtree(part, ignore_errors=True)
    os.mkdir(part)
    create(part)
    os.rename(part, path)


def _digest(modules: Iterable[ModuleType]) -> str:
    digest = hashlib.sha256()
    for module in modules:
        digest.update(Path(inspect.getfile(module)).read_bytes())
    digest.update(torch.__version__.encode())
    return digest.hexdigest()[:16]
