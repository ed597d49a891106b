"""A reward that is a function of the user's: --rewards.function FILE.py:FUNCTION.

The function gets two lists of texts, queries and responses, and returns a number for each. Every
rank runs the file once, and calls the function for its own share of the responses. What the file
keeps in its module between two calls is not saved with the run: a run that is resumed begins with
what the file makes anew, and the ranks do not share it.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import reprlib
import sys
import traceback
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from lm_human_preferences.errors import UserError
from lm_human_preferences.external_rewards.texts import Texts
from lm_human_preferences.runs.reward_function import Source
from lm_human_preferences.utils.core import default_device

SHOWN = 200  # characters of the message of an exception
FRAMES = 3  # of the function's own traceback, the innermost
# sys.exit() in the file would end the rank as if all were well.
_ITS_ERRORS = (Exception, SystemExit)
_NO_NUMBERS = np.empty(0, dtype=object)


class FunctionScorer:
    """Asks the function in `source`, whose file is run here; UserError where that fails."""

    def __init__(self, source: Source) -> None:
        self.name = source.name
        self._path = os.path.abspath(source.path)
        self._function = self._loaded(source)

    def score(self, texts: Sequence[Texts]) -> torch.Tensor:
        """Scores (texts,), float32; UserError in one line for whatever the function does wrong.

        What it draws from torch's random numbers changes nothing of the run's own.
        """
        queries = [each.query for each in texts]
        responses = [each.response for each in texts]
        try:
            with torch.no_grad(), _own_random_numbers():
                returned = self._function(queries, responses)
        except _ITS_ERRORS as e:
            raise UserError(f'reward function {self.name} raised {self._told(e)}') from e
        try:
            return _as_scores(returned, len(texts))
        except UserError as e:
            raise UserError(f'reward function {self.name} {e}') from e

    def _loaded(self, source: Source) -> Callable[[list[str], list[str]], Any]:
        function = self._run(source).get(source.function)
        if function is None:
            raise UserError(
                f'reward function {self.name}: the file has no function {source.function}'
            )
        if not callable(function):
            raise UserError(
                f'reward function {self.name}: {source.function} is no function, but a'
                f' {type(function).__name__}'
            )
        self._check_signature(function)
        return function

    def _run(self, source: Source) -> dict[str, Any]:
        """The names that the file defines. Modules beside it can be imported."""
        module = types.ModuleType(f'reward_function_{source.digest[:12]}')
        module.__file__ = self._path
        sys.modules[module.__name__] = module  # where dataclasses and pickle look for it
        folder = os.path.dirname(self._path)
        if folder not in sys.path:
            sys.path.append(folder)
        try:
            code = compile(source.text, self._path, 'exec')
            with _own_random_numbers():
                exec(code, module.__dict__)
        except _ITS_ERRORS as e:
            raise UserError(
                f'reward function {self.name}: the file cannot be run: {self._told(e)}'
            ) from e
        return module.__dict__

    def _check_signature(self, function: Callable[..., Any]) -> None:
        try:
            signature = inspect.signature(function)
        except ValueError:  # of code that is not Python
            return
        try:
            signature.bind([], [])
        except TypeError as e:
            raise UserError(
                f'reward function {self.name} takes {signature}, but is called with two lists of'
                ' texts, queries and responses'
            ) from e

    def _told(self, error: BaseException) -> str:
        """An exception of the file in one line, with its last frames from the file on."""
        message = ' '.join(str(error).split())
        told = f'{type(error).__name__}: {message:.{SHOWN}}' if message else type(error).__name__
        frames = traceback.extract_tb(error.__traceback__)
        own = [number for number, frame in enumerate(frames) if frame.filename == self._path]
        places = frames[own[0] :][-FRAMES:] if own else []
        lines = [
            f'{os.path.basename(frame.filename)}, line {frame.lineno}, in {frame.name}'
            for frame in places
        ]
        return f'{told} ({"; ".join(lines)})' if lines else told


def _as_scores(returned: Any, count: int) -> torch.Tensor:
    """What a function has returned for `count` responses, as float32 (count,).

    UserError, whose text continues 'the function', for anything but so many finite numbers.
    """
    if returned is None:
        raise UserError('returned None: it must return a number for each response')
    values = _as_array(returned)
    if values.dtype.kind not in 'biuf':
        raise UserError(f'returned {reprlib.repr(returned):.60}, not a number for each response')
    if values.shape != (count,):
        what = f'{len(values)} numbers' if values.ndim == 1 else f'an array {values.shape}'
        raise UserError(f'returned {what} for {count} responses: it must return ({count},)')
    with np.errstate(over='ignore'):
        scores = torch.from_numpy(values.astype(np.float32))
    wrong = (~scores.isfinite()).nonzero().flatten().tolist()
    if wrong:
        raise UserError(
            f'returned {values[wrong[0]]} for response {wrong[0]} of {count}: a reward must be'
            ' finite in float32'
        )
    return scores


def _as_array(returned: Any) -> np.ndarray:
    """A list, an array or a tensor as an array; of objects where it is none of numbers."""
    try:
        if isinstance(returned, torch.Tensor):
            returned = returned.detach().cpu()
            return (returned.double() if returned.is_floating_point() else returned).numpy()
        if isinstance(returned, (list, tuple)):
            # Of tensors or arrays on whatever device; numpy makes text of numbers beside text.
            returned = [value.item() if hasattr(value, 'item') else value for value in returned]
            if not all(isinstance(value, (int, float)) for value in returned):
                return _NO_NUMBERS
        return np.asarray(returned)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return _NO_NUMBERS


def _own_random_numbers() -> contextlib.AbstractContextManager[Any]:
    """Within the block, what is drawn from torch's random numbers is not taken from the run's."""
    device = default_device()
    devices = [torch.cuda.current_device()] if device.type == 'cuda' else []
    return torch.random.fork_rng(devices=devices)
