"""How models of transformers are made here, and what goes wrong with them told in one line."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from lm_human_preferences.errors import UserError

MOST_LAYERS = 1000  # of a config that can be meant
# What a config.json does not decide: in which numbers a model is computed, and by whose code.
_OURS_TO_SAY = ('auto_map', '_attn_implementation', 'attn_implementation', 'torch_dtype', 'dtype')
# transformers switches initialisation off, and the generator is put back, for all threads at once.
_one_at_a_time = threading.RLock()


@contextlib.contextmanager
def told(path: str) -> Iterator[None]:
    """What transformers raises for a config or weights at `path` that cannot be is a UserError.

    Random numbers go on as if nothing had been drawn: where a model begins does not depend on it.
    """
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


def config_of(content: dict[str, Any]) -> Any:
    """The config of transformers that a config.json describes, without dropout."""
    from transformers import AutoConfig

    taken = {key: value for key, value in content.items() if key not in _OURS_TO_SAY}
    return AutoConfig.for_model(**{**taken, **dict.fromkeys(dropout_in(taken), 0.0)})


def dropout_in(content: dict[str, Any]) -> list[str]:
    """The settings that say how much is dropped at random."""
    return [key for key in content if 'dropout' in key or key.endswith(('_pdrop', 'layerdrop'))]


def empty_model(config: Any, model_class: str = 'AutoModelForCausalLM') -> Any:
    """A model with memory for its parameters but no values in it. model_class: of transformers."""
    import transformers
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = getattr(transformers, model_class).from_config(config, dtype=torch.float32)
    model.tie_weights()  # as far as the config says so
    return model
