"""Base class of the networks of language models: their interface, and the code they share."""

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from lm_human_preferences.checkpointing.names import VariableNames
from lm_human_preferences.errors import UserError
from lm_human_preferences.language.networks import vocabulary
from lm_human_preferences.language.networks.attention import (
    BlockInputs,
    Rows,
    Unpadding,
    attention_bias,
    attention_mask,
    last_present,
    positions_for,
)
from lm_human_preferences.language.networks.scopes import Sizes
from lm_human_preferences.machine import precision
from lm_human_preferences.utils.core import MIN_TEMPERATURE, index_each

HEADS = 'heads.'  # prefix of the names of the scalar heads' parameters


class ScalarHead(nn.Module):
    """Linear head that returns a number for each position, computed in its parameters' dtype."""

    def __init__(self, n_embd: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(n_embd))
        self.b = nn.Parameter(torch.empty(()))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """Map `h (..., n_embd)` to `(...)`."""
        return (h.to(self.w.dtype) * self.w).sum(-1) + self.b


class Linear(nn.Linear):
    """Linear layer of a transformers model, computed by `precision.linear_transposed`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map `input (..., inputs)` to (..., outputs)."""
        return precision.linear_transposed(input, self.weight, self.bias)


class Network(nn.Module, ABC):
    """Network of a language model; outputs at padding repeat those at the last real token.

    Parameters are uninitialised until `initialize` is called or all are loaded.
    gradient_checkpointing: whether a backward pass recomputes each block from its inputs.
    shared: names of frozen parameters that other networks use as well.
    constants: names of other frozen parameters, which belong to this network.
    variable_names: maps parameters to names in checkpoints. logit_scale: multiplies all logits.
    """

    variable_names: VariableNames
    logit_scale: float = 1.0
    heads: nn.ModuleDict

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.gradient_checkpointing = False
        self.shared: frozenset[str] = frozenset()
        self.constants: frozenset[str] = frozenset()

    def add_heads(self, names: Iterable[str]) -> None:
        """Add scalar heads by name: 'value' (zero at first) or 'reward' (random at first)."""
        # Some models project hidden states to a width other than n_embd before the output layer.
        width = self.output_layer()[0].shape[1]
        self.heads = nn.ModuleDict({name: ScalarHead(width) for name in names})

    def own_parameters(self) -> dict[str, nn.Parameter]:
        named = self.named_parameters()
        return {name: parameter for name, parameter in named if name not in self.shared}

    @abstractmethod
    def outputs(self, tokens: torch.Tensor, positions: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Return the last layer's outputs for `tokens (batch, length)`: (batch, length, n_embd).

        positions: (batch, length). rows: layout of the tokens; if it has a cache (of `new_cache`),
        the tokens are added to it. If `rows.read (batch, n)` is set: only outputs at these columns.
        """

    @abstractmethod
    def new_cache(self, capacity: int) -> Any:
        """Return an empty cache for the keys and values of at most `capacity` tokens.

        It has a `length` (tokens so far) and `keep(rows)`, which drops all other rows.
        """

    @abstractmethod
    def output_layer(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output layer's weight (n_vocab, n_embd), and its bias (n_vocab,) or None."""

    def takes_row_of(self, columns: int) -> bool:
        """Return whether several completions of a prompt may share a row of `columns` columns.

        `columns` may exceed n_ctx, as the positions of each completion begin after the prompt.
        """
        return True

    @property
    def device(self) -> torch.device:
        return self.output_layer()[0].device

    @property
    def attention_type(self) -> torch.dtype:
        """Return the dtype of attention keys and of the attention bias."""
        return precision.autocast_dtype(self.output_layer()[0].dtype)

    @torch.no_grad()
    def initialize(self, names: Container[str] | None = None) -> Self:
        """Set heads to the original's initial values. names: parameters to set; None: all."""
        for name, parameter in self.heads.named_parameters():
            if names is not None and f'{HEADS}{name}' not in names:
                continue
            if name == 'reward.w':
                parameter.normal_(std=(len(parameter) + 1) ** -0.5)
            elif name == 'value.w':
                parameter.normal_(std=0.0)
            else:
                parameter.zero_()
        return self

    def hidden(
        self,
        tokens: torch.Tensor,
        mask: torch.Tensor | None = None,
        cache: Any = None,
        output_positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return outputs of the last layer: `tokens (batch, length)` -> (batch, length, n_embd).

        mask: bool (batch, past + length), False at padding; None: no padding. cache: keys and
        values of the `past` earlier tokens (extended in place), or None. output_positions: int64
        (n,), the columns of `tokens` whose outputs, (batch, n, n_embd), to return; None: all.

        If tokens and mask are in host memory, nothing waits for the network's device.
        """
        batch, length = tokens.shape
        device = self.device
        past = cache.length if cache is not None else 0
        if mask is None:
            mask = torch.ones(batch, past + length, dtype=torch.bool)
        on_host = mask.cpu()
        self.check_positions(on_host)
        tokens, mask = (each.to(device, non_blocking=True) for each in (tokens, mask))
        positions = positions_for(mask)[:, past:]
        allowed = attention_mask(mask, length, all_real=bool(on_host.numpy().all()))
        bias = attention_bias(allowed, batch, self.attention_type)
        columns = last_present(mask[:, past:])
        if output_positions is not None:
            unpadding = Unpadding(tokens.shape, on_host[:, past:]).to(device)
            columns = columns[:, output_positions]
            rows = Rows(unpadding, bias, is_causal=past == 0, cache=cache, read=columns)
            return self.outputs(tokens, positions, rows)
        # Compute padding, too: the result has outputs at padding before the first real token.
        h = self.outputs(tokens, positions, Rows(Unpadding(tokens.shape), bias, cache=cache))
        return index_each(h, columns)

    def last_hidden(
        self, prompt: torch.Tensor, completions: torch.Tensor, padding_token: int
    ) -> torch.Tensor:
        """Return outputs (batch, n, n_embd) at the last token of each completion of a prompt.

        prompt: (batch, prompt_length), computed once. completions: (batch, n, length); for an
        empty completion, the output at the end of the prompt is returned.
        """
        rows = _behind_prompt(prompt, completions)
        ends = last_present(rows != padding_token)[..., -1:]
        return self._in_one_row(rows, prompt.shape[1], ends, padding_token).squeeze(2)

    def completion_hidden(
        self,
        prompt: torch.Tensor,
        completions: torch.Tensor,
        padding_token: int,
        kept: BlockInputs | None = None,
    ) -> torch.Tensor:
        """Return outputs at the last token of a prompt and at each token of its n completions.

        prompt: (batch, prompt_length), computed once. completions: (batch, n, length). Shape:
        (batch, n, 1 + length, n_embd). kept: storage for inputs of some blocks at the same tokens.
        """
        rows = _behind_prompt(prompt, completions)
        start = prompt.shape[1]
        columns = last_present(rows != padding_token)[..., start - 1 :]
        return self._in_one_row(rows, start, columns, padding_token, kept)

    def _in_one_row(
        self,
        rows: torch.Tensor,
        start: int,
        columns: torch.Tensor,
        padding_token: int,
        kept: BlockInputs | None = None,
    ) -> torch.Tensor:
        """Return the outputs at m chosen columns in each of a prompt's n token sequences.

        columns: (batch, n, m). rows: (batch, n, start + length). The n rows begin with the same
        `start` tokens. To compute these once, n completions share a row, unless it is too long for
        the network; completions do not attend to each other.
        """
        batch, n, total = rows.shape
        length = total - start
        if n > 1 and not self.takes_row_of(start + n * length):
            alone = [each.flatten(0, 1).unsqueeze(1) for each in (rows, columns)]
            h = self._in_one_row(alone[0], start, alone[1], padding_token, kept)
            return h.view(batch, n, *h.shape[2:])
        tokens, mask = self.mask_padding(rows, padding_token)
        self.check_positions(mask)
        device = self.device

        def one_row(values: torch.Tensor) -> torch.Tensor:
            """Join the n rows of each prompt into one row, (batch, start + n * length)."""
            if n == 1:
                return values.squeeze(1)
            return torch.cat([values[:, 0, :start], values[:, :, start:].flatten(1)], dim=1)

        width = start + n * length
        unpadding = Unpadding((batch, width), one_row(mask)).to(device)
        tokens, mask, columns = (
            each.to(device, non_blocking=True) for each in (tokens, mask, columns)
        )
        segment_mask = None
        if n > 1:
            offsets = length * torch.arange(n, device=device)[:, None]
            # Convert columns of one completion to columns of the row that joins all completions.
            columns = columns + (columns >= start) * offsets
            completion = torch.arange(n, device=device).repeat_interleave(length)
            same_completion = completion == completion[:, None]
            segment_mask = F.pad(same_completion, (start, 0, start, 0), value=True)
        all_real = unpadding.indices is None
        allowed = attention_mask(one_row(mask), width, segment_mask, all_real=all_real)
        bias = attention_bias(allowed, batch, self.attention_type)
        positions = one_row(positions_for(mask))
        layout = Rows(unpadding, bias, is_causal=n == 1, read=columns.flatten(1), kept=kept)
        return self.outputs(one_row(tokens), positions, layout).unflatten(1, (n, -1))

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        """Return the logits (..., n_vocab) for outputs `h (..., n_embd)`."""
        weight, bias = self.output_layer()
        logits = precision.logits(self.scaled(h), weight)
        return logits if bias is None else logits + bias

    def logprobs_and_entropies(
        self, h: torch.Tensor, labels: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, ...]:
        """Return log-probabilities (...) of `labels (...)` for outputs `h`, and entropies (...)."""
        weight, bias = self.output_layer()
        temperature = max(temperature, MIN_TEMPERATURE)
        h = self.scaled(h) / temperature
        if bias is not None:
            # Make the bias one more column of the weight, so that the product adds it.
            h = torch.cat([h, torch.full_like(h[..., :1], 1 / temperature)], dim=-1)
            weight = torch.cat([weight, bias.unsqueeze(1)], dim=1)
        return vocabulary.logprobs_and_entropies(
            h,
            weight,
            labels,
            gradient_type=precision.autocast_dtype(h.dtype),
            product=precision.times_vocabulary,
        )

    def scaled(self, h: torch.Tensor) -> torch.Tensor:
        """Return outputs `h (..., n_embd)` times `logit_scale`."""
        return h if self.logit_scale == 1 else h * self.logit_scale

    def mask_padding(
        self, tokens: torch.Tensor, padding_token: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (tokens with 0 for padding, mask of real tokens); ValueError for an empty row."""
        mask = tokens != padding_token
        empty = np.argwhere(~mask.cpu().numpy().any(-1))
        if len(empty):
            raise ValueError(f'row {empty[0][0]} has only padding, no token')
        return tokens * mask, mask

    def check_positions(self, mask: torch.Tensor) -> None:
        """Raise UserError if a row of `mask (..., length)` has more tokens than n_ctx."""
        before_last = mask[..., :-1].cpu().numpy().sum(-1)
        longest = int(before_last.max(initial=0)) + 1
        if longest > self.sizes.n_ctx:
            raise UserError(
                f"{longest} tokens are more than the model's context of {self.sizes.n_ctx}"
            )


def _behind_prompt(prompt: torch.Tensor, completions: torch.Tensor) -> torch.Tensor:
    """Return each of `completions (batch, n, length)` appended to its `prompt (batch, start)`."""
    prompts = prompt.unsqueeze(1).expand(-1, completions.shape[1], -1)
    return torch.cat([prompts, completions], dim=2)
