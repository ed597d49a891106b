"""Memory of a training: an estimate, the free memory, and advice if there is too little."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lm_human_preferences.errors import UserError
from lm_human_preferences.machine import processors
from lm_human_preferences.training.model_sizes import FLOAT, HALF

if TYPE_CHECKING:
    import torch

    from lm_human_preferences.training.model_sizes import Sizes

FRAGMENTATION = 1.8  # factor for micro-batches, which fragment a CPU's heap; measured: 1.1 to 1.9
UNSURE = 1.25  # factor by which an estimate may be too high; benchmarks/memory.py measures it
OUT_OF_MEMORY = re.compile(
    r"[^:]*out of memory.*|can't allocate memory.*|Unable to allocate.*"
)  # messages of PyTorch on GPUs, PyTorch on CPUs and numpy


@dataclass(frozen=True)
class MemoryEstimate:
    """Estimate of the memory that a rank needs for a step; padding counts as tokens."""

    sizes: Sizes
    networks: int  # number of networks of these sizes
    learning: int  # number of networks that learn
    rows: int  # rows of a backward pass without micro-batches
    tokens: float  # tokens per row
    predicted: int  # tokens per row whose logits are computed at once
    micro_batch_size: int | None
    option: str  # full name of the option micro_batch_size, for messages
    gradient_checkpointing: bool
    reduced: bool  # whether layers compute in bf16

    def peak(self, device: torch.device) -> float:
        """Return the bytes that a step takes, not counting libraries.

        Counted are weights, gradients, Adam's moments, activations for gradients, and logits.
        """
        sizes, is_cpu = self.sizes, device.type == 'cpu'
        own = sizes.own_parameters()
        number = HALF if self.reduced else FLOAT
        of_a_weight = FLOAT + HALF if self.reduced else FLOAT  # with a copy in bf16
        lasting = of_a_weight * own * self.networks + 3 * FLOAT * own * self.learning
        if sizes.learned:  # the base that adapters share; a CPU keeps a prepacked copy of it
            lasting += number * sizes.parameters() * (2 if is_cpu else 1)
        rows = min(self.micro_batch_size or self.rows, self.rows)
        kept = sizes.kept_numbers
        if is_cpu:
            kept += sizes.n_head * self.tokens  # attention weights
        block = number * rows * self.tokens * kept
        blocks = block * (sizes.n_layer if self.learning else 1)
        if self.gradient_checkpointing:
            blocks = FLOAT * rows * self.tokens * sizes.n_embd * sizes.n_layer + block
        step = blocks + FLOAT * rows * self.predicted * sizes.n_vocab
        if is_cpu and self.micro_batch_size:
            step *= FRAGMENTATION
        return lasting + step

    def warning(self, device: torch.device, free: int) -> str | None:
        """Return a warning if `free` bytes are surely too few; None if they may be enough."""
        needed = self.peak(device)
        if needed <= UNSURE * free:
            return None
        return (
            f'WARNING: training takes about {needed / 1e9:.1f} GB of memory for each rank, which'
            f' has {free / 1e9:.1f} GB: a smaller {self.option} and'
            ' --run.gradient_checkpointing true take less, for the same gradients'
        )


def free_bytes(device: torch.device, ranks: int) -> int:
    """Return the free bytes on `device` for each of `ranks` ranks of this host."""
    if device.type == 'cuda':
        import torch  # here, so that `doctor` imports this module without it

        # An earlier training of a reward model leaves its memory in PyTorch's cache.
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]
    return available_on_host() // ranks


@contextlib.contextmanager
def explain_oom(option: str) -> Iterator[None]:
    """Turn out-of-memory errors into a UserError. option: full name of micro_batch_size."""
    try:
        yield
    except (MemoryError, RuntimeError) as e:  # PyTorch raises RuntimeError on CPUs
        message = OUT_OF_MEMORY.search(str(e))
        if message is None:
            raise
        raise UserError(
            f'out of memory ({message[0]:.100}): a smaller {option} and'
            ' --run.gradient_checkpointing true take less, for the same gradients'
        ) from e


def available_on_host(proc: Path = Path('/proc'), cgroups: Path = Path('/sys/fs/cgroup')) -> int:
    """Return the bytes that processes here may take: free memory, or a control group's limit."""
    meminfo = (proc / 'meminfo').read_text(encoding='ascii')
    available = re.search(r'MemAvailable: +(\d+)', meminfo)
    assert available is not None, 'meminfo has no MemAvailable'
    limits = [int(available[1]) << 10]
    for group in processors.control_groups(cgroups, proc / 'self/cgroup'):
        with contextlib.suppress(OSError, ValueError):  # not a number, such as 'max'
            limits.append(int((group / 'memory.max').read_text(encoding='ascii')))
    return min(limits)
