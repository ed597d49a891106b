"""Tests that hang fail, with the stacks of all threads, and the run goes on; pytest is never
forked."""

import multiprocessing
import os
import re
import subprocess
import sys
from pathlib import Path

import interrupted
import pytest
from interrupted import start
from launched import REPOSITORY

# Every way to hang, each in a function of its own, so that the stacks tell them apart. Trainings do
# what the second one does, and the signal of pytest-timeout's own would never come.
HANGING = """
import signal, threading
import pytest

lock = threading.Lock()
lock.acquire()

def wait_for_ever():
    lock.acquire()

def test_that_hangs_at_a_lock():
    threading.Thread(target=wait_for_ever, daemon=True, name='another').start()
    wait_for_ever()

def test_that_hangs_after_an_alarm():
    signal.alarm(0)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    threading.Event().wait()

def test_that_hangs_twice():
    try:
        threading.Event().wait()
    finally:
        threading.Event().wait()

@pytest.fixture
def hanging_fixture():
    yield
    threading.Event().wait()

def test_that_fails_and_whose_fixture_hangs(hanging_fixture):
    assert False

def test_that_passes():
    pass
"""
HANGING_IN_C = """
import ctypes

def test_that_hangs():
    ctypes.PyDLL(None).sleep(600)  # with the interpreter's lock

def test_that_passes():
    pass
"""
MANY = """
import pytest, time

@pytest.mark.parametrize('number', range(100))
def test_that_takes_time(number):
    time.sleep(.2)
"""


def pytest_on(
    folder: Path, source: str, *options: str, grace: float = 8, last: float = 100
) -> subprocess.CompletedProcess:
    """The result of pytest, with our limits, on a file of tests.

    grace: seconds from a test's limit to the end of the process; last: from the run's limit.
    """
    path = folder / 'test_it.py'
    path.write_text(source)
    (folder / 'short.py').write_text(
        f'import limits\nlimits.AGAIN, limits.GRACE, limits.LAST = 1, {grace}, {last}\n'
    )
    return subprocess.run(
        [
            sys.executable,
            '-m',
            'pytest',
            '-p',
            'limits',
            '-p',
            'short',
            '-p',
            'no:cacheprovider',
            '-c',
            REPOSITORY / 'pyproject.toml',
            '--rootdir',
            folder,
            path,
            *options,
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, 'PYTHONPATH': f'{REPOSITORY}/tests/helpers:{folder}', 'COLUMNS': '80'},
    )


@pytest.mark.slow
@pytest.mark.parametrize('option', ['-n0', '-n1'])
def test_hangs_fail_and_the_run_goes_on(tmp_path, option):
    done = pytest_on(tmp_path, HANGING, '--timeout', '1', option)
    assert done.returncode == 1, done.stdout
    assert '4 failed, 1 passed, 1 error' in done.stdout
    reports = re.split('^_{3,} (.*) _{3,}$', done.stdout, flags=re.MULTILINE)[1:]
    stacks = dict(zip(reports[::2], reports[1::2], strict=True))
    hangs = {
        'test_that_hangs_at_a_lock': 'test_that_hangs_at_a_lock',
        'test_that_hangs_after_an_alarm': 'test_that_hangs_after_an_alarm',
        'test_that_hangs_twice': 'test_that_hangs_twice',
        'ERROR at teardown of test_that_fails_and_whose_fixture_hangs': 'hanging_fixture',
    }
    for report, function in hangs.items():
        assert 'Timeout: more than 1 s; what the threads were doing:' in stacks[report]
        assert '--- MainThread ---' in stacks[report] and f'in {function}\n' in stacks[report]
    at_a_lock = stacks['test_that_hangs_at_a_lock']
    assert '--- another ---' in at_a_lock and 'in wait_for_ever\n' in at_a_lock


@pytest.mark.slow
def test_a_hang_in_c_ends_the_process(tmp_path):
    """Its stacks are printed; only where there are workers the run goes on."""
    done = pytest_on(tmp_path, HANGING_IN_C, '--timeout', '1', '-n0', grace=1)
    assert done.returncode == 1 and 'passed' not in done.stdout
    assert 'test_it.py", line 5 in test_that_hangs' in done.stderr
    done = pytest_on(tmp_path, HANGING_IN_C, '--timeout', '1', '-n1', grace=1)
    assert done.returncode == 1 and '1 failed, 1 passed' in done.stdout
    assert "crashed while running 'test_it.py::test_that_hangs'" in done.stdout
    assert 'test_it.py", line 5 in test_that_hangs' in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize('option', ['-n0', '-n2'])
def test_the_run_has_a_limit(tmp_path, option):
    done = pytest_on(tmp_path, MANY, '--session-timeout', '2', option)
    assert done.returncode in (1, 2)
    assert 'session-timeout: 2.0 sec exceeded after test_it.py::test_that_t' in done.stdout
    assert 'passed' in done.stdout and '100 passed' not in done.stdout


@pytest.mark.slow
def test_a_run_that_hangs_beyond_all_limits_ends(tmp_path):
    """Here: a thread that does not let the interpreter end."""
    source = (
        'import threading\n\ndef test_that_passes():\n'
        '    threading.Thread(target=threading.Event().wait).start()\n'
    )
    done = pytest_on(tmp_path, source, '--session-timeout', '1', '-n0', last=5)
    assert done.returncode == 1 and '1 passed' in done.stdout
    assert (
        'The run has taken more than 6 s; it was at: test_it.py::test_that_passes\n' in done.stderr
    )


def test_pytest_cannot_be_forked():
    with pytest.raises(RuntimeError, match='a fork of pytest'):
        os.fork()
    with pytest.raises(RuntimeError, match='a fork of pytest'):
        multiprocessing.get_context('fork').Process(target=print).start()


def test_other_forks_are_noticed(tmp_path):
    (tmp_path / 'conftest.py').write_text((REPOSITORY / 'tests/conftest.py').read_text())
    source = 'import subprocess\n\ndef test_it():\n    subprocess.run(["true"], preexec_fn=print)\n'
    done = pytest_on(tmp_path, source, '-n0')
    assert (
        done.returncode == 1
        and 'pytest was forked:' in done.stdout
        and 'in test_it\n' in done.stdout
    )


def test_children_share_nothing(tmp_path):
    """Neither what was changed here by hand, nor locks: each is a fork of a process that has one
    thread."""
    child = start(['--help'], tmp_path / 'out', calls=[], moments=())
    assert child.wait() == 0 and 'train_policy' in (tmp_path / 'out').read_text()
    zygote = interrupted.zygote().process.pid
    assert len(list(Path(f'/proc/{zygote}/task').iterdir())) == 1
    assert os.getsid(zygote) != os.getsid(0)


@pytest.mark.slow
def test_a_child_that_hangs_shows_where(tmp_path):
    child = start(
        ['train_policy', 'test', 'run', '--mpi', '1', '--save_dir', str(tmp_path)],
        tmp_path / 'out',
        calls=[{'moment': 'os:replace', 'count': 1, 'call': 'time:sleep', 'arguments': [600]}],
    )
    stack = '(?s)not ended within 5 seconds.*Fatal Python error: .*in atomic_write'
    with pytest.raises(AssertionError, match=stack):
        child.wait(5)
    assert child.status == -6 or child.status == -9


def test_what_a_test_leaves_running_is_ended(tmp_path):
    child = start(
        [
            'train_policy',
            'test',
            'run',
            '--mpi',
            '1',
            '--save_dir',
            str(tmp_path),
            '--ppo.total_episodes',
            '64_000_000',
        ],
        tmp_path / 'out',
    )
    interrupted.kill_children()
    assert child.status == -9 and not interrupted.zygote().running
