"""How models of transformers are made here, and what goes wrong with them told in one line."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from lm_human_preferences.errors import UserError

# transformers switches initialisation off, and the generator is put back, for all threads at once.
_one_at_a_time = threading.RLock()


@contextlib.contextmanager
def told(path: str) -> Iterator[None]:
    """What transformers raises for a config or weights at `path` that cannot be is a UserError.

    Random numbers go on as if nothing had been drawn: where a model begins does not depend on it.
    """
    import torch

    # Outside of the try below, with all that it imports: what cannot be imported is no fault of a
    # model's files.
    import transformers.modeling_utils

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        with _one_at_a_time, torch.random.fork_rng(devices=[]):
            yield
    except UserError:
        raise
    except Exception as e:  # of any kind: the numbers are whatever a file says
        reason = ' '.join(str(e).split())
        raise UserError(f'{path} does not describe a model that can be: {reason:.300}') from e
