"""Settings of this process's matrix products: precision, library, memory layout."""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F

from lm_human_preferences.errors import UserError
from lm_human_preferences.machine import hardware
from lm_human_preferences.machine.hardware import Processor, default_device

# Number of logits per row in each call of MKL; one call for all 50,257 takes 1.4 times as long.
_VOCABULARY_PIECE = 1024
# Prepacking a weight of at least this many numbers makes products with 8 rows 1.4 times as fast.
# Small weights gain nothing from prepacking, nor do weights that change after each batch.
_LARGE_WEIGHT = 2**18
_LARGEST_FLASH = 256  # largest size of a head that flash attention accepts
Library = Literal['default', 'onednn']
LIBRARIES = get_args(Library)
ROUNDING = {'amx_bf16', 'bf16'}  # processor features with which oneDNN rounds to bf16
# Networks up to this width are fastest on one thread with PyTorch's default matrix library.
# With oneDNN, tiny networks take more time and memory, as each token count needs its own kernel.
TINY_WIDTH = 128
_matmul: Any = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(frozen=True)
class Kernels:
    """Settings of this process's matrix products; the defaults are PyTorch's."""

    library: Library = 'default'
    reduced: torch.dtype | None = None  # dtype of layers' products; None: the weights' dtype
    prepack: Callable[[torch.Tensor], torch.Tensor] | None = None  # operator that prepacks weights
    # input row counts for which frozen weights are prepacked; None: always prepack all weights
    prepacked_rows: range | None = None
    fuses_attention: bool = True
    flash_attention: bool = False  # whether a GPU's bf16 attention skips padding tokens
    deterministic: bool = False  # whether a GPU computes bitwise reproducible gradients
    vocabulary_piece: int | None = None  # number of logits per row computed at once; None: all


_kernels = Kernels()


def configure_for(
    n_embd: int, precision: str, library: Library | None = None, *, deterministic: bool = True
) -> None:
    """Configure this process for a network of width `n_embd`. Default `library`: the fastest."""
    hardware.limit_alone()
    # Operations of a tiny network take microseconds, less than synchronising threads.
    if n_embd <= TINY_WIDTH and not hardware.threads_are_set():
        torch.set_num_threads(1)
    library = library or fastest_library(n_embd)
    configure(precision, default_device(), library, deterministic=deterministic)


def configure(
    precision: str, device: torch.device, library: Library, *, deterministic: bool = True
) -> Kernels:
    """Configure this process to compute in `precision` (fp32, tf32 or bf16) on `device`.

    Weights, the residual stream, logits, losses and statistics stay float32 in any case.
    deterministic: whether a GPU repeats gradients. UserError if `device` lacks `precision`.
    """
    global _kernels
    check_available(precision, device)
    reduced = torch.bfloat16 if precision == 'bf16' else None
    if device.type == 'cuda':
        torch.backends.cuda.matmul.allow_tf32 = precision != 'fp32'
        # PyTorch prefers cuDNN's attention in bf16 on Hopper, but cuDNN plans for each new length.
        # On an H100, cuDNN's planning takes 0.04 to 2.7 s for each sampled token.
        # Gradients of cuDNN's attention are NaN at some lengths (issue 196678 of PyTorch).
        torch.backends.cuda.enable_cudnn_sdp(False)
        # Deterministic algorithms need CUBLAS_WORKSPACE_CONFIG.
        os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')
        algorithms: Any = torch.utils.deterministic
        algorithms.fill_uninitialized_memory = False  # filling new memory is slow and unnecessary
        is_recent = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
        _kernels = Kernels(
            reduced=reduced,
            flash_attention=reduced is not None and is_recent,
            deterministic=deterministic,
        )
        return _kernels
    hardware.keep_freed_memory()
    processor = hardware.this_processor()
    if not ROUNDING.isdisjoint(processor.features):
        library = 'default'
    select_library(library)
    few_rows = prepacked_rows(processor, library)
    _kernels = Kernels(
        library=library,
        reduced=reduced,
        prepack=_prepack_operator(reduced or torch.float32) if reduced or few_rows else None,
        prepacked_rows=None if reduced else few_rows,
        fuses_attention=library == 'default' and reduced is None,
        vocabulary_piece=_VOCABULARY_PIECE if library == 'default' else None,
    )
    return _kernels


@contextlib.contextmanager
def plain() -> Iterator[None]:
    """Compute in float32 with PyTorch's default settings within the block."""
    global _kernels
    before, allowed_tf32 = _kernels, torch.backends.cuda.matmul.allow_tf32
    _kernels = Kernels()
    torch.backends.cuda.matmul.allow_tf32 = False
    select_library(_kernels.library)
    try:
        yield
    finally:
        _kernels = before
        torch.backends.cuda.matmul.allow_tf32 = allowed_tf32
        select_library(before.library)


@contextlib.contextmanager
def repeatable_gradients() -> Iterator[None]:
    """Within the block, make a GPU's gradients repeatable to the bit if `configure` asked for that.

    By default, the kernel of memory-efficient attention adds in any order. UserError if the model
    has an operator without a deterministic version.
    """
    if not _kernels.deterministic:
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as e:
        if 'deterministic' not in str(e):
            raise
        raise UserError(
            f'the gradients of this model are not bitwise reproducible ({e!s:.200}): set'
            ' --run.deterministic off'
        ) from e
    finally:
        torch.use_deterministic_algorithms(False)


def check_available(precision: str, device: torch.device) -> None:
    """Raise UserError if `device` cannot compute in `precision`."""
    if precision == 'tf32' and device.type != 'cuda':
        raise UserError('precision tf32 needs a GPU: without a GPU, use fp32 or bf16')


def autocast(device: torch.device) -> torch.autocast:
    """Return a context in which layers compute in the configured precision; it may be nested."""
    return torch.autocast(device.type, _kernels.reduced, enabled=_kernels.reduced is not None)


def autocast_dtype(default: torch.dtype) -> torch.dtype:
    """Return the dtype in which layers compute: the configured one, or else `default`."""
    return _kernels.reduced or default


def fuses_attention() -> bool:
    """Return whether to use scaled_dot_product_attention, not two slower matrix products."""
    return _kernels.fuses_attention


def attends_without_padding(q: torch.Tensor) -> bool:
    """Return whether attention queries `q (..., d)` can use flash attention without padding."""
    d = q.shape[-1]
    return _kernels.flash_attention and d % 8 == 0 and d <= _LARGEST_FLASH


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, gelu: bool = False
) -> torch.Tensor:
    """Return `x (n, inputs)` @ `weight (inputs, outputs)` + `bias (outputs,)`. gelu: apply GELU."""
    if not _takes_prepacked(x, weight):
        outputs = torch.addmm(bias, x, weight)
        return F.gelu(outputs, approximate='tanh') if gelu else outputs
    dtype = autocast_dtype(x.dtype)
    return _times_prepacked(x.to(dtype), weight, lambda: weight.to(dtype).T, bias.to(dtype), gelu)


def linear_transposed(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return `x @ weight.T + bias` for `weight (outputs, inputs)`, as nn.Linear stores it."""
    computes_in_fp32 = not torch.is_autocast_enabled(x.device.type)
    if not _takes_prepacked(x, weight) or (_kernels.reduced and computes_in_fp32):
        return F.linear(x, weight, bias)
    dtype = autocast_dtype(x.dtype)
    bias = None if bias is None else bias.to(dtype)
    return _times_prepacked(x.to(dtype), weight, lambda: weight.to(dtype), bias)


def logits(h: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return `h (..., n_embd)` times `table (n_vocab, n_embd)` transposed, in their own dtype."""
    if not _takes_prepacked(h, table):
        with torch.autocast(h.device.type, enabled=False):
            return times_vocabulary(h, table)
    return _times_prepacked(h, table, lambda: table)


def times_vocabulary(h: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return `h` times `table` transposed, as `logits` does, but without a copy of `table`."""
    words = _kernels.vocabulary_piece
    rows = h.flatten(0, -2)
    if words is None or torch.is_grad_enabled() or len(rows) == 1:
        return F.linear(h, table)
    outputs = rows.new_empty(len(rows), len(table))
    for piece, part in zip(outputs.split(words, dim=1), table.split(words), strict=True):
        torch.mm(rows, part.T, out=piece)
    return outputs.view(*h.shape[:-1], len(table))


def invalidate_prepacked(weights: Iterable[torch.Tensor]) -> None:
    """Free prepacked copies of `weights`: PyTorch's version counter misses fused Adam's changes."""
    for weight in weights:
        weight.prepacked = None, None  # pyright: ignore[reportAttributeAccessIssue]


def _takes_prepacked(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether to multiply `x (..., inputs)` by a prepacked copy of `weight`."""
    if _kernels.prepack is None or torch.is_grad_enabled():
        return False
    if _kernels.prepacked_rows is None:
        return True
    rows = x.numel() // x.shape[-1]
    is_few = rows in _kernels.prepacked_rows
    return is_few and not weight.requires_grad and weight.numel() >= _LARGE_WEIGHT


# --- Private names of PyTorch follow; tests/unit/test_fast_paths.py fails if one is missing. ---


def _prepack_operator(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return PyTorch's private operator that prepacks weights of `dtype`, or None if missing."""
    operators: Any = torch.ops.mkldnn
    try:
        needed = operators._reorder_linear_weight, operators._linear_pointwise
        is_supported = dtype == torch.float32 or operators._is_mkldnn_bf16_supported()
    except AttributeError:  # A later PyTorch may lack private operators.
        return None
    return needed[0] if is_supported else None


def _times_prepacked(
    x: torch.Tensor,
    weight: torch.Tensor,
    transposed: Callable[[], torch.Tensor],  # returns weight (outputs, inputs), in the type of `x`
    bias: torch.Tensor | None = None,
    gelu: bool = False,
) -> torch.Tensor:
    """Return `x` times a prepacked copy of `weight`; the copy is renewed when `weight` changes."""
    source = weight._version, x.dtype  # _version counts a tensor's in-place changes.
    copied: Any = getattr(weight, 'prepacked', (None, None))
    source_then, prepacked = copied
    if source_then != source:
        assert _kernels.prepack is not None
        prepacked = _kernels.prepack(transposed())
        weight.prepacked = source, prepacked  # pyright: ignore[reportAttributeAccessIssue]
    activation = ('gelu', [], 'tanh') if gelu else ('none', [], '')
    return torch.ops.mkldnn._linear_pointwise(x, prepacked, bias, *activation)


def fastest_library(n_embd: int) -> Library:
    """Return the library that computes a network of width `n_embd` fastest; 'default' on a GPU."""
    if default_device().type != 'cpu' or n_embd <= TINY_WIDTH:
        return 'default'
    # In measurements, oneDNN is faster on AMD processors that support bf16.
    processor = hardware.this_processor()
    is_amd_with_bf16 = processor.vendor == hardware.AMD and 'avx512_bf16' in processor.features
    return 'onednn' if is_amd_with_bf16 else 'default'


def prepacked_rows(processor: Processor, library: Library) -> range:
    """Return the row counts for which oneDNN with prepacked weights is faster than `library`."""
    features = processor.features
    if library == 'onednn':
        return range(1, 65) if 'avx512f' in features else range(0)
    is_faster = processor.vendor == hardware.INTEL and 'avx512f' in features
    if processor.vendor == hardware.AMD:
        is_faster = 'avx2' in features and 'avx512f' not in features
    return range(2, 33) if is_faster else range(0)


def select_library(library: Library) -> None:
    """Choose the library that multiplies float32 matrices of this process on the CPU."""
    # 'bf16' selects oneDNN, which rounds to bf16 only on processors with a feature in ROUNDING.
    _matmul.fp32_precision = 'bf16' if library == 'onednn' else 'none'
