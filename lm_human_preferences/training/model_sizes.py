"""Sizes of networks: the interface of every kind."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from lm_human_preferences import storage
from lm_human_preferences.runs.run_files import SIZES
from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.hyperparams import option

FLOAT, HALF = 4, 2  # bytes


def is_model(directory: str) -> bool:
    """Return whether a directory, path or URL, holds a model with its sizes."""
    return storage.exists(storage.join(directory, SIZES))


@dataclass
class Sizes(hyperparams.HParams, ABC):
    """Sizes of a network of any kind, from which its limits and its memory follow."""

    n_vocab: int = option(0, 'tokens of the vocabulary', at_least=1)
    n_ctx: int = option(512, 'longest sequence', at_least=1)
    n_embd: int = option(768, 'width', at_least=1)
    n_head: int = option(12, 'attention heads', at_least=1)
    n_layer: int = option(12, 'blocks', at_least=1)
    learned: int = option(0, 'numbers that a training changes; 0: all', ours=True)

    @property
    def limit(self) -> str:
        """Text that describes the longest sequence to the user."""
        return str(self.n_ctx)

    @property
    def embedding_rows(self) -> int:
        """Rows of the token embedding; some models have more rows than tokens."""
        return self.n_vocab

    @property
    @abstractmethod
    def key_value_width(self) -> int:
        """Width of the keys of a token in one block, and of its values."""

    @property
    @abstractmethod
    def attention_weights(self) -> int:
        """Attention weights kept by a block per pair of tokens, where attention is not fused."""

    @abstractmethod
    def kept_by_block(self, reduced: bool) -> int:
        """Return a block's activation bytes per token, without attention; reduced: in bf16."""

    @abstractmethod
    def kept_by_last_block(self, read: float) -> float:
        """Return the last block's memory as a share of another's; read: share of tokens read."""

    @abstractmethod
    def parameters_of_blocks(self) -> int:
        """Number of parameters of all blocks."""

    @abstractmethod
    def parameters(self) -> int:
        """Number of parameters without scalar heads."""

    def write(self, directory: str) -> None:
        """Write the file by which `directory` is a model."""
        sizes = self.to_nested_dict(with_unknown=True)
        storage.write_json(storage.join(directory, SIZES), sizes)

    def own_parameters(self) -> int:
        """Return the number of parameters not shared with a training's other networks."""
        return self.learned or self.parameters()

    def shared_bytes(self, reduced: bool) -> int:
        """Return bytes of what all networks share; reduced: linear layers kept in bf16."""
        if not self.learned:
            return 0
        saved = FLOAT - HALF if reduced else 0
        return FLOAT * self.parameters() - saved * self.parameters_of_blocks()
