"""The kind and the sizes of a model of transformers, as its config.json says."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from typing import Any

import torch

from lm_human_preferences import storage
from lm_human_preferences.checkpointing.variables import VariableNames
from lm_human_preferences.errors import UserError
from lm_human_preferences.language.causal_lm import probe
from lm_human_preferences.language.causal_lm.library import (
    MOST_LAYERS,
    config_of,
    dropout_in,
    empty_model,
    told,
)
from lm_human_preferences.language.causal_lm.network import (
    CAUSAL_LM,
    OwnNames,
    TransformersNetwork,
)
from lm_human_preferences.language.causal_lm.sizes import TransformersSizes, sizes_of
from lm_human_preferences.language.causal_lm.weights import PretrainedWeights


class CausalLM:
    """A causal language model of transformers, a `language.architectures.Architecture`.

    directory: holds its config.json. n_vocab: tokens of its encoding.
    """

    variable_names: VariableNames = OwnNames()
    is_probed = True

    def __init__(self, directory: str, n_vocab: int) -> None:
        self.path = storage.join(directory, 'config.json')
        self._n_vocab = n_vocab
        self._content = _read_content(self.path)
        with told(self.path):
            self._config = _config_of(self._content, self.path)

    def check(self, network: TransformersNetwork, name: str) -> None:
        """See Architecture: by the values that it has."""
        probe.check(network, name)

    def sizes(self) -> TransformersSizes:
        """See Architecture."""
        return _sizes(self.path, json.dumps(self._content), self._n_vocab)

    @property
    def embedding(self) -> str:
        """See Architecture: the embedding of tokens, which each family calls differently."""
        with told(self.path), torch.device('meta'):
            empty = empty_model(self._config)
        table = empty.get_input_embeddings().weight
        (found,) = (name for name, each in empty.named_parameters() if each is table)
        return CAUSAL_LM + found

    def create(self, scalar_heads: Iterable[str]) -> TransformersNetwork:
        """See Architecture."""
        with told(self.path):
            return TransformersNetwork(empty_model(self._config), self.sizes(), scalar_heads)

    def saved_weights(self, directory: str) -> PretrainedWeights:
        """See Architecture."""
        return PretrainedWeights(directory, self._config)

    def to_transformers(self, network: TransformersNetwork) -> Any:
        """See Architecture: the model that the network drives, with the dropout that it had."""
        dropout = {key: self._content[key] for key in dropout_in(self._content)}
        network.causal_lm.config.update(dropout)
        return network.causal_lm

    def write_files(self, directory: str) -> None:
        """See Architecture: config.json as it was read, and hparams.json."""
        storage.write_json(storage.join(directory, 'hparams.json'), self.sizes().to_nested_dict())
        storage.write_json(storage.join(directory, 'config.json'), self._content)


@functools.lru_cache(maxsize=8)
def _sizes(path: str, content: str, n_vocab: int) -> TransformersSizes:
    """The sizes of the model that the `content` of the config.json at `path` describes."""
    with told(path):
        config = _config_of(json.loads(content), path)
        if not getattr(config, 'num_attention_heads', None):
            raise UserError(
                f'{path}: models of the family {config.model_type} are not taken: they have no'
                ' attention, so their positions cannot be set from outside, as padding needs'
            )
        with torch.device('meta'):
            empty = empty_model(config)
        sizes = sizes_of(empty, n_vocab)
        sizes.validate()
    rows = len(empty.get_output_embeddings().weight)
    if rows < n_vocab:
        raise UserError(f'{path}: the model knows {rows} tokens, but its tokeniser has {n_vocab}')
    return sizes


def _read_content(path: str) -> dict[str, Any]:
    """What the config.json at `path` says; UserError where it is of no model that can be taken."""
    content: Any = storage.read_json(path)
    family = content.get('model_type') if isinstance(content, dict) else None
    if not isinstance(family, str):
        raise UserError(f'{path} does not say which model it is of: it has no model_type')
    if content.get('quantization_config'):
        raise UserError(
            f'{path} is of a quantised model, which cannot be trained: take the model that it was'
            ' made of'
        )
    if not _is_known(family):
        code = ' (its own code, which auto_map names, is not run)' if 'auto_map' in content else ''
        raise UserError(f'{path}: transformers knows no causal language model {family!r:.80}{code}')
    return content


def _config_of(content: dict[str, Any], path: str) -> Any:
    """What `config_of` gives; UserError for more layers than a config.json at `path` can mean."""
    config = config_of(content)
    layers = config.num_hidden_layers
    if not 0 < layers <= MOST_LAYERS:
        raise UserError(f'{path}: {layers} layers are not what a model can have')
    return config


def _is_known(family: str) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
