"""Architecture of a model of transformers, from its config.json."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from lm_human_preferences import storage
from lm_human_preferences.checkpointing.names import VariableNames
from lm_human_preferences.errors import UserError
from lm_human_preferences.language.causal_lm import probe
from lm_human_preferences.language.causal_lm.library import (
    config_of,
    dropout_in,
    empty_model,
    explained,
)
from lm_human_preferences.language.causal_lm.network import OwnNames, TransformersNetwork
from lm_human_preferences.language.causal_lm.sizes import TransformersSizes, sizes_of
from lm_human_preferences.language.weights import CAUSAL_LM


class CausalLM:
    """Architecture of a causal language model of transformers.

    n_vocab: tokens of the encoding. changes: {setting: value} that override config.json.
    """

    variable_names: VariableNames = OwnNames()

    def __init__(self, directory: str, n_vocab: int, changes: Mapping[str, Any]) -> None:
        self.path = storage.join(directory, 'config.json')
        self._n_vocab = n_vocab
        self._content: Any = storage.read_json(self.path)
        _check_kind(self._content, self.path)
        self._content.update(changes)
        self._config = config_of(self._content, self.path)

    @functools.cached_property
    def _empty(self) -> Any:
        """Model on device `meta`, without values."""
        with explained(self.path), torch.device('meta'):
            return empty_model(self._config)

    @functools.cached_property
    def _sizes(self) -> TransformersSizes:
        with explained(self.path):
            sizes = sizes_of(self._empty, self._n_vocab)
            sizes.validate()
        rows = len(self._empty.get_output_embeddings().weight)
        if rows < self._n_vocab:
            raise UserError(
                f'{self.path}: the model knows {rows} tokens, but its tokeniser has {self._n_vocab}'
            )
        return sizes

    def sizes(self) -> TransformersSizes:
        return self._sizes

    @property
    def embedding(self) -> str:
        """Return this program's name for the token embedding, which depends on the model family."""
        table = self._empty.get_input_embeddings().weight
        (found,) = (name for name, each in self._empty.named_parameters() if each is table)
        return CAUSAL_LM + found

    def create(self, scalar_heads: Iterable[str]) -> TransformersNetwork:
        with explained(self.path):
            return TransformersNetwork(empty_model(self._config), self.sizes(), scalar_heads)

    def check_network(self, network: Any, name: str, loaded: Any) -> None:
        """Raise UserError unless this program and transformers compute the same outputs."""
        probe.check_network(network, name, loaded)

    def to_transformers(self, network: Any) -> Any:
        """Return the transformers model in `network`, with the dropout rates of its config.json."""
        dropout = {key: self._content[key] for key in dropout_in(self._content)}
        network.causal_lm.config.update(dropout)
        return network.causal_lm

    def write_files(self, directory: str) -> None:
        self.sizes().write(directory)
        storage.write_json(storage.join(directory, 'config.json'), self._content)


def _check_kind(content: Any, path: str) -> None:
    """Raise UserError unless a config.json is of a model of texts alone."""
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
