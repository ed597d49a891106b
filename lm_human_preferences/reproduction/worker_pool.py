"""Independent jobs on processes of one thread each. A job leaves a file, whole or not at all: then
it is not redone."""

import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tqdm import tqdm

from lm_human_preferences.errors import UserError


@contextlib.contextmanager
def pool(processes: int | None) -> Iterator[concurrent.futures.ProcessPoolExecutor]:
    """A pool for `finish`. Whatever ends this process, Ctrl-C or a kill, ends its workers."""
    spawn = multiprocessing.get_context('spawn')
    with concurrent.futures.ProcessPoolExecutor(
        processes, mp_context=spawn, initializer=_start
    ) as executor:
        try:
            yield executor
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.terminate()
            raise


def _start() -> None:
    """In a worker, before it loads torch: the parent hears Ctrl-C and decides; without a parent
    there is no work."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ['OMP_NUM_THREADS'] = '1'
    os.environ['CUDA_VISIBLE_DEVICES'] = (
        ''  # models so small are faster without, and each process would hold memory
    )
    tqdm.set_lock(
        threading.RLock()
    )  # its own is shared by processes, and would outlive one that is killed
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def finish(
    executor: concurrent.futures.Executor,
    jobs: Mapping[str, tuple[Any, ...]],
    done: Callable[[], object],
) -> None:
    """Do those of `jobs` {path: (function, *arguments)} whose file is missing; returns when all
    files are there.

    function(path, *arguments) writes `path`; what it prints goes to PATH.log. done() is called
    after each. UserError names the jobs that failed, after the others are done.
    """
    started = {
        executor.submit(_logged, path, *job): path
        for path, job in jobs.items()
        if not os.path.exists(path)
    }
    failed = []
    for future in concurrent.futures.as_completed(started):
        done()
        if error := future.exception():
            failed.append(f'{started[future]}.log: {error or type(error).__name__}')
    if failed:
        raise UserError(f'{len(failed)} of {len(jobs)} runs failed, the first with {failed[0]}')


def _logged(path: str, function: Callable[..., object], *arguments: Any) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with (
        open(f'{path}.log', 'w', encoding='utf-8') as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        try:
            function(path, *arguments)
        except BaseException:
            traceback.print_exc(file=sys.stderr)
            raise
