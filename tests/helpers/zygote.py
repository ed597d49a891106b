"""A fresh interpreter that has everything imported and forks itself for each training that a test
may kill.

`python tests/helpers/zygote.py DESCRIPTOR` gets its jobs from interrupted.py over a connection of
multiprocessing. Forking pytest instead would copy locks that other threads hold
(tqdm's monitor, torch's workers, servers), and its children would share tqdm's semaphore: one that
is killed while it holds it stops all others for ever. This process has one thread and has never
made a progress bar, which is checked before each fork; so each child makes locks of its own.

Messages are JSON. A request has a `number` that its answer repeats; that a child has ended is told
without being asked.
"""

import faulthandler
import functools
import gc
import importlib
import itertools
import json
import multiprocessing.connection
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from blobserver.server import install_redirect

import launch
from lm_human_preferences.distributed import worker

# What trainings import when they start: each child would spend seconds on it.
PRELOADED = (
    'train_policy',
    'train_reward',
    'checkpointing.checkpointer',
    'runs.uploads',
    'datasets.books',
    'datasets.reviews',
)


def resolve(name: str) -> tuple[Any, str]:
    """The object and the attribute that 'module:Class.method' or 'module:function' names."""
    module, _, path = name.partition(':')
    *classes, attribute = path.split('.')
    return functools.reduce(getattr, classes, importlib.import_module(module)), attribute


def wrap(name: str, wrapper: Callable) -> None:
    """Put wrapper(function) in the place of the function of that name."""
    place, attribute = resolve(name)
    setattr(
        place,
        attribute,
        functools.wraps(getattr(place, attribute))(wrapper(getattr(place, attribute))),
    )


class Moments:
    """Counts the calls of some functions, and sends a signal to this process before the
    `kill_at`-th."""

    def __init__(self, names: list[str], kill_at: int | None, number: int) -> None:
        self.passed = itertools.count(1)  # which threads may advance at the same time
        self.kill_at, self.number = kill_at, number
        for name in names:
            wrap(name, self.counted)

    def counted(self, function: Callable) -> Callable:
        def wrapper(*args, **kwargs):
            if next(self.passed) == self.kill_at:
                os.kill(os.getpid(), self.number)
            return function(*args, **kwargs)

        return wrapper


def call_after(moment: str, count: int, call: str, arguments: list) -> None:
    """Call the function of name `call` when that of name `moment` has returned for the `count`-th
    time."""
    returned = itertools.count(1)

    def counted(function: Callable) -> Callable:
        def wrapper(*args, **kwargs):
            result = function(*args, **kwargs)
            if next(returned) == count:
                place, attribute = resolve(call)
                getattr(place, attribute)(*arguments)
            return result

        return wrapper

    wrap(moment, counted)


def run_job(job: dict) -> None:
    """`./launch.py WORDS` as interrupted.start describes it."""
    os.chdir(job['directory'])
    os.environ.clear()
    os.environ.update(job['environment'])
    if 'BLOBTEST_REDIRECT' in os.environ:
        install_redirect(os.environ['BLOBTEST_REDIRECT'])
    for name, value in job['patches'].items():
        setattr(*resolve(name), value)
    for call in job['calls']:
        call_after(**call)
    moments = Moments(job['moments'], job['kill_at'], job['number'])
    try:
        launch.cli(job['words'])
    finally:
        if job['counter']:
            Path(job['counter']).write_text(str(next(moments.passed) - 1))


def become_child(job: dict) -> NoReturn:
    """Run `job` with its own output and signal handlers, and end this process as an interpreter
    would end."""
    status = 1
    try:
        with open(job['output'], 'ab', buffering=0) as file:
            os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
        sys.stdout, sys.stderr = (
            os.fdopen(os.dup(descriptor), 'w', buffering=1) for descriptor in (1, 2)
        )
        faulthandler.enable(2, all_threads=True)  # SIGABRT shows where it is
        signal.set_wakeup_fd(-1)
        for number in signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        run_job(job)
        status = 0
    except SystemExit as e:
        status = e.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


class Zygote:
    """Serves one connection: starts and kills children, and tells their exit statuses; ends with
    the connection."""

    def __init__(self, connection: multiprocessing.connection.Connection) -> None:
        self.connection = connection
        self.children: set[int] = set()
        self.wakeup, writing = socket.socketpair()
        writing.setblocking(False)
        signal.set_wakeup_fd(writing.detach())
        signal.signal(signal.SIGCHLD, lambda *_: None)  # SIG_DFL would not wake anybody up

    def serve(self) -> None:
        """Until the other side is gone; then no child stays."""
        try:
            while True:
                ready = multiprocessing.connection.wait([self.connection, self.wakeup])
                if self.wakeup in ready:
                    self.wakeup.recv(4096)
                    self.reap()
                if self.connection in ready:
                    self.answer(json.loads(self.connection.recv_bytes()))
        except (EOFError, OSError):
            for process in self.children:
                os.kill(process, signal.SIGKILL)

    def tell(self, **message: Any) -> None:
        self.connection.send_bytes(json.dumps(message).encode())

    def reap(self) -> None:
        """Process ids are those of children until this has told of their ends: only here are they
        given free."""
        for process in sorted(self.children):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                self.children.remove(process)
                self.tell(ended=process, status=os.waitstatus_to_exitcode(status))

    def answer(self, request: dict) -> None:
        if 'job' in request:
            self.tell(number=request['number'], process=self.fork(request['job']))
        else:
            alive = request['kill'] in self.children
            if alive:
                os.kill(request['kill'], request['signal'])
            self.tell(number=request['number'], alive=alive)

    def fork(self, job: dict) -> int:
        assert threads_of_this_process() == 1, (
            'a child would have the locks of threads that it has not'
        )
        assert not hasattr(tqdm.std.TqdmDefaultWriteLock, 'mp_lock'), (
            'children would share a semaphore'
        )
        process = os.fork()
        if not process:
            self.connection.close()
            become_child(job)
        self.children.add(process)
        return process


def threads_of_this_process() -> int:
    """Those that Python does not know of, too, where the system tells."""
    tasks = Path('/proc/self/task')
    return len(list(tasks.iterdir())) if tasks.exists() else threading.active_count()


if __name__ == '__main__':
    worker.import_for_good('torch').set_num_threads(1)
    for module in PRELOADED:
        worker.import_for_good(f'lm_human_preferences.{module}')
    gc.freeze()  # no child looks for garbage in what is here, and so copies it
    Zygote(multiprocessing.connection.Connection(int(sys.argv[1]))).serve()
