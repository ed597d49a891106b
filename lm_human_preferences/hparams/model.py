"""Sizes of a GPT-2 network."""
from dataclasses import dataclass

from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.hyperparams import option


@dataclass
class HParams(hyperparams.HParams):
    """What a model directory's hparams.json holds; the dropout rates are read and written but, as always, not used."""
    n_vocab: int = option(0, 'tokens of the vocabulary')
    n_ctx: int = option(512, 'longest sequence')
    n_embd: int = option(768, 'width')
    n_head: int = option(12, 'attention heads')
    n_layer: int = option(12, 'blocks')
    embd_pdrop: float = option(0.1, 'dropout of the embeddings')
    attn_pdrop: float = option(0.1, 'dropout of the attention')
    resid_pdrop: float = option(0.1, 'dropout of the residual branches')
    head_pdrop: float = option(0.1, 'dropout before the scalar heads')
