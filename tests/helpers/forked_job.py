"""`./launch.py` in a process that interrupted.py has a fork server start: kills and calls."""

import faulthandler
import functools
import gc
import importlib
import itertools
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blobserver.server import install_redirect

import launch


def run(
    words, output, directory, environment, moments, kill_at=None, number=9, counter=None, calls=()
) -> None:
    """Run `./launch.py WORDS`, which sends itself signal `number` at the `kill_at`-th of `moments`.

    A moment is the call of a function, 'module:Class.method'. The file `counter` gets how many
    there were. calls: each {'moment': ..., 'count': n, 'call': 'module:function', 'arguments':
    [...]} is made as soon as a moment has come and gone n times.
    """
    gc.freeze()  # what the server has imported is not looked through, and so not copied
    threading.Thread(target=_end_with_pytest, daemon=True).start()
    with open(output, 'ab', buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    faulthandler.enable(2, all_threads=True)  # SIGABRT shows where it is
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    if 'BLOBTEST_REDIRECT' in os.environ:
        install_redirect(os.environ['BLOBTEST_REDIRECT'])
    for call in calls:
        _call_after(**call)
    passed = itertools.count(1)  # which threads may advance at the same time
    for name in moments:
        _wrap(name, functools.partial(_count, passed, kill_at, number))
    try:
        launch.cli(words)
    finally:
        if counter:
            Path(counter).write_text(str(next(passed) - 1))


def _end_with_pytest() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _resolve(name: str) -> tuple[Any, str]:
    module, _, path = name.partition(':')
    *classes, attribute = path.split('.')
    return functools.reduce(getattr, classes, importlib.import_module(module)), attribute


def _wrap(name: str, wrapper: Callable) -> None:
    place, attribute = _resolve(name)
    function = getattr(place, attribute)
    setattr(place, attribute, functools.wraps(function)(wrapper(function)))


def _count(passed: itertools.count, kill_at: int | None, number: int, function: Callable):
    """Wrap a function: its call sends a signal to this process if it is the `kill_at`-th."""

    def counted(*args, **kwargs):
        if next(passed) == kill_at:
            os.kill(os.getpid(), number)
        return function(*args, **kwargs)

    return counted


def _call_after(moment: str, count: int, call: str, arguments: list) -> None:
    """Have the function `call` called when `moment` has returned for the `count`-th time."""
    returned = itertools.count(1)

    def wrapper(function: Callable) -> Callable:
        def counted(*args, **kwargs):
            result = function(*args, **kwargs)
            if next(returned) == count:
                getattr(*_resolve(call))(*arguments)
            return result

        return counted

    _wrap(moment, wrapper)
