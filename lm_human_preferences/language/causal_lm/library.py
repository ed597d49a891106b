"""Configs, uninitialised models and weights from transformers, whose errors are put in one line."""

import contextlib
import functools
import os
import re
import threading
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn

from lm_human_preferences.errors import UserError
from lm_human_preferences.language.networks.network import HEADS
from lm_human_preferences.language.networks.weights import (
    CAUSAL_LM,
    OF_NO_USE,
    Weights,
    copy_value,
    listed,
    open_safetensors,
    safetensors_of,
)

MOST_LAYERS = 1000  # largest number of layers that a config.json may name
_NUMBER_OF_LAYERS = re.compile('(layers?|blocks?)$')  # keys of config.json for the number of layers
# Ignored keys of config.json: this program sets dtype and attention, and runs no foreign code.
_OURS_TO_SAY = ('auto_map', '_attn_implementation', 'attn_implementation', 'torch_dtype', 'dtype')
# Only one thread may make a model: no_init_weights and the random generator affect all threads.
_one_at_a_time = threading.RLock()


@contextlib.contextmanager
def explained(
    path: str, problem: str = ' does not describe a model that transformers can make'
) -> Iterator[None]:
    """Within the context, turn errors of transformers or PEFT about `path` into UserErrors.

    The random generator and the warning filters are restored afterwards. problem: text of the
    message after the path.
    """
    # The import is outside the `try`, as a failing import is not a fault of the model's files.
    import transformers.modeling_utils

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        with _one_at_a_time, torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            # Models with zero-sized tensors need no warning: they are refused later.
            warnings.filterwarnings('ignore', 'Initializing zero-element tensors')
            yield
    except UserError:
        raise
    except Exception as e:  # any error may follow from the values in a file
        reason = ' '.join(str(e).split())
        raise UserError(f'{path}{problem}: {reason:.300}') from e


def config_of(content: Any, path: str) -> Any:
    """Make transformers' config, with dropout 0, from a config.json; raise UserError if invalid."""
    from transformers import CONFIG_MAPPING, AutoConfig

    with explained(path):
        family = content.get('model_type')
        if family not in CONFIG_MAPPING:
            code = ' (its own code, which auto_map names, is not run)' * ('auto_map' in content)
            raise UserError(f'{path}: transformers knows no model {family!r:.80}{code}')
        if content.get('quantization_config'):
            raise UserError(
                f'{path} describes a quantised model, which cannot be trained: use the model that'
                ' it was made from'
            )
        for key, value in content.items():
            if _NUMBER_OF_LAYERS.search(key) and isinstance(value, int) and value > MOST_LAYERS:
                raise UserError(f'{path}: no model can have {key} = {value:.6g}')
        taken = {key: value for key, value in content.items() if key not in _OURS_TO_SAY}
        return AutoConfig.for_model(**{**taken, **dict.fromkeys(dropout_in(taken), 0.0)})


def dropout_in(content: dict[str, Any]) -> list[str]:
    return [key for key in content if 'dropout' in key or key.endswith(('_pdrop', 'layerdrop'))]


def empty_model(config: Any, model_class: str = 'AutoModelForCausalLM') -> Any:
    """Create a model with uninitialised parameters. model_class: name of a transformers class."""
    import transformers
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = getattr(transformers, model_class).from_config(config, dtype=torch.float32)
    model.tie_weights()  # this ties the output layer to the embedding if the config says so
    _name_constants(model)
    return model


def _name_constants(model: Any) -> None:
    """Turn a model's saved buffers, such as routing biases, into frozen parameters."""
    saved = model.state_dict().keys()
    for name, buffer in list(model.named_buffers()):
        if name in saved and buffer.is_floating_point():
            path, _, own_name = name.rpartition('.')
            module = model.get_submodule(path)
            delattr(module, own_name)
            module.register_parameter(own_name, nn.Parameter(buffer, requires_grad=False))


class LibraryWeights(Weights):
    """Weights of a transformers model under this program's names; the first use loads the model."""

    def __init__(self, path: str, load_model: Callable[[], Any]) -> None:
        self.path = path
        self._load_model = load_model

    @functools.cached_property
    def model(self) -> Any:
        """Return the model, loaded in float32; UserError for missing weights or wrong shapes."""
        return self._load_model()

    def __contains__(self, name: object) -> bool:
        return not str(name).startswith(HEADS) and self.name_of(str(name)) in self._tensors

    def name_of(self, name: str) -> str:
        return name.removeprefix(CAUSAL_LM)

    def load(self, name: str, parameter: torch.Tensor) -> None:
        value = self._tensors[self.name_of(name)].detach().float()
        copy_value(value.numpy(), parameter.detach(), f'{self.path}: {self.name_of(name)}')

    def unread(self, names: Collection[str]) -> list[str]:
        """Return the names of parameters not in `names`; a tied output layer's name is left out."""
        read = {self.name_of(name) for name in names}
        return [name for name, _ in self.model.named_parameters() if name not in read]

    @functools.cached_property
    def _tensors(self) -> dict[str, torch.Tensor]:
        return dict(self.model.state_dict())


class PretrainedWeights(LibraryWeights):
    """Weights that transformers' `model_class` reads from safetensors, under new or old names."""

    def __init__(
        self, directory: str, config: Any, model_class: str = 'AutoModelForCausalLM'
    ) -> None:
        super().__init__(directory, self._load)
        files = safetensors_of(directory)
        for path in files:
            open_safetensors(path)  # raises UserError for a damaged file
        self._folder = os.path.dirname(files[0])
        self._config = config
        self._model_class = model_class
        self._unexpected: list[str] = []  # tensors for which `model` has no place

    def unread(self, names: Collection[str]) -> list[str]:
        return self._unexpected

    def _load(self) -> Any:
        import transformers

        with explained(self.path):
            loaded: Any = getattr(transformers, self._model_class).from_pretrained(
                self._folder,
                config=self._config,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # wrong shapes raise a UserError below
                dtype=torch.float32,
            )
        model, found = loaded
        mismatched = sorted(found['mismatched_keys'])
        if mismatched:
            name, stored, needed = mismatched[0]
            raise UserError(
                f'{self.path}: {name} is {tuple(stored)}, the model needs {tuple(needed)}'
            )
        missing = sorted(found['missing_keys'])
        if missing:
            raise UserError(f'{self.path} lacks tensors of the model: {listed(missing)}')
        unexpected = sorted(found['unexpected_keys'])
        self._unexpected = [name for name in unexpected if not OF_NO_USE.fullmatch(name)]
        return model
