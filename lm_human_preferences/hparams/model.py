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

    def validate(self, *, prefix: str = '') -> None:
        """Also ValueError unless the heads share the width equally."""
        super().validate(prefix=prefix)
        if any(isinstance(value, bool) for value in vars(self).values()):
            raise TypeError('sizes must be numbers, not true or false')
        if self.n_embd % self.n_head:
            raise ValueError(
                f'--{prefix}n_embd {self.n_embd} is not a multiple of --{prefix}n_head'
                f' {self.n_head}'
            )
