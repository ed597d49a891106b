"""Log-probabilities of tokens, and entropies, computed with a single table (rows, n_vocab)."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from lm_human_preferences.utils.core import ceil_div


def logprobs_and_entropies(
    h: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    gradient_type: torch.dtype | None = None,
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = F.linear,
) -> tuple[torch.Tensor, ...]:
    """Return (log-probabilities of tokens `labels (...)`, entropies), each of shape (...).

    Logits are `h (..., n_embd) @ weight (n_vocab, n_embd).T`. Entropies have no gradient.
    gradient_type: dtype of the products in the backward pass; None: the dtype of `h`. product:
    returns the logits of `h (rows, n_embd)` and `weight`, without gradient.
    """
    function = OnGPU if h.is_cuda else OnCPU
    results = function.apply(
        h.flatten(0, -2), weight, labels.flatten(), gradient_type or h.dtype, product
    )
    return tuple(result.view(labels.shape) for result in results)


class OnCPU(torch.autograd.Function):
    """Log-probabilities and entropies on a CPU: in place, in pieces that fit the CPU's cache."""

    ROWS = 64  # number of rows in a piece of the forward pass; a softmax needs whole rows
    COLUMNS = 1024  # number of columns (tokens of the vocabulary) in a piece of the backward pass

    @staticmethod
    def forward(
        ctx: Any,
        h: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        gradient_type: torch.dtype,
        product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities and entropies, (rows,) each, of `h (rows, n_embd)`."""
        table = product(h, weight)
        logprobs, entropies = h.new_empty(len(h)), h.new_empty(len(h))
        pieces = (values.split(OnCPU.ROWS) for values in (table, labels, logprobs, entropies))
        for piece, label, logprob, entropy in zip(*pieces, strict=True):
            shifted = piece - piece.amax(-1, keepdim=True)
            total = torch.exp(shifted, out=piece).sum(-1, keepdim=True)
            piece.div_(total)
            log_total = total.log()[:, 0]
            logprob.copy_(shifted.gather(1, label[:, None])[:, 0] - log_total)
            entropy.copy_(log_total - shifted.mul_(piece).sum(-1))
        ctx.save_for_backward(h, weight, labels, table)
        ctx.mark_non_differentiable(entropies)
        ctx.gradient_type = gradient_type
        return logprobs, entropies

    @staticmethod
    def backward(
        ctx: Any,
        gradient: torch.Tensor,
        _: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, None, None, None]:
        """Return the gradients of `h` and `weight`."""
        # The gradient of the logits is `gradient` * (one-hot - softmax).
        h, weight, labels, table = ctx.saved_tensors
        low = ctx.gradient_type
        gradient = gradient.unsqueeze(1)
        h_low = h.to(low)
        d_h = gradient * weight[labels]  # the part of d_h that comes from the one-hot labels
        d_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for start in range(0, len(weight), OnCPU.COLUMNS):
            piece = slice(start, start + OnCPU.COLUMNS)
            d_logits = table[:, piece].mul_(-gradient).to(low)
            d_h += d_logits @ weight[piece].to(low)
            if d_weight is not None:
                d_weight[piece] = d_logits.T @ h_low
        if d_weight is not None:
            d_weight.index_add_(0, labels, gradient * h)
        return d_h, d_weight, None, None, None


class OnGPU(torch.autograd.Function):
    """Log-probabilities and entropies on a GPU, in few, large operations.

    OnCPU would launch many small kernels on a GPU.
    """

    ROWS = 2048  # largest number of rows whose softmax is computed at once, to save memory
    ALIGNED = 64  # Columns are padded to a multiple of 64 for fast matrix products.

    @staticmethod
    def forward(
        ctx: Any,
        h: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        gradient_type: torch.dtype,
        product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities and entropies, (rows,) each, of `h (rows, n_embd)`."""
        table = product(h, weight)
        n_vocab = len(weight)
        columns = OnGPU.ALIGNED * ceil_div(n_vocab, OnGPU.ALIGNED)
        probs = h.new_empty(len(h), columns, dtype=gradient_type)
        probs[:, n_vocab:] = 0
        logprobs, entropies = h.new_empty(len(h)), h.new_empty(len(h))
        pieces = (each.split(OnGPU.ROWS) for each in (table, labels, probs, logprobs, entropies))
        for piece, label, prob, logprob, entropy in zip(*pieces, strict=True):
            logs = piece.log_softmax(-1)
            prob = torch.exp(logs, out=prob[:, :n_vocab])
            logprob.copy_(logs.gather(1, label[:, None])[:, 0])
            entropy.copy_(-logs.mul_(prob).sum(-1))
        ctx.save_for_backward(h, weight, labels, probs)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(
        ctx: Any,
        gradient: torch.Tensor,
        _: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, None, None, None]:
        """Return the gradients of `h` and `weight`, as OnCPU.backward does.

        Each row's gradient is multiplied into `h`, not into the larger table of probabilities.
        """
        h, weight, labels, probs = ctx.saved_tensors
        gradient = gradient.unsqueeze(1)
        more_words = probs.shape[1] - len(weight)
        low_weight = F.pad(weight.to(probs.dtype), (0, 0, 0, more_words))
        d_h = gradient * (weight[labels] - _product(probs, low_weight))
        if not ctx.needs_input_grad[1]:
            return d_h, None, None, None, None
        weighted = gradient * h
        d_weight = _product(probs.T, -weighted.to(probs.dtype))[: len(weight)]
        return d_h, d_weight.index_add_(0, labels, weighted), None, None, None


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product of two matrices of any dtype, summed and returned in float32."""
    if a.dtype == torch.float32:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32)
