"""Sizes of networks: what is asked of any, and those of GPT-2."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.hyperparams import option

# Tokens that a cache of keys and values has room for beyond those it holds.
CACHE_HEADROOM = 64


@dataclass
class Sizes(hyperparams.HParams, ABC):
    """What a network of any kind holds and computes: its limits and its memory follow from it."""

    n_vocab: int = option(0, 'tokens of the vocabulary', at_least=1)
    n_ctx: int = option(512, 'longest sequence', at_least=1)
    n_embd: int = option(768, 'width', at_least=1)
    n_head: int = option(12, 'attention heads', at_least=1)
    n_layer: int = option(12, 'blocks', at_least=1)

    @property
    @abstractmethod
    def key_value_width(self) -> int:
        """How many numbers the keys of a token are in one block; its values are as many."""

    @property
    @abstractmethod
    def kept_by_block(self) -> int:
        """How many numbers a block keeps of a token for the gradient.

        Attention's weights are not counted. 2 * n_embd of them are float32 in any precision.
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
    def kept_by_block(self) -> int:
        """See Sizes."""
        return 16 * self.n_embd

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
