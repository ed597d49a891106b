"""Disk cache of results that are computed once for all processes."""

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
    """Return a cached directory, which `create` fills once per version of `depends_on` modules."""
    import filelock

    digest = hashlib.sha256()
    for module in depends_on:
        digest.update(Path(inspect.getfile(module)).read_bytes())
    digest.update(torch.__version__.encode())
    path = os.path.join(storage.cache_root(), f'{name}-{digest.hexdigest()[:16]}')
    if os.path.exists(path):
        return path
    storage.make_cache_folder(os.path.dirname(path))
    with filelock.FileLock(f'{path}.lock'):  # the kernel releases the lock of a dead process
        if not os.path.exists(path):
            part = f'{path}.part'
            shutil.rmtree(part, ignore_errors=True)  # a killed process may have left it
            os.mkdir(part)
            create(part)
            os.rename(part, path)
    return path
