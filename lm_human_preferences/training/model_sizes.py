"""Base class for the sizes of networks, such as their width and vocabulary."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from lm_human_preferences import storage
from lm_human_preferences.runs.run_files import SIZES
from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.hyperparams import option

FLOAT, HALF = 4, 2  # bytes per number


def is_model(directory: str) -> bool:
    """Return whether a directory (path or URL) holds a saved model, shown by its sizes."""
    return storage.exists(storage.join(directory, SIZES))


@dataclass
class Sizes(hyperparams.HParams, ABC):
    """Sizes of a network, which determine its longest sequence and its memory."""

    n_vocab: int = option(0, 'tokens of the vocabulary', at_least=1)
    n_ctx: int = option(512, 'longest sequence', at_least=1)
    n_embd: int = option(768, 'width', at_least=1)
    n_head: int = option(12, 'attention heads', at_least=1)
    n_layer: int = option(12, 'blocks', at_least=1)
    learned: int = option(0, 'numbers that a training changes; 0: all', ours=True)

    @property
    @abstractmethod
    def kept_numbers(self) -> int:
        """Return the values per token that a block keeps for gradients, without attention's."""

    @abstractmethod
    def parameters(self) -> int:
        """Return the number of parameters, not counting scalar heads."""

    def write(self, directory: str) -> None:
        """Write the sizes into a model's directory."""
        sizes = self.to_nested_dict(with_unknown=True)
        storage.write_json(storage.join(directory, SIZES), sizes)

    def own_parameters(self) -> int:
        """Return the number of parameters that are not shared with a training's other networks."""
        return self.learned or self.parameters()
