"""Architecture of a model of transformers, from its config.json."""

import functools
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from lm_human_preferences import storage
from lm_human_preferences.checkpointing.names import VariableNames
from lm_human_preferences.errors import UserError
from lm_human_preferences.language.causal_lm import probe
from lm_human_preferences.language.causal_lm.library import (
    LibraryWeights,
    PretrainedWeights,
    config_of,
    dropout_in,
    empty_model,
    explained,
)
from lm_human_preferences.language.causal_lm.network import OwnNames, TransformersNetwork
from lm_human_preferences.language.causal_lm.sizes import TransformersSizes, sizes_of
from lm_human_preferences.language.weights import CAUSAL_LM, Weights


class CausalLM:
    """Architecture of a causal language model of transformers.

    n_vocab: tokens of the encoding. changes: {setting: value} that override config.json.
    """

    variable_names: VariableNames = OwnNames()
    is_probed = True

    def __init__(self, directory: str, n_vocab: int, changes: Mapping[str, Any]) -> None:
        self.path = storage.join(directory, 'config.json')
        self._n_vocab = n_vocab
        self._content: Any = storage.read_json(self.path)
        self._saved_config = _config_of(self._content, self.path)
        self._content.update(changes)
        self._config = _config_of(self._content, self.path)

    def sizes(self) -> TransformersSizes:
        return _sizes(self.path, json.dumps(self._content), self._n_vocab)

    @property
    def embedding(self) -> str:
        """Return this program's name for the token embedding, which depends on the model family."""
        with explained(self.path), torch.device('meta'):
            empty = empty_model(self._config)
        table = empty.get_input_embeddings().weight
        (found,) = (name for name, each in empty.named_parameters() if each is table)
        return CAUSAL_LM + found

    def create(self, scalar_heads: Iterable[str]) -> TransformersNetwork:
        with explained(self.path):
            return TransformersNetwork(empty_model(self._config), self.sizes(), scalar_heads)

    def saved_weights(self, directory: str) -> PretrainedWeights:
        return PretrainedWeights(directory, self._saved_config)

    def check_network(self, network: Any, name: str, weights: Weights) -> None:
        """Raise UserError unless this program and transformers compute the same outputs."""
        loaded = weights.model if isinstance(weights, LibraryWeights) else None
        probe.check_network(network, name, loaded)

    def to_transformers(self, network: Any) -> Any:
        """Return the transformers model in `network`, with the dropout rates of its config.json."""
        dropout = {key: self._content[key] for key in dropout_in(self._content)}
        network.causal_lm.config.update(dropout)
        return network.causal_lm

    def write_files(self, directory: str) -> None:
        self.sizes().write(directory)
        storage.write_json(storage.join(directory, 'config.json'), self._content)


def _config_of(content: Any, path: str) -> Any:
    """Return transformers' config for `content`; UserError if the model is not supported."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = config_of(content, path)
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UserError(
            f'{path}: {config.model_type} is not a causal language model of transformers'
        )
    text = config.get_text_config()
    if text is not config:
        raise UserError(
            f'{path} is of a multimodal model ({config.model_type}): only a model of texts alone is'
            f' taken, as {text.model_type} is; use one that was published as such'
        )
    if not getattr(config, 'num_attention_heads', None):
        raise UserError(
            f'{path}: models of the family {config.model_type} are not supported: they have no'
            ' attention, so their positions cannot be set from outside, as padding needs'
        )
    return config


@functools.lru_cache(maxsize=8)
def _sizes(path: str, content: str, n_vocab: int) -> TransformersSizes:
    """Return the sizes of a model. content: text of the config.json at `path`."""
    config = _config_of(json.loads(content), path)
    with explained(path):
        with torch.device('meta'):
            empty = empty_model(config)
        sizes = sizes_of(empty, n_vocab)
        sizes.validate()
    rows = len(empty.get_output_embeddings().weight)
    if rows < n_vocab:
        raise UserError(f'{path}: the model knows {rows} tokens, but its tokeniser has {n_vocab}')
    return sizes
