"""Which library multiplies float32 matrices on this machine: the faster one that loses no digits.

PyTorch's own choice is MKL on x86. oneDNN is up to twice as fast as that on AMD's processors, and
half as fast on Intel's (benchmarks/README.md).
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.machine import processors
from lm_human_preferences.utils.core import default_device

if TYPE_CHECKING:
    from lm_human_preferences.machine.processors import Processor

Library = Literal['default', 'onednn']
LIBRARIES = get_args(Library)

LARGEST_ERROR = 1e-6  # of a float32 product, relative
# oneDNN is taken if it is faster by this factor: less may be chance.
MARGIN = 1.2
# A network no wider than this is fastest on one thread, by PyTorch's own products: with oneDNN its
# first run takes 12 % more time, and twice the memory, for a kernel is made for each new number of
# tokens.
TINY_WIDTH = 128

# What is measured: (rows, inputs, outputs) of the largest layer of GPT-2 124M, in training and in
# sampling; for bf16 without instructions, where a product may take 80 times as long, a small one.
Shape = tuple[int, int, int]
SHAPES: tuple[Shape, ...] = ((256, 768, 3072), (16, 768, 3072))
EMULATED_SHAPES: tuple[Shape, ...] = ((16, 768, 768),)
ROUNDS = 5

_matmul: Any = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(frozen=True)
class Rates:
    """What products reach in this process, in GFLOP/s, and the relative error of oneDNN's.

    default, onednn: in float32, by PyTorch's own choice of a library and by oneDNN.
    """

    default: float
    onednn: float
    bf16: float
    error: float

    @property
    def onednn_rounds(self) -> bool:
        """Whether oneDNN loses digits of float32 products."""
        return self.error > LARGEST_ERROR

    def of(self, library: Library) -> float:
        """The rate of float32 products by `library`."""
        return self.onednn if library == 'onednn' else self.default


def choose(n_embd: int) -> Library:
    """The library for a network of this width on this machine; not asked for where GPUs multiply.

    It is the same each time: what is not known for sure is measured once.
    """
    if default_device().type != 'cpu' or n_embd <= TINY_WIDTH:
        return 'default'
    return faster_library(processors.this_processor(), rates)


def faster_library(processor: Processor, measured: Callable[[], Rates]) -> Library:
    """The library for wide networks on `processor`.

    measured: called where what is known of such processors does not tell. Products are float32 in
    any case: a library that rounds what it multiplies is not taken.
    """
    known = _known_library(processor)
    if known is not None:
        return known
    found = measured()
    if found.onednn_rounds or found.onednn < MARGIN * found.default:
        return 'default'
    return 'onednn'


def _known_library(processor: Processor) -> Library | None:
    features = processor.features
    if 'amx_bf16' in features:
        return 'default'  # the setting that selects oneDNN lets it round to bfloat16 there
    if _ends_at_avx2(features):
        return 'default'  # PyTorch multiplies by oneDNN only where there is AVX-512
    if _is_amd_with_bf16(processor):
        return 'onednn'
    if processor.vendor == processors.INTEL and 'avx512_vnni' in features:
        return None if 'avx512_bf16' in features else 'default'
    return None


def _ends_at_avx2(features: Collection[str]) -> bool:
    return 'avx2' in features and 'avx512f' not in features


def _is_known_as_fast_in_bf16(processor: Processor) -> bool:
    features = processor.features
    return 'amx_bf16' in features or _is_amd_with_bf16(processor)


def _is_amd_with_bf16(processor: Processor) -> bool:
    return processor.vendor == processors.AMD and 'avx512_bf16' in processor.features


def prepacked_rows(processor: Processor, library: Library) -> range:
    """How many rows oneDNN multiplies by prepacked weights faster than `library` by others.

    More rows gain less, and a training would keep copies of networks that never sample. A single
    row is read at the rate of the memory: MKL does so by weights as they are.
    """
    features = processor.features
    if library == 'onednn':
        return range(1, 65) if 'avx512f' in features else range(0)
    is_faster = processor.vendor == processors.INTEL and 'avx512f' in features
    if processor.vendor == processors.AMD:
        is_faster = _ends_at_avx2(features)
    return range(2, 33) if is_faster else range(0)


def rates(*, keep: bool = True) -> Rates:
    """What this process reaches: measured once, and kept in the cache.

    Processes that ask at the same time share one measurement. keep: a dry run, which writes
    nothing, reads what the cache has, and else measures for itself.
    """
    import filelock

    machine = {
        'processor': str(processors.this_processor()),
        'torch': torch.__version__,
        'threads': torch.get_num_threads(),
        'shapes': [*SHAPES, *EMULATED_SHAPES],
    }
    digest = hashlib.sha256(repr(machine).encode()).hexdigest()[:16]
    folder = os.path.join(storage.cache_root(), 'rates')
    path = os.path.join(folder, f'{digest}.json')
    if not keep:
        return _read(path) or measure()
    kept: Rates | None = None
    try:
        storage.make_cache_folder(folder)
        with filelock.FileLock(f'{path}.lock'):  # the kernel frees it when its holder dies
            kept = _read(path)
            if kept is None:
                kept = measure()
                storage.write_json(path, {**machine, **dataclasses.asdict(kept)})
            return kept
    except (UserError, OSError):  # nothing can be kept there, but there may be what others kept
        return kept or _read(path) or measure()


def _read(path: str) -> Rates | None:
    """The rates in a file of the cache; None if it has none, or is damaged."""
    try:
        record = storage.read_json(path)
        names = [field.name for field in dataclasses.fields(Rates)]
        found = Rates(**{name: float(record[name]) for name in names})
        is_possible = all(0 < rate < math.inf for rate in (found.default, found.onednn, found.bf16))
        return found if is_possible else None
    except (storage.StorageError, KeyError, TypeError, ValueError):
        return None


def measure() -> Rates:
    """Multiply for about a fifth of a second, by the two libraries in turn and in bf16."""
    has_bf16 = processors.this_processor().has_bf16
    before = _matmul.fp32_precision
    seconds: dict[Library, list[list[float]]] = {'default': [], 'onednn': []}
    try:
        for _ in range(ROUNDS):
            for library, rounds in seconds.items():
                select(library)
                rounds.append(_seconds_of_products(SHAPES, torch.float32))
        error = error_of_a_product()  # by oneDNN, which was last
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
    """How long a product of each shape took."""
    seconds = []
    for rows, inputs, outputs in shapes:
        # Not of random numbers: those that are drawn are those of the training.
        a = torch.ones(rows, inputs, dtype=dtype)
        b = torch.ones(inputs, outputs, dtype=dtype)
        started = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - started)
    return seconds


def _rate(shapes: Sequence[Shape], rounds: list[list[float]]) -> float:
    """GFLOP/s over all of `shapes`, each in the fastest of `rounds`."""
    work = sum(2 * rows * inputs * outputs for rows, inputs, outputs in shapes)
    return work / sum(map(min, *rounds)) / 1e9


def select(library: Library) -> None:
    """Have `library` multiply float32 matrices on the CPU of this process from now on.

    oneDNN is selected by allowing it to round to bfloat16, which it does only on processors with
    matrix units for that; `error_of_a_product` tells.
    """
    _matmul.fp32_precision = 'bf16' if library == 'onednn' else 'none'


def error_of_a_product() -> float:
    """The relative error of a float32 product by the library that is selected."""
    a, b = torch.randn(2, 512, 512, generator=torch.Generator().manual_seed(0))
    exact = a.double() @ b.double()
    return ((a @ b - exact).norm() / exact.norm()).item()


def name_of(library: Library) -> str:
    """What people call the library."""
    if library == 'onednn':
        return 'oneDNN'
    return 'MKL' if torch.backends.mkl.is_available() else "PyTorch's own products"


def note_on_bf16(precision: str, *, keep: bool = True) -> str | None:
    """A line for a user who has asked for bf16 where the processor is slower with it.

    It has no instructions for it, or such as multiply no faster than those for fp32. keep: see
    `rates`.
    """
    processor = processors.this_processor()
    on_gpu = default_device().type != 'cpu'
    if precision != 'bf16' or on_gpu or _is_known_as_fast_in_bf16(processor):
        return None
    found = rates(keep=keep)
    fp32 = found.of(faster_library(processor, lambda: found))
    if found.bf16 >= fp32:
        return None
    fault = 'has no instructions for bf16'
    if processor.has_bf16:
        fault = 'has slow instructions for bf16'
    return (
        f'note: {processor.model} {fault}: a product takes'
        f' {fp32 / found.bf16:.1f} times as long as in fp32 here ({found.bf16:.3g} GFLOP/s for'
        f' {fp32:.3g}): take the precision fp32'
    )


def rounds(library: Library) -> bool:
    """Whether `library` loses digits here, so that `precision.configure` takes the other one."""
    return library == 'onednn' and rates().onednn_rounds


def note_on_another(library: Library, own: Library) -> str | None:
    """A line for a run that multiplies by `library` where `own` is this machine's choice.

    None where that costs neither digits nor time.
    """
    if rounds(library):
        return (
            f'note: {processors.this_processor()} rounds what {name_of(library)} multiplies, with'
            f' which this run began: {name_of("default")} multiplies there, and last digits differ'
        )
    found = rates()
    if found.of(library) >= found.of(own):
        return None
    return (
        f'note: {processors.this_processor()} multiplies at {found.of(library):.3g} GFLOP/s by'
        f' {name_of(library)}, with which this run began; {name_of(own)} reaches'
        f' {found.of(own):.3g} there'
    )
