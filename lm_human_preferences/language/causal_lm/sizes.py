"""Sizes of a model of transformers, as they follow from its config.json."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from lm_human_preferences.hparams.model_sizes import Sizes
from lm_human_preferences.language.causal_lm.kept import blocks_of, kept_by
from lm_human_preferences.utils.hyperparams import option

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEPT_OF_ALL_TOKENS = 0.2  # of what a block keeps: keys, values and what they are made of
UNKNOWN_LENGTH = 2048  # where a config does not say; such models have no positions to set


@dataclass
class TransformersSizes(Sizes):
    """What the hparams.json beside a saved config.json holds. family: transformers' model_type."""

    family: str = option('', "transformers' model_type")
    is_window: bool = option(False, 'whether attention sees no farther than the longest sequence')
    keys: int = option(0, 'numbers that the keys of a token are in a block')
    kept: int = option(0, 'bytes that a block keeps of a token for the gradient')
    kept_in_bf16: int = option(0, 'the same where it computes in bf16')
    kept_of_pairs: int = option(0, 'weights that a block keeps of each pair of tokens')
    numbers_of_blocks: int = option(0, 'numbers that all blocks hold')
    numbers: int = option(0, 'numbers that the network holds')

    @property
    def limit(self) -> str:
        """See Sizes."""
        return f'sliding window of {self.n_ctx}' if self.is_window else str(self.n_ctx)

    @property
    def key_value_width(self) -> int:
        """See Sizes."""
        return self.keys

    @property
    def attention_weights(self) -> int:
        """See Sizes."""
        return self.kept_of_pairs

    @property
    def copies_all_blocks(self) -> bool:
        """See Sizes."""
        return False

    def kept_by_block(self, reduced: bool) -> int:
        """See Sizes."""
        return self.kept_in_bf16 if reduced else self.kept

    def kept_by_last_block(self, read: float) -> float:
        """See Sizes: after its attention it goes on with the tokens that are read, see `rows`."""
        return KEPT_OF_ALL_TOKENS + (1 - KEPT_OF_ALL_TOKENS) * read

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
        keys=key_value_heads * head_width,
        kept=kept.of_a_token,
        kept_in_bf16=kept_by(causal_lm, reduced=True).of_a_token,
        kept_of_pairs=kept.of_a_pair,
        numbers_of_blocks=sum(each.numel() for each in nn.ModuleList(blocks).parameters()),
        numbers=sum(each.numel() for each in causal_lm.parameters()),
    )


def longest(config: Any) -> tuple[int, bool]:
    """(the longest sequence that the model computes as it should, whether a window limits it).

    Beyond it positions are not known, or attention does not see everything before, so that a model
    computes something else.
    """
    positions = min(_lengths_of_rotations(config), default=None)
    window = _least(config, 'sliding_window', 'window_size', 'attention_chunk_size')
    if window is not None and (positions is None or window < positions):
        return window, True
    return positions or UNKNOWN_LENGTH, False


def _lengths_of_rotations(config: Any) -> list[int]:
    """Up to which lengths positions mean the same in all sequences, as far as a config says.

    LongRoPE rotates all tokens in another way once any row of a batch is longer than the first
    length that the model was trained with; keys that were kept before would not fit.
    """
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
    """The least of these settings, as far as they are set."""
    values = [getattr(config, name, None) for name in names]
    return min((value for value in values if isinstance(value, int) and value > 0), default=None)
