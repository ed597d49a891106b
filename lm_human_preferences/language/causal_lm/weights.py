"""The weights in a directory of transformers' `save_pretrained`, of any family."""

from __future__ import annotations

import functools
import math
import os
from typing import Any

import torch

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.language.causal_lm.library import told
from lm_human_preferences.language.causal_lm.network import CAUSAL_LM
from lm_human_preferences.language.weights import FLOAT, copy_value

INDEX = 'model.safetensors.index.json'
WEIGHTS = 'model.safetensors'


class PretrainedWeights:
    """The safetensors beside a config.json, a `language.weights.Weights`.

    transformers reads them, because it knows what older versions called the tensors of a family.
    model_class: of transformers, which makes the model.
    """

    def __init__(
        self, directory: str, config: Any, model_class: str = 'AutoModelForCausalLM'
    ) -> None:
        self._config = config
        self._model_class = model_class
        self.path = directory
        self._directory = self._fetched(directory)
        self._shapes = self._read_shapes()

    def __len__(self) -> int:
        return len(self._shapes)

    def __contains__(self, name: object) -> bool:
        return str(name) in self._tensors

    def nbytes(self) -> int:
        """Bytes of all tensors in float32."""
        return sum(FLOAT * math.prod(shape) for shape in self._shapes)

    def scopes(self) -> list[str]:
        """That of the only network."""
        return ['']

    def name_of(self, name: str) -> str:
        """transformers' name of a parameter."""
        return name.removeprefix(CAUSAL_LM)

    def load(self, name: str, parameter: torch.Tensor) -> None:
        """Copy the tensor, whatever its type is in the file."""
        value = self._tensors[name].detach().float()
        copy_value(value.numpy(), parameter.detach(), f'{self.path}: {self.name_of(name)}')

    @functools.cached_property
    def model(self) -> Any:
        """The model of transformers with the weights, in float32; UserError where some lack."""
        import transformers

        with told(self.path):
            loaded: Any = getattr(transformers, self._model_class).from_pretrained(
                self._directory,
                config=self._config,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                dtype=torch.float32,
            )
        model, found = loaded
        missing = sorted(found['missing_keys']) + sorted(map(str, found['mismatched_keys']))
        if missing:
            raise UserError(
                f'{self.path} lacks {missing[0]} and {len(missing) - 1} more of the model'
            )
        return model

    @functools.cached_property
    def _tensors(self) -> dict[str, torch.Tensor]:
        """{own name: tensor}, of all parameters."""
        return {CAUSAL_LM + name: tensor for name, tensor in self.model.named_parameters()}

    def _read_shapes(self) -> list[list[int]]:
        """The shapes of all tensors in the files, from the files' heads."""
        from safetensors import SafetensorError, safe_open

        shapes = []
        for name in self._files():
            path = os.path.join(self._directory, name)
            try:
                with safe_open(path, 'pt') as file:
                    shapes += [file.get_slice(key).get_shape() for key in _keys(file)]
            except (OSError, SafetensorError) as e:
                raise UserError(
                    f'{storage.join(self.path, name)} is damaged or missing: {e}'
                ) from e
        return shapes

    def _fetched(self, directory: str) -> str:
        """The local directory with the files of `directory`, which may be remote."""
        if not storage.is_remote(directory):
            return directory
        names = ['config.json', *self._files()]
        if storage.exists(storage.join(directory, INDEX)):
            names.append(INDEX)
        copies = storage.cached_paths([storage.join(directory, name) for name in names])
        return os.path.dirname(copies[0])

    def _files(self) -> list[str]:
        """The names of the files with tensors."""
        index = storage.join(self.path, INDEX)
        if not storage.exists(index):
            if not storage.exists(storage.join(self.path, WEIGHTS)):
                raise UserError(
                    f'{self.path} has a config.json but no {WEIGHTS}; pickled weights are not'
                    ' read: save it again with save_pretrained'
                )
            return [WEIGHTS]
        content: Any = storage.read_json(index)
        try:
            names = sorted(set(content['weight_map'].values()))
        except (KeyError, AttributeError, TypeError) as e:
            raise UserError(f'{index} is damaged: it maps no tensors to files') from e
        for name in names:
            if not isinstance(name, str) or os.path.basename(name) != name:
                raise UserError(f'{index} names a file elsewhere: {name}')
        return names


def _keys(file: Any) -> list[str]:
    """The names of the tensors in an open file, which cannot be iterated over itself."""
    return list(file.keys())
