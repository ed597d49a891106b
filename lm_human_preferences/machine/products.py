"""Choice of the faster CPU library for float32 matrix products at full precision."""

from typing import Any, Literal, get_args

import torch

from lm_human_preferences.machine import processors
from lm_human_preferences.machine.processors import Processor
from lm_human_preferences.utils.core import default_device

Library = Literal['default', 'onednn']
LIBRARIES = get_args(Library)

ROUNDING = {'amx_bf16', 'bf16'}  # processor features with which oneDNN rounds to bf16
# A network no wider than this is fastest on one thread with PyTorch's default library. oneDNN makes
# a kernel for each new number of tokens, so a first run takes 12 % more time and twice the memory.
TINY_WIDTH = 128

_matmul: Any = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]


def choose(n_embd: int) -> Library:
    """Return the library for a network of width `n_embd` on this machine; 'default' on a GPU."""
    if default_device().type != 'cpu' or n_embd <= TINY_WIDTH:
        return 'default'
    # oneDNN was measured to be faster on AMD processors with bf16.
    processor = processors.this_processor()
    is_amd_with_bf16 = processor.vendor == processors.AMD and 'avx512_bf16' in processor.features
    return 'onednn' if is_amd_with_bf16 else 'default'


def prepacked_rows(processor: Processor, library: Library) -> range:
    """Return the numbers of rows for which oneDNN with prepacked weights beats `library`."""
    features = processor.features
    if library == 'onednn':
        return range(1, 65) if 'avx512f' in features else range(0)
    is_faster = processor.vendor == processors.INTEL and 'avx512f' in features
    if processor.vendor == processors.AMD:
        is_faster = 'avx2' in features and 'avx512f' not in features
    return range(2, 33) if is_faster else range(0)


def select(library: Library) -> None:
    """Let `library` multiply float32 matrices on the CPU of this process."""
    # PyTorch uses oneDNN if rounding to bf16 is allowed, which most processors cannot do.
    _matmul.fp32_precision = 'bf16' if library == 'onednn' else 'none'
