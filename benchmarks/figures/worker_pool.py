"""Independent jobs on processes of one thread each; each writes a file, unless it is there.

The pool is that of concurrent.futures, but no worker outlives this process: when it was killed in
the middle of a job, those of concurrent.futures, multiprocessing.Pool and loky went on.
See benchmarks/README.md.
"""

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
    """Open a pool of processes, None for one per CPU, whose workers end with this process."""
    # Python does not clean up after SIGTERM, and its resource tracker reports leaked semaphores.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    spawn = multiprocessing.get_context('spawn')
    with concurrent.futures.ProcessPoolExecutor(
        processes or len(os.sched_getaffinity(0)), mp_context=spawn, initializer=_set_up_worker
    ) as executor:
        try:
            yield executor
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.terminate()
            raise
        finally:
            signal.signal(signal.SIGTERM, before)


def _set_up_worker() -> None:
    """Prepare a worker, before it loads torch."""
    # Ctrl-C reaches all processes; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ['OMP_NUM_THREADS'] = '1'
    # Models so small are faster without a GPU, and each process would hold memory of it.
    os.environ['CUDA_VISIBLE_DEVICES'] = ''
    # The default lock is shared between processes: a worker killed while it holds it would stop
    # all others.
    tqdm.set_lock(threading.RLock())
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def finish(
    executor: concurrent.futures.Executor,
    jobs: Mapping[str, tuple[Any, ...]],
    done: Callable[[], object],
) -> None:
    """Do jobs {path: (function, *arguments)} whose file is missing; UserError if any fails."""
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
