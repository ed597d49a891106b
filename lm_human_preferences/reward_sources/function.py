"""Reward by a user's Python function: --rewards.function FILE.py:FUNCTION.

The function gets two lists of texts, queries and responses. Further parameters get the columns of
the query file that have their names; **columns gets all columns. The function returns a number for
each response; or {name: numbers} of components, whose sum is the reward unless one is called score;
or both: (numbers, {name: numbers}).

Every rank runs the file once, and calls the function for its own responses. The state of the
function's module is neither saved with the run nor shared by the ranks.
"""

import contextlib
import functools
import inspect
import itertools
import os
import pathlib
import random
import reprlib
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from lm_human_preferences.distributed import worker
from lm_human_preferences.errors import UserError
from lm_human_preferences.machine.hardware import default_device
from lm_human_preferences.reward_sources.texts import LARGEST, Texts, TextScorer
from lm_human_preferences.runs.reward_function import Source
from lm_human_preferences.utils import stop_signals

SHOWN = 200  # number of characters shown of an exception's message
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
# Names that a function's first parameter (_OF_RESPONSES) or second (_OF_QUERIES) must not have.
_OF_RESPONSES = ('responses', 'response', 'completions', 'completion')
_OF_QUERIES = ('queries', 'query', 'prompts', 'prompt')
_NO_NUMBERS = np.empty(0, dtype=object)


class FunctionScorer(TextScorer):
    """Reward by the function in `source`. __init__ runs the file; UserError if the file fails."""

    def __init__(self, source: Source) -> None:
        self.name = source.name
        path, _, self._name_in_file = source.name.rpartition(':')
        self._path = os.path.abspath(path)
        self._function = self._loaded(source)
        self.asks_for_columns = len(self._parameters) > 2

    def score(self, texts: Sequence[Texts]) -> torch.Tensor:
        """Return scores (texts,), float32; UserError if the function fails."""
        return self.score_and_parts(texts)[0]

    def score_and_parts(
        self, texts: Sequence[Texts]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return scores (texts,) and {component: (texts,)}; UserError if the function fails."""
        queries = [each.query for each in texts]
        responses = [each.response for each in texts]
        columns = self._columns(texts)
        with self._reported('calling it'), torch.no_grad(), _apart():
            returned = self._function(queries, responses, **columns)
        try:
            return _scores_and_parts(returned, len(texts))
        except UserError as e:
            raise UserError(f'reward function {self.name}: {e}') from e

    def _columns(self, texts: Sequence[Texts]) -> dict[str, list[Any]]:
        """Return {column: [value for each text]} for the columns that the function takes."""
        there = dict.fromkeys(name for each in texts for name in each.columns)
        asked = self._parameters[2:]
        takes_all = any(each.kind is each.VAR_KEYWORD for each in asked)
        names = {each.name for each in asked}
        for each in asked:
            if each.name not in there and each.default is each.empty and each.kind in _NAMED:
                raise UserError(
                    f'reward function {self.name} takes {each.name}, but the queries have no column'
                    ' of that name'
                )
        wanted = [name for name in there if takes_all or name in names]
        return {name: [each.columns.get(name) for each in texts] for name in wanted}

    def _loaded(self, source: Source) -> Callable[[list[str], list[str]], Any]:
        module = types.ModuleType(f'reward_function_{next(_numbers)}_{source.digest[:12]}')
        module.__file__ = self._path
        sys.modules[module.__name__] = module  # dataclasses and pickle look modules up by name
        _let_children_import(module.__name__, source.text, self._path)
        with self._reported('loading its file'):
            code = compile(source.text, self._path, 'exec')
            with _apart():
                exec(code, module.__dict__)
        function = module.__dict__.get(self._name_in_file)
        if not callable(function):
            raise UserError(
                f'reward function {self.name}: the file has no function {self._name_in_file}'
            )
        try:
            signature = inspect.signature(function)
            self._parameters = list(signature.parameters.values())
            named = [each.name for each in self._parameters[2:] if each.kind in _NAMED]
            signature.bind([], [], **dict.fromkeys(named))
            for parameter, others in zip(self._parameters, (_OF_RESPONSES, _OF_QUERIES)):
                if parameter.name in others:
                    raise TypeError(f'the name {parameter.name} suggests swapped parameters')
        except (TypeError, ValueError) as e:
            raise UserError(
                f'reward function {self.name} must take two lists of texts, queries and responses,'
                f' in this order: {e}'
            ) from e
        return function

    @contextlib.contextmanager
    def _reported(self, activity: str) -> Iterator[None]:
        """Turn any exception of the user's code into a UserError of one line."""
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException as e:  # unlike Exception, BaseException includes SystemExit
            exception = self._in_one_line(e)
            raise UserError(f'reward function {self.name}: {activity} raised {exception}') from e

    def _in_one_line(self, error: BaseException) -> str:
        """Return an exception as one line, with the last line number in the user's file."""
        message = ' '.join(str(error).split())
        told = f'{type(error).__name__}: {message:.{SHOWN}}' if message else type(error).__name__
        if isinstance(error, ModuleNotFoundError):
            told += '; modules beside the file are not imported: put what it needs of'
            told += f' {error.name} into the file itself, or install {error.name}'
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            if frame.filename == self._path:
                place = os.path.basename(self._path)
                return f'{told} ({place}, line {frame.lineno}, in {frame.name})'
        return told


def _scores_and_parts(returned: Any, count: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Convert a function's result to scores and {component: numbers}; UserError for bad results."""
    parts: dict[Any, Any] = {}
    if isinstance(returned, dict):
        parts = dict(returned)
        returned = parts.pop('score', None)
    elif isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict):
        returned, parts = returned
    numbers = {}
    for name, values in parts.items():
        try:
            numbers[str(name)] = _as_scores(values, count)
        except UserError as e:
            raise UserError(f'the component {name!r:.80} of the reward is wrong: {e}') from e
    if returned is None and numbers:
        return torch.stack(list(numbers.values())).sum(0), numbers
    return _as_scores(returned, count), numbers


def _as_scores(returned: Any, count: int) -> torch.Tensor:
    """Convert a reward function's result to float32 (count,); UserError unless all are finite."""
    values = _as_array(returned)
    if values.dtype.kind not in 'biuf':
        shown = reprlib.repr(returned)
        raise UserError(f'the function returned {shown:.60}, not a number for each response')
    if values.shape != (count,):
        raise UserError(f'the function returned numbers of shape {values.shape}, not ({count},)')
    is_valid = np.abs(values.astype(np.float64)) <= LARGEST  # a comparison with NaN is False
    wrong = np.flatnonzero(~is_valid)
    if len(wrong):
        raise UserError(
            f'the function returned {values[wrong[0]]} for response {wrong[0]} of {count}: a reward'
            f' must be finite, of at most {LARGEST:g} in size'
        )
    return torch.from_numpy(values.astype(np.float32))


def _as_array(returned: Any) -> np.ndarray:
    """Convert a list, array or tensor to an array; _NO_NUMBERS if it cannot be converted."""
    try:
        if isinstance(returned, torch.Tensor):
            return returned.detach().cpu().double().numpy()
        if isinstance(returned, (list, tuple)):
            # Tensors become Python numbers before the check of types, which tensors would fail.
            returned = [value.item() if hasattr(value, 'item') else value for value in returned]
            if not all(isinstance(value, (int, float)) for value in returned):
                return _NO_NUMBERS
        return np.asarray(returned)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return _NO_NUMBERS


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Within the block, protect the run's random numbers, signals and streams from user code.

    A process that is forked in the block ends with the block, so that there is only one run.
    """
    process, of_python, of_numpy = os.getpid(), random.getstate(), np.random.get_state()
    device = default_device()
    devices = [torch.cuda.current_device()] if device.type == 'cuda' else []
    streams, handlers = (sys.stdout, sys.stderr), stop_signals.handlers()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        if os.getpid() != process:
            os._exit(1)
        stop_signals.restore(handlers)
        stop_signals.set_timer()
        sys.stdout, sys.stderr = streams
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def _let_children_import(name: str, text: str, path: str) -> None:
    """Write a reward function's code as a module on sys.path, to be imported by child processes."""
    module = f'__file__ = {path!r}\nexec(compile({text!r}, __file__, "exec"))\n'
    folder = _folder_of_modules()
    pathlib.Path(folder, f'{name}.py').write_text(module, encoding='utf-8')
    if folder not in sys.path:
        sys.path.append(folder)


@functools.cache
def _folder_of_modules() -> str:
    """Return a temporary folder, which is deleted when this process ends."""
    folder = tempfile.TemporaryDirectory()
    worker.before_exit(folder.cleanup)
    return folder.name


_numbers = itertools.count()  # each load of a function's file gets its own module name, for pickle
