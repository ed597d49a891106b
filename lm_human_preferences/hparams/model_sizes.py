"""Sizes of networks: what is asked of any, and those of GPT-2."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.hyperparams import option

# Tokens that a cache of keys and values has room for beyond those it holds.
CACHE_HEADROOM = 64
FLOAT, HALF = 4, 2  # bytes


@dataclass
class Sizes(hyperparams.HParams, ABC):
    """What a network of any kind holds and computes: its limits and its memory follow from it."""

    n_vocab: int = option(0, 'tokens of the vocabulary', at_least=1)
    n_ctx: int = option(512, 'longest sequence', at_least=1)
    n_embd: int = option(768, 'width', at_least=1)
    n_head: int = option(12, 'attention heads', at_least=1)
    n_layer: int = option(12, 'blocks', at_least=1)

    @property
    def limit(self) -> str:
        """What n_ctx is, for the user."""
        return str(self.n_ctx)

    @property
    @abstractmethod
    def key_value_width(self) -> int:
        """How many numbers the keys of a token are in one block; its values are as many."""

    @property
    @abstractmethod
    def attention_weights(self) -> int:
        """How many weights a block keeps of each pair of tokens where attention is not fused."""

    @property
    @abstractmethod
    def copies_all_blocks(self) -> bool:
        """Whether on CPUs bf16 takes a copy of every network, and not of the one at work alone."""

    @abstractmethod
    def kept_by_block(self, reduced: bool) -> int:
        """How many bytes a block keeps of a token for the gradient, without attention's weights.

        reduced: it computes in bf16.
        """

    @abstractmethod
    def kept_by_last_block(self, read: float) -> float:
        """How much the last block keeps, as a share of what another does.

        read: the share of tokens whose outputs are read.
        """

    @abstractmethod
    def parameters_of_blocks(self) -> int:
        """How many numbers all blocks of the network hold."""

    @abstractmethod
    def parameters(self) -> int:
        """How many numbers the network holds, without scalar heads."""


@dataclass
class HParams(Sizes):
    """GPT-2's: what a model directory's hparams.json holds.

    Dropout rates are read and written, not used.
    """

    embd_pdrop: float = option(0.1, 'dropout of the embeddings')
    attn_pdrop: float = option(0.1, 'dropout of the attention')
    resid_pdrop: float = option(0.1, 'dropout of the residual branches')
    head_pdrop: float = option(0.1, 'dropout before the scalar heads')

    @property
    def key_value_width(self) -> int:
        """See Sizes."""
        return self.n_embd

    @property
    def attention_weights(self) -> int:
        """See Sizes."""
        return self.n_head

    @property
    def copies_all_blocks(self) -> bool:
        """See Sizes: training.precision keeps them prepared for products."""
        return True

    def kept_by_block(self, reduced: bool) -> int:
        """See Sizes. Two values for each value of the input are always in float32."""
        return (2 * FLOAT + 14 * (HALF if reduced else FLOAT)) * self.n_embd

    def kept_by_last_block(self, read: float) -> float:
        """See Sizes: `kept_by_block` is what was measured of all blocks, the last among them."""
        return 1

    def parameters_of_blocks(self) -> int:
        """How many numbers all blocks of the network hold."""
        width = self.n_embd
        return self.n_layer * (12 * width + 13) * width

    def parameters(self) -> int:
        """How many numbers the network holds, without scalar heads."""
        return self.parameters_of_blocks() + (self.n_vocab + self.n_ctx + 2) * self.n_embd

    def validate(self) -> None:
        """Also ValueError unless the heads share the width equally."""
        super().validate()
        if any(isinstance(value, bool) for value in vars(self).values()):
            raise TypeError('sizes must be numbers, not true or false')
        if self.n_embd % self.n_head:
            width, heads = self.option_name('n_embd'), self.option_name('n_head')
            raise ValueError(f'{width} {self.n_embd} is not a multiple of {heads} {self.n_head}')
