"""Choice of the CPU library for float32 matrix products: the faster one at full precision."""

import functools
import time
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch

from lm_human_preferences.machine import processors
from lm_human_preferences.machine.processors import Processor
from lm_human_preferences.utils.core import default_device

Library = Literal['default', 'onednn']
LIBRARIES = get_args(Library)

LARGEST_ERROR = 1e-6  # of a float32 product, relative
# A network no wider than this is fastest on one thread, by PyTorch's own products: with oneDNN its
# first run takes 12 % more time, and twice the memory, for a kernel is made for each new number of
# tokens.
TINY_WIDTH = 128

# Measured shapes: (rows, inputs, outputs) of the largest layer of GPT-2 124M, in training and in
# sampling; for bf16 without instructions, where a product may take 80 times as long, a small one.
Shape = tuple[int, int, int]
SHAPES: tuple[Shape, ...] = ((256, 768, 3072), (16, 768, 3072))
EMULATED_SHAPES: tuple[Shape, ...] = ((16, 768, 768),)
ROUNDS = 5

_matmul: Any = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]


class Rates(NamedTuple):
    """GFLOP/s of matrix products in float32, by each library, and in bf16; oneDNN's error."""

    default: float
    onednn: float
    bf16: float
    error: float

    @property
    def onednn_rounds(self) -> bool:
        return self.error > LARGEST_ERROR

    def of(self, library: Library) -> float:
        return self.onednn if library == 'onednn' else self.default


def choose(n_embd: int) -> Library:
    """Return the library for a network of this width on this machine; GPUs need none."""
    if default_device().type != 'cpu' or n_embd <= TINY_WIDTH:
        return 'default'
    return faster_library(processors.this_processor())


def faster_library(processor: Processor) -> Library:
    """Return the library for wide networks on `processor`: oneDNN where that was measured."""
    return 'onednn' if _is_amd_with_bf16(processor) else 'default'


def _is_amd_with_bf16(processor: Processor) -> bool:
    return processor.vendor == processors.AMD and 'avx512_bf16' in processor.features


def prepacked_rows(processor: Processor, library: Library) -> range:
    """Return the numbers of rows for which oneDNN with prepacked weights beats `library`."""
    features = processor.features
    if library == 'onednn':
        return range(1, 65) if 'avx512f' in features else range(0)
    is_faster = processor.vendor == processors.INTEL and 'avx512f' in features
    if processor.vendor == processors.AMD:
        is_faster = 'avx2' in features and 'avx512f' not in features
    return range(2, 33) if is_faster else range(0)


@functools.cache
def measure() -> Rates:
    """Return the rates, measured in about 0.2 s: both libraries in turn, then bf16. Cached."""
    has_bf16 = processors.this_processor().has_bf16
    before = _matmul.fp32_precision
    seconds: dict[Library, list[list[float]]] = {'default': [], 'onednn': []}
    try:
        for _ in range(ROUNDS):
            for library, rounds in seconds.items():
                select(library)
                rounds.append(_seconds_of_products(SHAPES, torch.float32))
        error = error_of_a_product()  # of oneDNN, which was measured last
    finally:
        _matmul.fp32_precision = before
    shapes = SHAPES if has_bf16 else EMULATED_SHAPES
    in_bf16 = [_seconds_of_products(shapes, torch.bfloat16) for _ in range(ROUNDS)]
    return Rates(
        default=_rate(SHAPES, seconds['default']),
        onednn=_rate(SHAPES, seconds['onednn']),
        bf16=_rate(shapes, in_bf16),
        error=error,
    )


def _seconds_of_products(shapes: Sequence[Shape], dtype: torch.dtype) -> list[float]:
    seconds = []
    for rows, inputs, outputs in shapes:
        # Not random: drawing numbers here would change those that the training draws.
        a = torch.ones(rows, inputs, dtype=dtype)
        b = torch.ones(inputs, outputs, dtype=dtype)
        started = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - started)
    return seconds


def _rate(shapes: Sequence[Shape], rounds: list[list[float]]) -> float:
    """Return GFLOP/s over all `shapes`, each by the fastest of `rounds`."""
    work = sum(2 * rows * inputs * outputs for rows, inputs, outputs in shapes)
    return work / sum(map(min, *rounds)) / 1e9


def select(library: Library) -> None:
    """Let `library` multiply float32 matrices on the CPU of this process."""
    # PyTorch uses oneDNN if rounding to bf16 is allowed; oneDNN rounds only on CPUs with AMX.
    _matmul.fp32_precision = 'bf16' if library == 'onednn' else 'none'


def error_of_a_product() -> float:
    """Return the relative error of a float32 product by the selected library."""
    a, b = torch.randn(2, 512, 512, generator=torch.Generator().manual_seed(0))
    exact = a.double() @ b.double()
    return ((a @ b - exact).norm() / exact.norm()).item()


def name_of(library: Library) -> str:
    if library == 'onednn':
        return 'oneDNN'
    return 'MKL' if torch.backends.mkl.is_available() else "PyTorch's own products"


def note_on_bf16(precision: str) -> str | None:
    """Return a line for the user where bf16 is slower on this processor, else None."""
    processor = processors.this_processor()
    if precision != 'bf16' or default_device().type != 'cpu':
        return None
    if 'amx_bf16' in processor.features or _is_amd_with_bf16(processor):  # known to be fast
        return None
    found = measure()
    fp32 = found.of(faster_library(processor))
    if found.bf16 >= fp32:
        return None
    fault = 'has no instructions for bf16'
    if processor.has_bf16:
        fault = 'has slow instructions for bf16'
    return (
        f'note: {processor.model} {fault}: matrix products take'
        f' {fp32 / found.bf16:.1f} times as long as in fp32 here ({found.bf16:.3g} GFLOP/s instead'
        f' of {fp32:.3g}): use precision fp32'
    )


def rounds(library: Library) -> bool:
    """Return whether `library` loses digits here, so that `precision.configure` avoids it."""
    return library == 'onednn' and measure().onednn_rounds


def note_on_another(library: Library, own: Library) -> str | None:
    """Return a line for a run on another library than its `own`; None if that costs nothing."""
    if rounds(library):
        return (
            f'note: this run began with {name_of(library)}, which rounds on'
            f' {processors.this_processor()}: {name_of("default")} is used, so last digits differ'
        )
    found = measure()
    if found.of(library) >= found.of(own):
        return None
    return (
        f'note: {processors.this_processor()} multiplies at {found.of(library):.3g} GFLOP/s by'
        f' {name_of(library)}, with which this run began; {name_of(own)} reaches'
        f' {found.of(own):.3g} there'
    )
