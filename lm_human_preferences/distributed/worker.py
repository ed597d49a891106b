"""Process of a rank. The process ends when its launcher ends; only one rank reports an error."""

import ctypes
import faulthandler
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from lm_human_preferences.distributed import launch_methods, meeting
from lm_human_preferences.errors import UserError, disk_errors_reported
from lm_human_preferences.machine import environment
from lm_human_preferences.utils import stop_signals, streams
from lm_human_preferences.utils.streams import error_line

_PR_SET_PDEATHSIG = 1  # Linux's prctl option: the signal that a process gets when its parent ends
PRINT_SECONDS = 0.5  # seconds in which the launcher forwards a rank's last output
REPORT_SECONDS = 3  # seconds for another rank to report an error and read the run's files

_clean_ups: list[Callable[[], object]] = []


def become_rank() -> None:
    """Make this rank end when its launcher ends; only rank 0 prints, line by line."""
    launch = launch_methods.current()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if launch.rank:
        sys.stdout = sys.stderr = open(os.devnull, 'w', encoding='utf-8')
        return
    stdout: Any = sys.stdout  # the declared type of sys.stdout has no `reconfigure`
    stdout.reconfigure(line_buffering=True)
    terminal = os.environ.get(launch_methods.TERMINAL)
    if terminal is not None:
        streams.mute_notes(True)  # notes come from the process that started mpiexec
    if terminal == 'True':
        sys.stderr.isatty = lambda: True
        os.dup2(streams.STDERR, streams.STDOUT)  # one stream keeps lines and progress bars in order


def run_job(
    load: Callable[[], Callable[..., object]],
    arguments: dict[str, Any],
    at_stop: Callable[[], None],
) -> NoReturn:
    """Do a job on this rank, and end the process with the job's status.

    load: imports and returns the job. at_stop: called on rank 0 after a signal ended the job.
    """
    environment.prepare(launch_methods.current().launcher)
    faulthandler.enable(streams.STDERR)  # print stack traces at a crash
    streams.mute_notes(False)
    status = 0
    try:
        with (
            stop_signals.handled(stop_signals.interrupt, *stop_signals.TO_STOP),
            disk_errors_reported(),
        ):
            job = load()
            from lm_human_preferences.distributed import comm  # this late import loads torch

            run = getattr(arguments.get('hparams'), 'run', None)
            if run is None:  # the job does not train, so it has no gradients to average
                ranks = comm.init_comm('torch')
            else:
                ranks = comm.init_comm(run.allreduce, run.allreduce_timeout)
                print(f'{ranks.size} ranks, averaging by {ranks.name}')
            try:
                job(**arguments, comm=ranks)
            except meeting.AllStopped:
                status = 130
            ranks.close()
    except BaseException as error:
        _end_all_ranks(error, at_stop)
    if status and ranks.rank == 0:
        at_stop()
    sys.stdout.flush()
    meeting.leave_mpi()
    _exit(status)


def _end_all_ranks(error: BaseException, at_stop: Callable[[], None]) -> NoReturn:
    """Report `error` unless another rank does; end this rank. The launcher ends the others."""
    faulthandler.cancel_dump_traceback_later()
    for number in (signal.SIGINT, *stop_signals.TO_STOP):
        signal.signal(number, signal.SIG_IGN)  # a signal must not change this rank's exit status
    rank = launch_methods.current().rank
    if isinstance(error, KeyboardInterrupt):
        status, text = 130, ''
        is_reporter = rank == 0
        if is_reporter:
            at_stop()
    else:
        is_lost = isinstance(error, meeting.RankLost)
        if is_lost:
            status, text = 1, f'error: rank {rank} has lost another: {error}'
            time.sleep(PRINT_SECONDS)  # the lost rank reports first: its error may be the cause
        elif isinstance(error, UserError):
            status, text = 2, error_line(error)
        else:
            status, text = 1, ''.join(traceback.format_exception(error)).rstrip()
        is_reporter = meeting.is_reporter(is_lost=is_lost)
    if is_reporter and text:
        print(text, file=sys.__stderr__, flush=True)
    # The launcher ends all ranks when one ends, so the rank that reports needs time to print.
    time.sleep(PRINT_SECONDS if is_reporter else REPORT_SECONDS)
    _exit(status)


def _exit(status: int) -> NoReturn:
    """End this process at once, with the child processes that a reward function has left.

    Python's normal exit sometimes aborts because of Gloo's and MPI's threads. Children would keep
    the launcher waiting for its pipes to close.
    """
    for child in multiprocessing.active_children():
        child.terminate()
    for clean_up in _clean_ups:
        clean_up()
    os._exit(status)


def before_exit(clean_up: Callable[[], object]) -> None:
    """Register `clean_up` to be called when this rank ends, as `_exit` skips atexit."""
    _clean_ups.append(clean_up)
