"""Sizes of a model of transformers, as they follow from its config.json."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from lm_human_preferences.hparams.model_sizes import Sizes
from lm_human_preferences.utils.hyperparams import option

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UNKNOWN_LENGTH = 2048  # where a config does not say; such models have no positions to set


@dataclass
class TransformersSizes(Sizes):
    """What the hparams.json beside a saved config.json holds. family: transformers' model_type."""

    family: str = option('', "transformers' model_type")
    keys: int = option(0, 'numbers that the keys of a token are in a block')
    kept: int = option(0, 'numbers that a block keeps of a token for the gradient')
    numbers_of_blocks: int = option(0, 'numbers that all blocks hold')
    numbers: int = option(0, 'numbers that the network holds')

    @property
    def key_value_width(self) -> int:
        """See Sizes."""
        return self.keys

    @property
    def kept_by_block(self) -> int:
        """See Sizes."""
        return self.kept

    def parameters_of_blocks(self) -> int:
        """See Sizes."""
        return self.numbers_of_blocks

    def parameters(self) -> int:
        """See Sizes."""
        return self.numbers


def sizes_of(causal_lm: 'PreTrainedModel', n_vocab: int) -> TransformersSizes:
    """The sizes of a model, which may be without values (on the device `meta`).

    n_vocab: tokens of its encoding.
    """
    config: Any = causal_lm.config
    blocks = _blocks(causal_lm)
    heads = config.num_attention_heads
    head_width = getattr(config, 'head_dim', None) or config.hidden_size // heads
    key_value_heads = getattr(config, 'num_key_value_heads', None) or heads
    # What goes into each product and what comes out of it.
    kept = sum(sum(weight.shape) for weight in _weights_of_products(blocks[0]))
    return TransformersSizes(
        family=config.model_type,
        n_vocab=n_vocab,
        n_ctx=longest(config),
        n_embd=config.hidden_size,
        n_head=heads,
        n_layer=len(blocks),
        keys=key_value_heads * head_width,
        kept=max(kept, 2 * config.hidden_size),
        numbers_of_blocks=sum(each.numel() for each in nn.ModuleList(blocks).parameters()),
        numbers=sum(each.numel() for each in causal_lm.parameters()),
    )


def longest(config: Any) -> int:
    """The longest sequence for which positions are known and attention sees everything before.

    A model with a window of attention computes something else beyond it.
    """
    names = ('max_position_embeddings', 'sliding_window', 'window_size', 'attention_chunk_size')
    limits = [getattr(config, name, None) for name in names]
    known = [limit for limit in limits if isinstance(limit, int) and limit > 0]
    return min(known, default=UNKNOWN_LENGTH)


def _weights_of_products(block: nn.Module) -> list[Any]:
    """The weights (inputs, outputs), or the other way round, that tokens are multiplied by."""
    from transformers.pytorch_utils import Conv1D

    return [each.weight for each in block.modules() if isinstance(each, (nn.Linear, Conv1D))]


def _blocks(causal_lm: 'PreTrainedModel') -> list[nn.Module]:
    """The blocks of a model: the list of modules that are as many as its config says."""
    count = causal_lm.config.num_hidden_layers
    for module in causal_lm.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    return [causal_lm.base_model]
