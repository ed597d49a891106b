"""Sizes of a model of transformers, from its config.json."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from lm_human_preferences.language.causal_lm.activation_memory import blocks_of, kept_by
from lm_human_preferences.training.model_sizes import Sizes
from lm_human_preferences.utils.hyperparams import option

KEPT_OF_ALL_TOKENS = 0.2  # of what a block keeps: keys, values and what they are made of
WINDOWS = ('sliding_window', 'window_size', 'attention_chunk_size')  # settings of a config
UNKNOWN_LENGTH = 2048  # where a config does not say; such models have no positions to set


@dataclass
class TransformersSizes(Sizes):
    """Sizes that are saved beside a config.json."""

    family: str = option('', "transformers' model_type")
    is_window: bool = option(False, 'whether attention sees no farther than the longest sequence')
    embedding_rows: int = option(0, 'rows of the token embedding')
    key_value_width: int = option(0, 'numbers that the keys of a token are in a block')
    kept: int = option(0, 'bytes that a block keeps of a token for the gradient')
    kept_in_bf16: int = option(0, 'the same where it computes in bf16')
    attention_weights: int = option(0, 'weights that a block keeps of each pair of tokens')
    numbers_of_blocks: int = option(0, 'numbers that all blocks hold')
    numbers: int = option(0, 'numbers that the network holds')

    @property
    def limit(self) -> str:
        return f'sliding window of {self.n_ctx}' if self.is_window else str(self.n_ctx)

    def kept_by_block(self, reduced: bool) -> int:
        return self.kept_in_bf16 if reduced else self.kept

    def kept_by_last_block(self, read: float) -> float:
        """See Sizes: after attention it computes only the tokens that are read, see rows.py."""
        return KEPT_OF_ALL_TOKENS + (1 - KEPT_OF_ALL_TOKENS) * read

    def parameters_of_blocks(self) -> int:
        return self.numbers_of_blocks

    def parameters(self) -> int:
        return self.numbers


def sizes_of(causal_lm: Any, n_vocab: int) -> TransformersSizes:
    """Return the sizes of a model, also on the device `meta`. n_vocab: tokens of its encoding."""
    config = causal_lm.config
    blocks = blocks_of(causal_lm)
    heads = config.num_attention_heads
    head_width = getattr(config, 'head_dim', None) or config.hidden_size // heads
    key_value_heads = getattr(config, 'num_key_value_heads', None) or heads
    length, is_window = longest(config)
    kept = kept_by(causal_lm, reduced=False)
    return TransformersSizes(
        family=config.model_type,
        n_vocab=n_vocab,
        n_ctx=length,
        is_window=is_window,
        n_embd=config.hidden_size,
        n_head=heads,
        n_layer=len(blocks),
        embedding_rows=causal_lm.get_input_embeddings().weight.shape[0],
        key_value_width=key_value_heads * head_width,
        kept=kept.of_a_token,
        kept_in_bf16=kept_by(causal_lm, reduced=True).of_a_token,
        attention_weights=kept.of_a_pair,
        numbers_of_blocks=sum(each.numel() for each in nn.ModuleList(blocks).parameters()),
        numbers=sum(each.numel() for each in causal_lm.parameters()),
    )


def longest(config: Any) -> tuple[int, bool]:
    """Return (longest sequence that the model computes correctly, whether a window limits it)."""
    positions = min(_lengths_of_rotations(config), default=None)
    window = _least(config, *WINDOWS)
    if window is not None and (positions is None or window < positions):
        return window, True
    return positions or UNKNOWN_LENGTH, False


def _lengths_of_rotations(config: Any) -> list[int]:
    """Return the lengths below which rotations agree: LongRoPE's depend on the batch."""
    lengths = []
    positions = _least(config, 'max_position_embeddings')
    if positions is not None:
        lengths.append(positions)
    parameters: dict[str, Any] = getattr(config, 'rope_parameters', None) or {}
    by_kind_of_layer = [each for each in parameters.values() if isinstance(each, dict)]
    for rotation in [parameters, *by_kind_of_layer]:
        if rotation.get('rope_type') == 'longrope':
            lengths.append(rotation['original_max_position_embeddings'])
    return lengths


def _least(config: Any, *names: str) -> int | None:
    """Return the least of these settings that is positive."""
    values = [getattr(config, name, None) for name in names]
    return min((value for value in values if isinstance(value, int) and value > 0), default=None)
