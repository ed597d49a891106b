"""Configs, empty models and weights of transformers, with errors in one line."""

import contextlib
import functools
import re
import threading
import warnings
from abc import abstractmethod
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from lm_human_preferences.errors import UserError
from lm_human_preferences.language.network import HEADS
from lm_human_preferences.language.weights import (
    CAUSAL_LM,
    OF_NO_USE,
    SafetensorsFiles,
    Weights,
    copy_value,
    listed,
)

MOST_LAYERS = 1000
_NUMBER_OF_LAYERS = re.compile('(layers?|blocks?)$')  # keys of a config.json
# Ignored in a config.json: the type of numbers, and whose code computes.
_OURS_TO_SAY = ('auto_map', '_attn_implementation', 'attn_implementation', 'torch_dtype', 'dtype')
# Switching initialisation off, and restoring the generator, affects all threads.
_one_at_a_time = threading.RLock()


@contextlib.contextmanager
def explained(
    path: str, problem: str = ' does not describe a model that transformers can make'
) -> Iterator[None]:
    """Raise errors of transformers or PEFT about files at `path` as UserErrors in one line.

    The generator of random numbers and the filters of warnings are restored. problem: what the
    message says after the path.
    """
    # Outside the try below, as a failing import is not a fault of the model's files.
    import transformers.modeling_utils

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        with _one_at_a_time, torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            # Of tensors of size 0, for which there is an error below.
            warnings.filterwarnings('ignore', 'Initializing zero-element tensors')
            yield
    except UserError:
        raise
    except Exception as e:  # of any kind: the numbers are whatever a file says
        reason = ' '.join(str(e).split())
        raise UserError(f'{path}{problem}: {reason:.300}') from e


def config_of(content: Any, path: str) -> Any:
    """Return the config of transformers for a config.json, without dropout; UserError if none."""
    from transformers import CONFIG_MAPPING, AutoConfig

    with explained(path):
        family = content.get('model_type')
        if family not in CONFIG_MAPPING:
            code = ' (its own code, which auto_map names, is not run)' * ('auto_map' in content)
            raise UserError(f'{path}: transformers knows no model {family!r:.80}{code}')
        if content.get('quantization_config'):
            raise UserError(
                f'{path} is of a quantised model, which cannot be trained: use the model that it'
                ' was made from'
            )
        for key, value in content.items():
            if _NUMBER_OF_LAYERS.search(key) and isinstance(value, int) and value > MOST_LAYERS:
                raise UserError(f'{path}: no model can have {key} {value:.6g}')
        taken = {key: value for key, value in content.items() if key not in _OURS_TO_SAY}
        return AutoConfig.for_model(**{**taken, **dict.fromkeys(dropout_in(taken), 0.0)})


def dropout_in(content: dict[str, Any]) -> list[str]:
    return [key for key in content if 'dropout' in key or key.endswith(('_pdrop', 'layerdrop'))]


def empty_model(config: Any, model_class: str = 'AutoModelForCausalLM') -> Any:
    """Create a model whose parameters have memory but no values. model_class: of transformers."""
    import transformers
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = getattr(transformers, model_class).from_config(config, dtype=torch.float32)
    model.tie_weights()  # as far as the config says so
    _name_constants(model)
    return model


def _name_constants(model: Any) -> None:
    """Make the buffers that a model saves, such as routing biases, parameters that do not learn."""
    saved = model.state_dict().keys()
    for name, buffer in list(model.named_buffers()):
        if name in saved and buffer.is_floating_point():
            path, _, own_name = name.rpartition('.')
            module = model.get_submodule(path)
            delattr(module, own_name)
            module.register_parameter(own_name, nn.Parameter(buffer, requires_grad=False))


class LibraryWeights(Weights):
    """Weights of a model of transformers, by this program's names of its parameters."""

    def __init__(self, path: str) -> None:
        self.path = path

    @functools.cached_property
    @abstractmethod
    def model(self) -> Any:
        """The model in float32; UserError unless all weights fit."""

    def __contains__(self, name: object) -> bool:
        return not str(name).startswith(HEADS) and self.name_of(str(name)) in self._tensors

    def name_of(self, name: str) -> str:
        return name.removeprefix(CAUSAL_LM)

    def load(self, name: str, parameter: torch.Tensor) -> None:
        value = self._tensors[self.name_of(name)].detach().float()
        copy_value(value.numpy(), parameter.detach(), f'{self.path}: {self.name_of(name)}')

    def unread(self, names: Collection[str]) -> list[str]:
        """Return the parameters that are not read; a tied output layer counts as the embedding."""
        read = {self.name_of(name) for name in names}
        return [name for name, _ in self.model.named_parameters() if name not in read]

    @functools.cached_property
    def _tensors(self) -> dict[str, torch.Tensor]:
        return dict(self.model.state_dict())


class PretrainedWeights(LibraryWeights):
    """Safetensors loaded by transformers' `model_class`, which maps old names of tensors to new."""

    def __init__(
        self, directory: str, config: Any, model_class: str = 'AutoModelForCausalLM'
    ) -> None:
        super().__init__(directory)
        self._files = SafetensorsFiles(directory)
        self._config = config
        self._model_class = model_class
        self._unexpected: list[str] = []  # tensors that `model` has no place for

    def nbytes(self) -> int:
        return self._files.nbytes()

    def unread(self, names: Collection[str]) -> list[str]:
        return self._unexpected

    @functools.cached_property
    def model(self) -> Any:
        """Load the model of transformers in float32; UserError unless all weights fit."""
        import transformers

        with explained(self.path):
            loaded: Any = getattr(transformers, self._model_class).from_pretrained(
                self._files.local_path,
                config=self._config,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # see below
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
