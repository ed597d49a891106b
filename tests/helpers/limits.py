"""Limits of time for each test and for the whole run, so that a hang is a failure that says where
it hangs.

pytest-timeout decides how long a test may take: by `timeout` and `session_timeout` in
pyproject.toml, and the mark `timeout`. Its own way to strike needs SIGALRM, which trainings use and
reset, so it would be lost here. Instead, a thread sends SIGUSR2, whose handler fails the test with
the stacks of all threads, wherever Python waits for a lock, a process or a socket; and once more
after a while, in case tidying up hangs as well. A call into C that does not return to Python, such
as one of MPI, does not notice. GRACE seconds after the limit all stacks go to standard error and
the process ends. With `-n` that is a worker: its test has failed, another worker takes its place,
and the run goes on. Without, the run ends with status 1.
"""

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback

import pytest
from pytest_timeout import SESSION_TIMEOUT_KEY, Settings, is_debugging

SLOW = 1200  # seconds for a test that is marked as slow
AGAIN = 20  # seconds between two signals
GRACE = 60  # seconds from the limit to the end of the process
LAST = (
    900  # seconds from the limit of the run, after which no test begins, to the end of the process
)

_stderr = pytest.StashKey[int]()
_current = 'collecting tests'


@pytest.hookimpl(trylast=True)  # what pytest-timeout was told is in the stash by then
def pytest_configure(config: pytest.Config) -> None:
    """Keep the standard error that tests do not capture, and begin to watch the run."""
    config.stash[_stderr] = os.dup(2)
    seconds = config.stash[SESSION_TIMEOUT_KEY]
    if seconds:
        threading.Thread(
            target=_end_run, args=(config, seconds + LAST), name='limit of the run', daemon=True
        ).start()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests get more time, unless they have said how much."""
    for item in items:
        if item.get_closest_marker('slow') and not item.get_closest_marker('timeout'):
            item.add_marker(pytest.mark.timeout(SLOW))


def pytest_runtest_logstart(nodeid: str) -> None:
    """Note what is being done; with `-n`, what was begun last."""
    global _current
    _current = nodeid


class Limit:
    """Fails `item` after settings.timeout seconds, unless it is cancelled before."""

    def __init__(self, item: pytest.Item, settings: Settings) -> None:
        self.item, self.settings = item, settings
        self.cancelled = threading.Event()
        self.main = threading.get_ident()
        self.before = signal.signal(signal.SIGUSR2, self.strike)
        faulthandler.dump_traceback_later(
            settings.timeout + GRACE, exit=True, file=item.config.stash[_stderr]
        )
        self.thread = threading.Thread(target=self.watch, name=f'limit of {item.name}', daemon=True)
        self.thread.start()

    def cancel(self) -> None:
        """From here on, nothing happens."""
        if not self.cancelled.is_set():
            self.cancelled.set()
            faulthandler.cancel_dump_traceback_later()
            self.thread.join()
            signal.signal(signal.SIGUSR2, self.before)

    def watch(self) -> None:
        """What the thread does: send signals to the main thread."""
        seconds = self.settings.timeout
        while not self.cancelled.wait(seconds):
            message = f'\n{self.item.nodeid} has taken more than {self.settings.timeout:g} s\n'
            os.write(self.item.config.stash[_stderr], message.encode())
            signal.pthread_kill(self.main, signal.SIGUSR2)
            seconds = AGAIN

    def strike(self, *_) -> None:
        """What the signal does."""
        if self.cancelled.is_set() or is_debugging():
            return
        pytest.fail(
            f'Timeout: more than {self.settings.timeout:g} s; what the threads were'
            f' doing:\n{stacks()}'
        )


def stacks() -> str:
    """Where each thread is."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return '\n'.join(
        f'--- {names.get(thread, "a thread that Python has not started")} ---\n'
        + ''.join(traceback.format_stack(frame))
        for thread, frame in sys._current_frames().items()
    )


def pytest_timeout_set_timer(item: pytest.Item, settings: Settings) -> bool | None:
    """In the place of pytest-timeout's."""
    if settings.method != 'signal' or threading.current_thread() is not threading.main_thread():
        return None  # such as `--timeout-method thread`: theirs
    limit = Limit(item, settings)
    item.cancel_timeout = limit.cancel
    item.renew_timeout = lambda: (
        pytest_timeout_set_timer(item, settings) if limit.cancelled.is_set() else None
    )
    return True


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item):
    """pytest-timeout cancels the limit when a test has failed; what it leaves to be torn down may
    hang, too."""
    if hasattr(item, 'renew_timeout'):
        item.renew_timeout()
    yield


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item):
    """Say what the run was at when it reached its limit."""
    yield
    reason = item.session.shouldfail
    if isinstance(reason, str) and reason.startswith('session-timeout'):
        item.session.shouldfail = f'{reason} after {item.nodeid}'


def _end_run(config: pytest.Config, seconds: float) -> None:
    """End this process, in which even the limits of tests have not helped."""
    time.sleep(seconds)
    os.write(
        config.stash[_stderr],
        f'\nThe run has taken more than {seconds:g} s; it was at: {_current}\n'.encode(),
    )
    faulthandler.dump_traceback(config.stash[_stderr], all_threads=True)
    os._exit(1)
