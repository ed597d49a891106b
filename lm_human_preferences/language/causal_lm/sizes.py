"""Sizes of a transformers model, from its config.json."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from lm_human_preferences.language.networks.scopes import Sizes
from lm_human_preferences.utils.hyperparams import option

UNKNOWN_LENGTH = 2048  # longest sequence for models that have no limit, as they embed no positions


@dataclass
class TransformersSizes(Sizes):
    """Sizes of a transformers model, saved beside its config.json."""

    family: str = option('', "transformers' model_type")
    kept_numbers: int = option(0, 'number of values per token that a block keeps for the gradient')
    numbers: int = option(0, 'number of values in all parameters')

    def parameters(self) -> int:
        return self.numbers


def sizes_of(causal_lm: Any, n_vocab: int) -> TransformersSizes:
    """Return a model's sizes, even on device `meta`. n_vocab: number of tokens in the encoding."""
    config = causal_lm.config
    return TransformersSizes(
        family=config.model_type,
        n_vocab=n_vocab,
        n_ctx=longest(config),
        n_embd=config.hidden_size,
        n_head=config.num_attention_heads,
        n_layer=len(blocks_of(causal_lm)),
        kept_numbers=_kept_numbers(causal_lm),
        numbers=sum(each.numel() for each in causal_lm.parameters()),
    )


def _kept_numbers(causal_lm: Any) -> int:
    """Return the number of values per token that a block's norms and matmuls read and write."""
    config = causal_lm.config
    chosen = getattr(config, 'num_experts_per_tok', None) or 1
    numbers = 4 * config.hidden_size
    for weight in blocks_of(causal_lm)[0].parameters():
        if weight.ndim > 1:
            # A weight of 3 dimensions holds the matrices of all experts; a token uses some of them.
            times = chosen if weight.ndim > 2 else 1
            numbers += times * sum(weight.shape[-2:])
    return numbers


def blocks_of(causal_lm: Any) -> list[nn.Module]:
    """Return a model's blocks, or the whole model as one block if it has no list of its blocks."""
    count = causal_lm.config.num_hidden_layers
    for module in causal_lm.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    return [causal_lm.base_model]


def longest(config: Any) -> int:
    """Return the length of the longest sequence for which the model's outputs are right."""
    limits = ['sliding_window', 'window_size', 'attention_chunk_size', 'max_position_embeddings']
    lengths = [getattr(config, name, None) for name in limits]
    parameters: dict[str, Any] = getattr(config, 'rope_parameters', None) or {}
    by_kind_of_layer = [each for each in parameters.values() if isinstance(each, dict)]
    for rotation in [parameters, *by_kind_of_layer]:
        # With LongRoPE, the longest sequence of a batch changes the rotations of all others.
        if rotation.get('rope_type') == 'longrope':
            lengths.append(rotation['original_max_position_embeddings'])
    known = [length for length in lengths if isinstance(length, int) and length > 0]
    return min(known, default=UNKNOWN_LENGTH)
