"""Work of the speed benchmarks: models of random weights, queries, and the FLOPs they need."""

import functools
import gc
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lm_human_preferences.language import encodings, model
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.lm_tasks import QuerySampler
from lm_human_preferences.machine import precision
from lm_human_preferences.machine.hardware import default_device

# Looking for garbage in all that is imported takes time of what is measured, and half a second when
# a process ends.
gc.freeze()

SIZES = {
    'test': (64, 2, 2),
    '124M': (768, 12, 12),
    '355M': (1024, 16, 24),
    '774M': (1280, 20, 36),
    '1558M': (1600, 25, 48),
}
# By --model: this program's own GPT-2, models of transformers that it drives.
MODELS = 'gpt2', 'llama', 'transformers-gpt2'
KEY_VALUE_HEADS = {2: 1, 12: 4, 16: 4, 20: 5, 25: 5}  # of a Llama, by its number of heads
QUERY_LENGTH, RESPONSE_LENGTH, VOCABULARY, PADDING = 64, 24, encodings.Main.n_vocab, 50259


def library_for(size: str) -> precision.Library:
    """Return the library for float32 products in a training of this size on this machine."""
    return precision.fastest_library(SIZES[size][0])


class PaddingEncoder(encodings.LetterEncoder):
    """Letters, with the padding of GPT-2's encoding."""

    padding_token = PADDING


class EncodingWithoutFiles(encodings.Encoding):
    """An encoding as far as its files are not needed: its size and padding."""

    def get_encoder(self) -> encodings.Encoder:
        return PaddingEncoder()


ENCODING = EncodingWithoutFiles('main', VOCABULARY, encodings.Main.eot_token)


class RandomModel(TrainedModel):
    """Random weights of a size, without the files of the encoding."""

    def __init__(self, size: str) -> None:
        super().__init__('test')
        self.size = size
        n_embd, n_head, n_layer = SIZES[size]
        self.own_sizes = model.HParams(
            n_vocab=VOCABULARY, n_ctx=1024, n_embd=n_embd, n_head=n_head, n_layer=n_layer
        )

    @functools.cached_property
    def encoding(self) -> encodings.Encoding:
        return ENCODING

    def sizes(self) -> model.HParams:
        return self.own_sizes

    def build(self, *, scope: str, scalar_heads: Iterable[str] = ()) -> model.Model:
        torch.manual_seed(0)
        return model.Model(self.own_sizes, scalar_heads).initialize()


class RandomCausalLM(RandomModel):
    """Random weights of a model of transformers."""

    def __init__(self, size: str, model: str) -> None:
        # Takes seconds to import: only who needs it waits.
        from lm_human_preferences.language.causal_lm.sizes import sizes_of

        super().__init__(size)
        self.model = model
        with torch.device('meta'):
            without_values = _without_dropout(size, model)
        self.own_sizes: Any = sizes_of(without_values, VOCABULARY)

    def build(self, *, scope: str, scalar_heads: Iterable[str] = ()) -> Any:
        from lm_human_preferences.language.causal_lm.network import TransformersNetwork

        torch.manual_seed(0)
        network = _without_dropout(self.size, self.model)
        return TransformersNetwork(network, self.own_sizes, scalar_heads).initialize()


def random_model(size: str, model: str) -> RandomModel:
    """Return the model that our variants begin with."""
    return RandomModel(size) if model == 'gpt2' else RandomCausalLM(size, model)


class SameQueries(QuerySampler):
    """Gives the same queries at each call."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens
        self.position = (0, 0)  # they come from no text

    def __call__(self) -> dict[str, torch.Tensor]:
        return {'tokens': self.tokens}


def plain_model(size: str, model: str = 'gpt2') -> Any:
    """A model as `transformers` makes it, of random weights and without dropout."""
    torch.manual_seed(0)
    return _without_dropout(size, model).to(default_device())


def _without_dropout(size: str, model: str) -> Any:
    return _llama(size) if model == 'llama' else _gpt2(size)


def _gpt2(size: str) -> Any:
    # Takes seconds to import: only who needs it waits.
    from transformers import GPT2Config, GPT2LMHeadModel

    n_embd, n_head, n_layer = SIZES[size]
    return GPT2LMHeadModel(
        GPT2Config(
            n_embd=n_embd, n_head=n_head, n_layer=n_layer, embd_pdrop=0, attn_pdrop=0, resid_pdrop=0
        )
    )


def _llama(size: str) -> Any:
    """A Llama as wide and as deep as GPT-2 of that size, of the same tokens, which are tied."""
    from transformers import LlamaConfig, LlamaForCausalLM

    n_embd, n_head, n_layer = SIZES[size]
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=n_embd,
            intermediate_size=_inner_width(n_embd),
            num_hidden_layers=n_layer,
            num_attention_heads=n_head,
            num_key_value_heads=KEY_VALUE_HEADS[n_head],
            max_position_embeddings=1024,
            tie_word_embeddings=True,
        )
    )


def _inner_width(n_embd: int) -> int:
    """Of a Llama's layers: two thirds of GPT-2's, for they have three products instead of two."""
    return 8 * n_embd // 3


def queries(batch):
    """Random queries (batch, QUERY_LENGTH).

    Of each, 48 to 64 tokens are real, as in book passages cut at a full stop.
    """
    tokens = torch.randint(
        VOCABULARY, (batch, QUERY_LENGTH), generator=torch.Generator().manual_seed(1)
    )
    lengths = torch.randint(
        3 * QUERY_LENGTH // 4,
        QUERY_LENGTH + 1,
        (batch, 1),
        generator=torch.Generator().manual_seed(2),
    )
    return tokens.masked_fill(torch.arange(QUERY_LENGTH) >= lengths, PADDING)


def padded_left(tokens):
    """Queries as other programs pad them: `(tokens with 0 for padding, mask of the real ones)`."""
    real = tokens != PADDING
    order = real.long().argsort(dim=1, stable=True)
    return (tokens * real).gather(1, order), real.gather(1, order)


def positions(mask):
    """Position of each token of `mask (batch, length)`, 0 at padding on the left."""
    return (mask.long().cumsum(1) - 1).clamp_(min=0)


def linear_flops(size, *, tokens, read, logits=0, model='gpt2'):
    """FLOPs of the linear layers for so many `tokens`.

    read: positions at which the last block's output is needed. logits: those whose logits are.
    """
    d, n_head, n_layer = SIZES[size]
    keys_and_values, others = 4 * d * d, 20 * d * d
    if model == 'llama':
        keys_and_values = keys_and_values * KEY_VALUE_HEADS[n_head] // n_head
        others = 4 * d * d + 6 * d * _inner_width(d)
    return (
        tokens * (keys_and_values + others) * (n_layer - 1)
        + tokens * keys_and_values
        + read * others
        + logits * 2 * d * VOCABULARY
    )


def attention_flops(size, tokens):
    """FLOPs of causal attention over so many `tokens`.

    The last block is left out, because its output is needed at few positions.
    """
    d, _, n_layer = SIZES[size]
    return 2 * tokens * tokens * d * (n_layer - 1)
