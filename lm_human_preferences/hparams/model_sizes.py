"""Sizes of networks: what is asked of those of any kind."""

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
