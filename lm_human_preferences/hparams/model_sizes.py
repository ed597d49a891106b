"""Sizes of a GPT-2 network."""

from dataclasses import dataclass

from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.hyperparams import option

# Tokens that a cache of keys and values has room for beyond those it holds.
CACHE_HEADROOM = 64


@dataclass
class HParams(hyperparams.HParams):
    """What a model directory's hparams.json holds. Dropout rates are read and written, not used."""

    n_vocab: int = option(0, 'tokens of the vocabulary', at_least=1)
    n_ctx: int = option(512, 'longest sequence', at_least=1)
    n_embd: int = option(768, 'width', at_least=1)
    n_head: int = option(12, 'attention heads', at_least=1)
    n_layer: int = option(12, 'blocks', at_least=1)
    embd_pdrop: float = option(0.1, 'dropout of the embeddings')
    attn_pdrop: float = option(0.1, 'dropout of the attention')
    resid_pdrop: float = option(0.1, 'dropout of the residual branches')
    head_pdrop: float = option(0.1, 'dropout before the scalar heads')

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
