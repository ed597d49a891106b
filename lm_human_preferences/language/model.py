"""GPT-2 with padding, scalar heads and a cache: a thin layer over the network of `transformers`."""
import re

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, GPT2Config, GPT2Model

from lm_human_preferences.hparams.model import HParams
from lm_human_preferences.utils.core import cumulative_max, index_each

__all__ = ['HParams', 'Model']


def positions_for(mask):
    """Position of each token: how many real ones precede it. `mask (batch, length)` bool -> int64."""
    counts = mask.long()
    return counts.cumsum(-1) - counts


def attention_mask(mask, queries):
    """Which keys the last `queries` positions may attend to: `mask (batch, keys)` -> bool `(batch, 1, queries, keys)`.

    A token sees itself and the real tokens before it. A position with nothing to see (padding before the first token)
    sees itself, so that nothing becomes nan; its output is never used.
    """
    keys = mask.shape[1]
    at = torch.arange(keys, device=mask.device)
    causal = at <= at[keys - queries:, None]
    allowed = causal & mask[:, None, :]
    itself = at == at[keys - queries:, None]
    return (allowed | (itself & ~allowed.any(-1, keepdim=True))).unsqueeze(1)


def repeat_last_present(h, mask):
    """Give padding the output of the last real token before it: `h (batch, length, n_embd)`, `mask (batch, length)`."""
    indices = torch.where(mask, torch.arange(mask.shape[1], device=mask.device), 0)
    return index_each(h, cumulative_max(indices))


def as_tf(name, tensor):
    """`tensor` (torch or numpy) in the shape of TensorFlow variable `name`: projections are convolutions of width 1.

    The same goes for Adam's slots `name`/adam and `name`/adam_1.
    """
    return tensor[None] if tensor.ndim == 2 and re.search(r'/w(/adam(_1)?)?$', name) else tensor


def tf_name(name):
    """'h.0.attn.c_attn.weight' -> 'h0/attn/c_attn/w': the GPT-2 release's name of a parameter of GPT2Model."""
    path = re.sub(r'^h\.', 'h', name).replace('.', '/')
    if path.endswith('/bias'):
        return path.removesuffix('ias')
    kind = '' if path in ('wte/weight', 'wpe/weight') else '/g' if 'ln_' in path else '/w'
    return path.removesuffix('/weight') + kind


class ScalarHead(nn.Module):
    """One number per position: `h (..., n_embd)` -> `(...)`."""

    def __init__(self, n_embd):
        super().__init__()
        self.w = nn.Parameter(torch.empty(n_embd))
        self.b = nn.Parameter(torch.empty(()))

    def forward(self, h):
        """`h (..., n_embd)` -> `(...)`, in the type of its own parameters."""
        return h.to(self.w.dtype) @ self.w + self.b

    def regularizer(self):
        """The L2 penalty that is 1 on average for a fresh head of the original (it never trained with it)."""
        return self.w.square().sum() / 2


class Model(nn.Module):
    """The original's language/model.py: a language model whose outputs at padding repeat the last real token's.

    scalar_heads: names of heads, 'value' (starts at zero) or 'reward' (starts random).
    Parameters are uninitialised until `initialize` or until all of them are loaded.
    """

    def __init__(self, hparams, scalar_heads=()):
        super().__init__()
        self.hparams = hparams
        config = GPT2Config(
            vocab_size=hparams.n_vocab, n_positions=hparams.n_ctx, n_embd=hparams.n_embd, n_layer=hparams.n_layer,
            n_head=hparams.n_head, activation_function='gelu_pytorch_tanh', layer_norm_epsilon=1e-5, embd_pdrop=0,
            attn_pdrop=0, resid_pdrop=0, bos_token_id=None, eos_token_id=None, attn_implementation='sdpa')
        with torch.device('meta'):  # no time lost on an initialisation that would not be the original's
            self.transformer = GPT2Model(config)
            self.heads = nn.ModuleDict({name: ScalarHead(hparams.n_embd) for name in scalar_heads})
        self.to_empty(device='cpu')

    @torch.no_grad()
    def initialize(self, names=None):
        """Draw the starting values of the original for all parameters, or for the TensorFlow `names` only."""
        n_embd, n_layer = self.hparams.n_embd, self.hparams.n_layer
        stdevs = {'wpe': 0.01, 'wte': 0.02, 'attn/c_attn/w': n_embd ** -0.5,
                  'attn/c_proj/w': (n_embd * n_layer) ** -0.5, 'mlp/c_fc/w': n_embd ** -0.5,
                  'mlp/c_proj/w': (4 * n_embd * n_layer) ** -0.5,
                  'heads/value/w': 0.0, 'heads/reward/w': (n_embd + 1) ** -0.5}
        for name, parameter in self.tf_parameters().items():
            if names is not None and name not in names:
                continue
            kind = re.sub(r'^model/(h\d+/)?', '', name)
            if kind in stdevs:
                parameter.normal_(std=stdevs[kind])
            else:
                parameter.fill_(1.0 if kind.endswith('/g') else 0.0)
        return self

    def tf_parameters(self, scope=''):
        """Parameters under the names of the GPT-2 release, in `scope`: {'policy/model/h0/attn/c_attn/w': Parameter}."""
        prefix = f'{scope}/model/' if scope else 'model/'
        named = {prefix + tf_name(name): p for name, p in self.transformer.named_parameters()}
        for name, p in self.heads.named_parameters():
            named[f'{prefix}heads/' + name.replace('.', '/')] = p
        return named

    def hidden(self, tokens, mask=None, cache=None):
        """Outputs of the last layer: `tokens (batch, length)` -> `(batch, length, n_embd)`.

        mask: bool `(batch, past + length)`, False where a token is padding, or None when all are real.
        cache: keys and values of the tokens before (extended in place), or None.
        """
        batch, length = tokens.shape
        past = cache.get_seq_length() if cache is not None else 0
        if mask is None:
            positions = torch.arange(past, past + length, device=tokens.device).unsqueeze(0)
        else:
            positions = positions_for(mask)[:, past:]
        self._check_positions(positions, past + length)
        output = self.transformer(
            input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=cache is not None,
            attention_mask=None if mask is None else attention_mask(mask, length)).last_hidden_state
        return output if mask is None else repeat_last_present(output, mask[:, past:])

    def _check_positions(self, positions, length):
        if length > self.hparams.n_ctx and positions.max() >= self.hparams.n_ctx:
            tokens = int(positions.max()) + 1
            raise ValueError(f"{tokens} tokens are more than the model's context of {self.hparams.n_ctx}")

    def mask_padding(self, tokens, padding_token):
        """(tokens with 0 for padding, bool mask of the real ones); ValueError for a row of padding only."""
        mask = tokens != padding_token
        empty = (~mask.any(-1)).nonzero()
        if len(empty):
            raise ValueError(f'row {int(empty[0])} has no token, only padding')
        return tokens * mask, mask

    def logits(self, h):
        """Language-model logits of `h (..., n_embd)` -> `(..., n_vocab)`."""
        return F.linear(h, self.transformer.wte.weight)

    def forward(self, X, *, past=None, past_tokens=None, mask=None, padding_token=None):
        """Everything at every position, as the original returned it; training computes only what it reads.

        X: int64 `(batch, length)`. Padding is named by `mask` (bool, of past and X) or by `padding_token`, not both;
        the latter needs `past_tokens (batch, past_length)` beside `past (batch, n_layer, 2, n_head, past_length, d)`.
        Returns 'h' (batch, length, n_embd), 'present' (keys and values of X, shaped like past), 'lm_logits',
        'lm_all_losses' (batch, length - 1), 'lm_losses' (batch,), and of each head NAME 'NAME' (batch, length) and
        'NAME_regularizer'.
        """
        if padding_token is not None:
            if mask is not None:
                raise ValueError('at most one of mask and padding_token may be given')
            if past is not None and past_tokens is None:
                raise ValueError('padding_token with past needs past_tokens')
            mask = X != padding_token
            X = X * mask
            if past is not None:
                mask = torch.cat([past_tokens != padding_token, mask], dim=1)
        cache = cache_of(past)
        h = self.hidden(X, mask, cache)
        logits = self.logits(h)
        losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), X[:, 1:], reduction='none')
        results = {'h': h, 'present': stacked(cache)[..., -X.shape[1]:, :], 'lm_logits': logits,
                   'lm_all_losses': losses, 'lm_losses': losses.mean(-1)}
        for name, head in self.heads.items():
            results[name], results[f'{name}_regularizer'] = head(h), head.regularizer()
        return results


def cache_of(past):
    """A cache for `Model.hidden` from `past (batch, n_layer, 2, n_head, past_length, d)`, or an empty one."""
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(past.transpose(0, 1).transpose(1, 2) if past is not None else ()):
        cache.update(keys, values, layer)
    return cache


def stacked(cache):
    """The keys and values of a cache as one tensor `(batch, n_layer, 2, n_head, length, d)`."""
    return torch.stack([torch.stack([layer.keys, layer.values], dim=1) for layer in cache.layers], dim=1)
