"""How this process multiplies matrices: in which precision, by which library, in what memory."""

import contextlib
import ctypes
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from lm_human_preferences.errors import UserError

LARGEST_ERROR = 1e-6  # of a float32 product, relative

_mkldnn: Any = torch.backends.mkldnn  # a module whose class does not declare `matmul`
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h

# The type that layers compute in, if it is not that of their weights.
_reduced: torch.dtype | None = None
# Reorders weights for oneDNN; set where products without gradient use it.
_prepack: Callable[[torch.Tensor], torch.Tensor] | None = None


def configure(precision: str, device: torch.device) -> None:
    """Set this process up for `precision`: fp32, tf32 or bf16, on `device`; UserError if it cannot.

    Weights, the residual stream, logits, losses and statistics stay float32 in any case. With bf16,
    GPUs compute logits in tf32, whose rounding error is an eighth of that of the layers before.
    """
    global _reduced, _prepack
    check(precision, device)
    _reduced = torch.bfloat16 if precision == 'bf16' else None
    is_prepacking = precision == 'bf16' and device.type == 'cpu'
    _prepack = _prepack_operator() if is_prepacking else None
    if device.type == 'cuda':
        torch.backends.cuda.matmul.allow_tf32 = precision != 'fp32'
    else:
        prefer_onednn()
        keep_freed_memory()


def check(precision: str, device: torch.device) -> None:
    """UserError where `device` cannot compute in `precision`."""
    if precision == 'tf32' and device.type != 'cuda':
        raise UserError('precision tf32 needs a GPU; without one, take fp32 or bf16')


def autocast(device: torch.device) -> torch.autocast:
    """Context in which layers compute in the configured precision.

    Weights are cast once, for the outermost of nested ones.
    """
    return torch.autocast(device.type, _reduced, enabled=_reduced is not None)


def autocast_dtype(default: torch.dtype) -> torch.dtype:
    """The type that layers compute in; `default` if it is that of their inputs."""
    return _reduced or default


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    gelu: bool = False,
) -> torch.Tensor:
    """`x (n, inputs)` times `weight (inputs, outputs)`, plus `bias (outputs,)`, or gelu of that.

    To be called within `autocast`. Without gradient, CPUs keep a copy of the weight in bf16: see
    _times_prepacked.
    """
    if _prepack is None or torch.is_grad_enabled():
        outputs = torch.addmm(bias, x, weight)
        if gelu:
            return F.gelu(outputs, approximate='tanh')
        return outputs
    return _times_prepacked(
        x.to(_reduced), weight, lambda: weight.to(_reduced).T, bias.to(_reduced), gelu
    )


def logits(h: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """`h (..., n_embd)` times `table (n_vocab, n_embd)` transposed, in their own type."""
    if _prepack is None or torch.is_grad_enabled():
        with torch.autocast(h.device.type, enabled=False):
            return F.linear(h, table)
    return _times_prepacked(h, table, lambda: table)


def invalidate_prepacked(weights: Iterable[torch.Tensor]) -> None:
    """Free the prepacked copies of `weights` that have new values.

    The fused Adam changes weights without PyTorch counting a new version.
    """
    for weight in weights:
        weight.prepacked = None, None  # pyright: ignore[reportAttributeAccessIssue]


def _times_prepacked(
    x: torch.Tensor,
    weight: torch.Tensor,
    transposed: Callable[[], torch.Tensor],
    bias: torch.Tensor | None = None,
    gelu: bool = False,
) -> torch.Tensor:
    """`x` times a copy of `weight` in oneDNN's own order, which is kept until the weight changes.

    transposed: returns what is copied, (outputs, inputs). Ordinary products make such a copy each
    time: the digits are the same, but 16 rows take twice as long and 1,000 a fifth longer. gelu is
    computed before rounding.
    """
    version = _version_of(weight)
    copied: Any = getattr(weight, 'prepacked', (None, None))
    version_then, prepacked = copied
    if version_then != version:
        assert _prepack is not None
        prepacked = _prepack(transposed())
        weight.prepacked = version, prepacked  # pyright: ignore[reportAttributeAccessIssue]
    return _prepacked_product(x, prepacked, bias, gelu)


def prefer_onednn() -> None:
    """Have oneDNN compute float32 products on a CPU, unless that costs precision.

    It is twice as fast as MKL on AMD's processors. The setting also allows it to round to bfloat16,
    which it does only on processors with matrix units for that (AMX): one product tells.
    """
    _mkldnn.matmul.fp32_precision = 'bf16'
    if _error_of_a_product() > LARGEST_ERROR:
        _mkldnn.matmul.fp32_precision = 'none'


@contextlib.contextmanager
def onednn_preferred() -> Iterator[None]:
    """`prefer_onednn` within the block only."""
    before = _mkldnn.matmul.fp32_precision
    prefer_onednn()
    try:
        yield
    finally:
        _mkldnn.matmul.fp32_precision = before


def keep_freed_memory() -> None:
    """Keep up to 2 GB of freed memory in this process, if its C library is glibc.

    By default the pages of every large tensor come from the system and go back to it. That costs a
    sixth of the processor's time in bf16, and threads do not share it.
    """
    mallopt = getattr(ctypes.CDLL(None), 'mallopt', None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def _error_of_a_product() -> float:
    a, b = torch.randn(2, 512, 512, generator=torch.Generator().manual_seed(0))
    exact = a.double() @ b.double()
    return ((a @ b - exact).norm() / exact.norm()).item()


# --- What PyTorch has no public name for: tests/unit/test_fast_paths.py tells which has gone. ---


def _version_of(tensor: torch.Tensor) -> int:
    """PyTorch's count of changes to a tensor in place."""
    return tensor._version


def _prepack_operator() -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The operator by which PyTorch's compiler prepacks weights; None if it has none for bf16."""
    operators: Any = torch.ops.mkldnn
    try:
        needed = operators._reorder_linear_weight, operators._linear_pointwise
        return needed[0] if operators._is_mkldnn_bf16_supported() else None
    except AttributeError:  # they may go
        return None


def _prepacked_product(
    x: torch.Tensor, prepacked: torch.Tensor, bias: torch.Tensor | None, gelu: bool
) -> torch.Tensor:
    """`x` times what `_prepack_operator` has made of a weight, plus `bias`, or gelu of that."""
    activation = ('gelu', [], 'tanh') if gelu else ('none', [], '')
    return torch.ops.mkldnn._linear_pointwise(x, prepacked, bias, *activation)
