"""Worker: one rank of a job, by `main` under our launcher; ends all ranks when it fails."""

import contextlib
import faulthandler
import gc
import importlib
import io
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from lm_human_preferences.distributed import channel, launch_methods, lifeline
from lm_human_preferences.distributed.channel import StatusPipe
from lm_human_preferences.distributed.libraries import mpi_library
from lm_human_preferences.distributed.libraries.mpi_library import NoLibrary
from lm_human_preferences.distributed.lifeline import RankLost
from lm_human_preferences.distributed.waiting import (
    EXIT_GRACE_SECONDS,
    LAUNCHER_GRACE_SECONDS,
    RANK_0_GRACE_SECONDS,
    REPORT_GRACE_SECONDS,
)
from lm_human_preferences.errors import UserError, disks_are_told
from lm_human_preferences.utils import streams

STDERR = 2  # its file descriptor: `sys.stderr` is muted where this is not rank 0


def main(directory: str) -> None:
    """Do the job that our launcher has written into `directory`."""
    try:
        pipe = StatusPipe(directory, launch_methods.current().rank)
        job = channel.read_job(directory)
    except OSError:  # the launcher was killed while this process started
        _end_orphans(os.getppid(), directory)
    streams.make_safe()
    mute_unless_rank_0()
    sys.argv = job['typed']
    if job['columns']:
        # mpiexec passes on what this rank prints to a terminal of this width.
        os.environ['TQDM_NCOLS'] = str(job['columns'] - 1)
        sys.stderr.isatty = lambda: True
        os.dup2(STDERR, 1)  # lines and progress bars stay in order
    run_job(job['name'], job['arguments'], pipe)
    pipe.report(done=True)


def run_job(
    job: str,
    arguments: dict[str, Any],
    pipe: StatusPipe | None = None,
    at_interrupt: Callable[[], None] = lambda: None,
) -> None:
    """Do `job` in this process; an error ends all ranks. at_interrupt: called on rank 0."""
    launched = launch_methods.current()
    launched.prepare()
    # A crash shows where it happened, as an exception does.
    faulthandler.enable(pipe.open_crash_file() if pipe else STDERR)
    threading.Thread(target=_watch_parent, args=(os.getppid(), pipe), daemon=True).start()
    try:
        with disks_are_told():
            _call(job, arguments)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and launched.rank == 0:
            at_interrupt()
        _end_all_ranks(error, pipe)


def import_job(job: str) -> Callable[..., Any]:
    """Return the function that 'module:function' names."""
    module, name = job.split(':')
    return getattr(import_for_good(module), name)


def import_for_good(module: str) -> Any:
    """Import a module and exempt it from garbage collection, which takes half a second."""
    if module in sys.modules:
        return sys.modules[module]
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        gc.freeze()
        gc.enable()


def mute_unless_rank_0() -> None:
    """Let only rank 0 print, line by line."""
    launched = launch_methods.current()
    if launched.rank:
        sys.stdout = sys.stderr = open(os.devnull, 'w', encoding='utf-8')
    elif launched.size > 1:
        stdout: Any = sys.stdout  # its declared type has no `reconfigure`
        stdout.reconfigure(line_buffering=True)


def settle_user_error(message: str) -> None:
    """Let rank 0, which has printed the error of all ranks, end before the others."""
    launched = launch_methods.current()
    launched.keep_status()
    if launched.rank:
        time.sleep(RANK_0_GRACE_SECONDS)
    else:
        launched.write_summary(message)


def _call(job: str, arguments: dict[str, Any]) -> None:
    mpi_library.load_library()
    function = import_job(job)
    # Imports torch, which takes seconds: commands that start no rank do without.
    comm = import_for_good('lm_human_preferences.distributed.comm')

    settings = arguments.get('hparams')
    if settings is None:
        # Such a job averages nothing: it takes the engine that costs nothing, without a word.
        engine = 'mpi' if launch_methods.current().has_mpi else 'torch'
        with contextlib.redirect_stdout(io.StringIO()):
            ranks = comm.init_comm(engine)
    else:
        ranks = comm.init_comm(settings.run.allreduce, settings.run.timeouts)
    function(**arguments, comm=ranks)
    ranks.close()


def _watch_parent(parent: int, pipe: StatusPipe | None) -> None:
    """Give our launcher a sign of life every second; end when it, or the parent, is gone."""
    poll = select.poll()
    if pipe:
        poll.register(pipe.fd, 0)  # the launcher's end being closed is always reported
    while os.getppid() == parent and not poll.poll(1000):
        if pipe:
            pipe.report()
    if pipe:
        if poll.poll(0):
            _end_orphans(parent, pipe.directory)
        pipe.report(error='the mpiexec process that started this rank was killed\n')
    os._exit(1)


def _end_orphans(parent: int, directory: str) -> NoReturn:
    """End this rank and its siblings, and delete the job's directory: our launcher is gone."""
    if not channel.remove(directory):
        time.sleep(EXIT_GRACE_SECONDS)  # another rank does it, and ends this one
    own = os.getpid()
    for process in _children(parent):
        if process != own:
            # One that is inside MPI_Init would wait there for this one for ever.
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    os._exit(1)


def _children(process: int) -> list[int]:
    """Return the children of a process on Linux; none where that is unknown."""
    found = []
    for path in Path(f'/proc/{process}/task').glob('*/children'):
        with contextlib.suppress(OSError):
            found += [int(word) for word in path.read_text(encoding='ascii').split()]
    return found


def _end_all_ranks(error: BaseException, pipe: StatusPipe | None) -> None:
    """Report `error` to the user, once for all ranks, and end them all."""
    if isinstance(error, UserError):
        status = 2
        text = ' '.join(str(error).splitlines())
    else:
        status = 130 if isinstance(error, KeyboardInterrupt) else 1
        text = ''.join(traceback.format_exception(error))
        if isinstance(error, RankLost):
            text = f'{error}\n' if pipe else str(error)
        time.sleep(REPORT_GRACE_SECONDS)  # another rank's death may be the reason
    if pipe:
        pipe.report(
            error=text,
            is_user_error=isinstance(error, UserError),
            is_interrupt=isinstance(error, KeyboardInterrupt),
        )
        time.sleep(LAUNCHER_GRACE_SECONDS)
    elif not isinstance(error, KeyboardInterrupt):
        _print_error(error, text)
    try:
        mpi_library.abort(status)
    finally:
        os._exit(status)


def _print_error(error: BaseException, text: str) -> None:
    """Print `error` without a launcher of ours; the other ranks let rank 0 report first."""
    launched = launch_methods.current()
    line = lifeline.Lifeline.of_failures
    if line:
        line.closed.set()  # this rank ends with its own status, whatever others do
    launched.keep_status()
    if launched.rank:
        time.sleep(RANK_0_GRACE_SECONDS)
    if isinstance(error, NoLibrary) and not launched.is_first_on_host:
        return
    if line and not line.claim_failure():
        return
    if isinstance(error, UserError):
        message = f'error: {text}'
    elif isinstance(error, RankLost):
        message = f'error: rank {launched.rank}: {text}'
    else:
        message = f'{text}error: rank {launched.rank} failed'
    lifeline.report(message, text.splitlines()[-1])
    time.sleep(REPORT_GRACE_SECONDS)  # mpiexec drops what it has not yet passed on when ranks abort
    if not launched.has_mpi and launched.keeps_store:
        # The others ask the store whether the failure is theirs to report. Without an answer they
        # would report it, too, below what torch says of a store that is gone.
        time.sleep(RANK_0_GRACE_SECONDS)


if __name__ == '__main__':
    main(sys.argv[1])
