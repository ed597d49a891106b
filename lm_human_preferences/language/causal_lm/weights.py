"""The weights in a directory of transformers' `save_pretrained`, of any family."""

from __future__ import annotations

import functools
from typing import Any

import torch

from lm_human_preferences.errors import UserError
from lm_human_preferences.language.causal_lm.library import told
from lm_human_preferences.language.causal_lm.network import CAUSAL_LM
from lm_human_preferences.language.weights import TransformersWeights, copy_value


class PretrainedWeights(TransformersWeights):
    """The safetensors beside a config.json, a `language.weights.Weights`.

    transformers reads them, because it knows what older versions called the tensors of a family.
    model_class: of transformers, which makes the model.
    """

    def __init__(
        self, directory: str, config: Any, model_class: str = 'AutoModelForCausalLM'
    ) -> None:
        super().__init__(directory)
        self._config = config
        self._model_class = model_class
        self.path = directory

    def __contains__(self, name: object) -> bool:
        return str(name) in self._tensors

    def name_of(self, name: str) -> str:
        """transformers' name of a parameter."""
        return name.removeprefix(CAUSAL_LM)

    def load(self, name: str, parameter: torch.Tensor) -> None:
        """Copy the tensor, whatever its type is in the file."""
        value = self._tensors[name].detach().float()
        copy_value(value.numpy(), parameter.detach(), f'{self.path}: {self.name_of(name)}')

    @functools.cached_property
    def model(self) -> Any:
        """The model of transformers with the weights, in float32; UserError unless all fit."""
        import transformers

        with told(self.path):
            loaded: Any = getattr(transformers, self._model_class).from_pretrained(
                self.saved.local_path,
                config=self._config,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are told below
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
            raise UserError(
                f'{self.path} lacks {missing[0]} and {len(missing) - 1} more of the model'
            )
        return model

    @functools.cached_property
    def _tensors(self) -> dict[str, torch.Tensor]:
        """{own name: tensor}, of all parameters."""
        return {CAUSAL_LM + name: tensor for name, tensor in self.model.named_parameters()}
