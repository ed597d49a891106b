"""Limit of time for each test: a hang is a failure that shows the stacks of all threads.

pytest-timeout decides how long a test may take: by `timeout` in pyproject.toml, and the mark
`timeout`. Its own way to strike needs SIGALRM, which trainings use and reset. Here a thread sends
SIGUSR2, whose handler fails the test wherever Python waits. A call into C that does not return to
Python, such as one of MPI, does not notice: GRACE seconds later the process ends. With `-n` that is
a worker, and another takes its place.
"""

import faulthandler
import os
import signal
import tempfile
import threading

import pytest
from pytest_timeout import Settings, is_debugging

SLOW = 1200  # seconds for a test that is marked as slow
GRACE = 60  # seconds from the limit to the end of the process

_stderr = pytest.StashKey[int]()
_timer = threading.Timer(0, lambda: None)  # of the present test


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Keep the standard error that tests do not capture."""
    config.stash[_stderr] = os.dup(2)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give slow tests more time, unless they have said how much."""
    for item in items:
        if item.get_closest_marker('slow') and not item.get_closest_marker('timeout'):
            item.add_marker(pytest.mark.timeout(SLOW))


def pytest_timeout_set_timer(item: pytest.Item, settings: Settings) -> bool:
    """Take the place of pytest-timeout's timer."""
    global _timer

    def fail(*_) -> None:
        if is_debugging():
            return
        with tempfile.TemporaryFile('w+') as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            pytest.fail(f'Timeout: more than {settings.timeout:g} s\n{file.read()}')

    signal.signal(signal.SIGUSR2, fail)
    main = threading.get_ident()
    _timer = threading.Timer(settings.timeout, signal.pthread_kill, [main, signal.SIGUSR2])
    _timer.daemon = True
    _timer.start()
    file = item.config.stash[_stderr]
    faulthandler.dump_traceback_later(settings.timeout + GRACE, exit=True, file=file)
    return True


def pytest_timeout_cancel_timer() -> bool:
    """Take the place of pytest-timeout's cancellation."""
    _timer.cancel()
    return True


def pytest_runtest_logfinish() -> None:
    """Let the process live; what a failed test left to be torn down might have hung, too."""
    faulthandler.cancel_dump_traceback_later()


def pytest_enter_pdb() -> None:
    """Give who debugs all the time that it takes."""
    faulthandler.cancel_dump_traceback_later()
