"""Architecture of a transformers model, and a check that this program computes equal outputs."""

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from lm_human_preferences import storage
from lm_human_preferences.checkpointing.names import VariableNames
from lm_human_preferences.errors import UserError
from lm_human_preferences.language.causal_lm.library import (
    config_of,
    dropout_in,
    empty_model,
    explained,
)
from lm_human_preferences.language.causal_lm.network import OwnNames, TransformersNetwork
from lm_human_preferences.language.causal_lm.sizes import TransformersSizes, sizes_of
from lm_human_preferences.language.networks.model_kinds import CONFIG_FILE
from lm_human_preferences.language.networks.weights import CAUSAL_LM
from lm_human_preferences.machine import precision

TOLERANCE = 1e-3  # accepted difference from transformers' outputs, relative to the largest output
LENGTH = 12  # number of tokens in the sequence that tests a model
SEED = 0
LARGE = 1000  # factor that makes logits large, to reveal a soft cap on them


class CausalLM:
    """Architecture of a causal language model of the library transformers.

    n_vocab: number of tokens in its encoding. changes: {setting: value} that override config.json.
    """

    variable_names: VariableNames = OwnNames()

    def __init__(self, directory: str, n_vocab: int, changes: Mapping[str, Any]) -> None:
        self.path = storage.join(directory, CONFIG_FILE)
        self._n_vocab = n_vocab
        self._content: Any = storage.read_json(self.path)
        _check_kind(self._content, self.path)
        self._content.update(changes)
        self._config = config_of(self._content, self.path)

    @functools.cached_property
    def _empty(self) -> Any:
        """Return the model on the device `meta`, which holds no values of parameters."""
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
        """Return this program's parameter name for the token embedding of the model family."""
        table = self._empty.get_input_embeddings().weight
        (found,) = (name for name, each in self._empty.named_parameters() if each is table)
        return CAUSAL_LM + found

    def create(self, scalar_heads: Iterable[str]) -> TransformersNetwork:
        with explained(self.path):
            return TransformersNetwork(empty_model(self._config), self.sizes(), scalar_heads)

    def check_network(self, network: Any, name: str, loaded: Any) -> None:
        check_network(network, name, loaded)

    def to_transformers(self, network: Any) -> Any:
        """Return the transformers model in `network`, with the dropout rates of its config.json."""
        dropout = {key: self._content[key] for key in dropout_in(self._content)}
        network.causal_lm.config.update(dropout)
        return network.causal_lm

    def write_files(self, directory: str) -> None:
        self.sizes().write(directory)
        storage.write_json(storage.join(directory, CONFIG_FILE), self._content)


def _check_kind(content: Any, path: str) -> None:
    """Raise UserError unless config.json describes a text-only causal model with attention."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = config_of(content, path)
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UserError(
            f'{path}: transformers has no causal language model of type {config.model_type}'
        )
    text = config.get_text_config()
    if text is not config:
        raise UserError(
            f'{path} describes a multimodal model ({config.model_type}): only text-only models are'
            f' supported: use a published {text.model_type} model'
        )
    if not getattr(config, 'num_attention_heads', None):
        raise UserError(
            f'{path}: models of the family {config.model_type} are not supported: they have no'
            ' attention and accept no positions of tokens; padding requires such positions'
        )


@torch.no_grad()
def check_network(network: TransformersNetwork, name: str, loaded: Any = None) -> None:
    """Raise UserError unless this program's outputs agree with transformers' own forward pass.

    loaded: the model that transformers loads from the same files, or None.
    """
    family = network.causal_lm.config.model_type
    try:
        with precision.plain():
            for difference, complaint in differences(network, loaded):
                # Unlike a comparison by `>`, `not ... <=` also refuses NaN.
                if not difference <= TOLERANCE:
                    raise UserError(
                        f'{name}: models of the family {family} are not supported: {complaint}'
                    )
    except UserError:
        raise
    except Exception as e:  # the library transformers may raise any type of error
        raise UserError(
            f'{name}: models of the family {family} are not supported: they cannot compute with'
            f' given positions, a given mask or a given cache ({type(e).__name__}: {e!s:.200})'
        ) from e


def differences(network: TransformersNetwork, loaded: Any = None) -> Iterator[tuple[float, str]]:
    """Yield (relative error against transformers, message) for each way to compute outputs."""
    sizes = network.sizes
    device = network.device
    length = min(LENGTH, sizes.n_ctx)
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(sizes.n_vocab, (1, length), generator=generator).to(device)
    model = network.causal_lm
    reference = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    logits = _large_logits(model, tokens)[..., : sizes.n_vocab]

    yield (
        _difference(LARGE * network.logits(reference), logits),
        'their logits are not the product of the last hidden state with an output layer',
    )
    if loaded is not None:
        expected = loaded(input_ids=tokens, use_cache=False).logits[..., : sizes.n_vocab]
        yield (
            _difference(logits, LARGE * expected),
            'transformers loads a model with other log-probabilities from the same files',
        )
    for start in (0, length // 2):
        padded, mask = _with_padding(tokens, start)
        yield (
            _difference(network.hidden(padded, mask)[mask], reference[0]),
            'their positions cannot be set from outside, as padding needs',
        )
    cache = network.new_cache(length)
    parts = [network.hidden(part, None, cache) for part in tokens.split([length - 2, 1, 1], dim=1)]
    yield (
        _difference(torch.cat(parts, dim=1), reference),
        'token by token, with a cache of earlier tokens, they compute something else',
    )
    prompt, completion = tokens[:, : length // 2], tokens[:, length // 2 :]
    other = completion.flip(1)
    packed = network.last_hidden(prompt, torch.stack([other, completion], dim=1), sizes.n_vocab)
    yield (
        _difference(packed[:, 1], reference[:, -1]),
        'several responses behind one query affect each other',
    )


def _large_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return logits for `tokens (1, length)` with the output layer multiplied by LARGE."""
    output_layer = model.get_output_embeddings()
    hook = output_layer.register_forward_hook(lambda _, __, given: LARGE * given)
    try:
        return model(input_ids=tokens, use_cache=False).logits
    finally:
        hook.remove()


def _with_padding(tokens: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Insert two columns of padding at `start`; return (tokens, mask of real tokens)."""
    padding = torch.zeros_like(tokens[:, :2])
    padded = torch.cat([tokens[:, :start], padding, tokens[:, start:]], dim=1)
    mask = torch.ones_like(padded, dtype=torch.bool)
    mask[:, start : start + 2] = False
    return padded, mask


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())
