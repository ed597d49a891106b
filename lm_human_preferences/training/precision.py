"""How precisely this process multiplies matrices, by which library, and in what memory."""

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

# the type that networks compute in where it is not that of their weights
_reduced: torch.dtype | None = None
# the operator that reorders weights for oneDNN, where products without gradient are to use it
_prepack: Callable[[torch.Tensor], torch.Tensor] | None = None


def configure(precision: str, device: torch.device) -> None:
    """Set this process up for `precision`: fp32, tf32 or bf16, on `device`. UserError for tf32
    without a GPU.

    Weights, what layers are added up in, logits, losses and statistics stay float32 in any case.
    With bf16, GPUs take the product that gives logits in tf32, whose rounding is an eighth of that
    of the layers before it.
    """
    global _reduced, _prepack
    check(precision, device)
    _reduced = torch.bfloat16 if precision == 'bf16' else None
    _prepack = _operator_to_lay_out() if precision == 'bf16' and device.type == 'cpu' else None
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
    """Context in which the layers of networks compute as prepared. Weights are cast once for the
    outermost one."""
    return torch.autocast(device.type, _reduced, enabled=_reduced is not None)


def autocast_dtype(default: torch.dtype) -> torch.dtype:
    """The type that layers compute in, `default` where that is the one of their inputs."""
    return _reduced or default


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    gelu: bool = False,
) -> torch.Tensor:
    """`x (n, inputs)` times `weight (inputs, outputs)`, plus `bias (outputs,)`, within `computing`;
    or gelu of that.

    Without gradient, CPUs keep a copy of the weight in bf16: see _times_prepacked.
    """
    if _prepack is None or torch.is_grad_enabled():
        outputs = torch.addmm(bias, x, weight)
        return F.gelu(outputs, approximate='tanh') if gelu else outputs
    return _times_prepacked(
        x.to(_reduced), weight, lambda: weight.to(_reduced).T, bias.to(_reduced), gelu
    )


def logits(h: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """`h (..., n_embd)` times each row of `table (n_vocab, n_embd)`, in their own type: (...,
    n_vocab)."""
    if _prepack is None or torch.is_grad_enabled():
        with torch.autocast(h.device.type, enabled=False):
            return F.linear(h, table)
    return _times_prepacked(h, table, lambda: table)


def invalidate_prepacked(weights: Iterable[torch.Tensor]) -> None:
    """Say that `weights` have new values, where PyTorch does not count that: what was made of the
    old ones is freed."""
    for weight in weights:
        weight.prepacked = None, None  # pyright: ignore[reportAttributeAccessIssue]


def _times_prepacked(
    x: torch.Tensor,
    weight: torch.Tensor,
    transposed: Callable[[], torch.Tensor],
    bias: torch.Tensor | None = None,
    gelu: bool = False,
) -> torch.Tensor:
    """`x` times a copy of `weight` in the order in which oneDNN reads it, which is kept until the
    weight changes.

    transposed: function that returns what is copied, (outputs, inputs). Ordinary products make such
    a copy each time: the digits are the same, but 16 rows take twice as long and 1,000 a fifth
    longer. gelu is taken before rounding.
    """
    version, prepacked = getattr(weight, 'prepacked', (None, None))
    if version != weight._version:  # PyTorch's count of changes
        assert _prepack is not None
        prepacked = _prepack(transposed())
        weight.prepacked = weight._version, prepacked  # pyright: ignore[reportAttributeAccessIssue]
    return torch.ops.mkldnn._linear_pointwise(
        x, prepacked, bias, *(('gelu', [], 'tanh') if gelu else ('none', [], ''))
    )


def _operator_to_lay_out() -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The operator that PyTorch's own compiler lays weights out by, or None where there is no such
    thing for bf16."""
    try:
        supported, _ = (
            torch.ops.mkldnn._is_mkldnn_bf16_supported(),
            torch.ops.mkldnn._linear_pointwise,
        )
        return torch.ops.mkldnn._reorder_linear_weight if supported else None
    except AttributeError:  # they are private, and may go
        return None


def prefer_onednn() -> None:
    """Leave float32 products on a CPU to oneDNN where that costs no precision; twice as fast as MKL
    on AMD's.

    What asks for oneDNN also allows it to round to bfloat16. It does so on processors with matrix
    units for it (AMX) only; one product tells.
    """
    _mkldnn.matmul.fp32_precision = 'bf16'
    if _error_of_a_product() > LARGEST_ERROR:
        _mkldnn.matmul.fp32_precision = 'none'


@contextlib.contextmanager
def onednn_preferred() -> Iterator[None]:
    """Within the block, as `prefer_onednn` sets it."""
    before = _mkldnn.matmul.fp32_precision
    prefer_onednn()
    try:
        yield
    finally:
        _mkldnn.matmul.fp32_precision = before


def keep_freed_memory() -> None:
    """Have memory that is freed stay with this process, up to 2 GB of it, where the C library is
    glibc.

    By default the pages of every large tensor come from the system and go back to it: a sixth of
    the processor's time in bf16, and time that threads do not share.
    """
    mallopt = getattr(ctypes.CDLL(None), 'mallopt', None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def _error_of_a_product() -> float:
    a, b = torch.randn(2, 512, 512, generator=torch.Generator().manual_seed(0))
    exact = a.double() @ b.double()
    return ((a @ b - exact).norm() / exact.norm()).item()
