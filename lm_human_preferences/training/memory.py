"""How much memory training takes, how much there is, and what to do where that is not enough."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.model import CACHE_HEADROOM

if TYPE_CHECKING:
    import torch

    from lm_human_preferences.distributed.comm import Comm
    from lm_human_preferences.hparams.model import HParams as Sizes

FLOAT, HALF, DOUBLE = 4, 2, 8  # bytes
BYTES_OF_A_TOKEN = (
    48  # of an episode: its id, log-probabilities, value, reward, advantage, return and the like
)


@dataclass
class MemoryEstimate:
    """What one rank works on, for an estimate of its memory in bytes; padding counts as tokens do.

    sizes: HParams of the network. networks: of that size, one of which is trained. rows, tokens: of
    a backward pass, and sampled_rows, sampled_tokens: of sampling, before micro-batches make rows
    fewer. predicted: tokens of a row whose logits have a gradient. option: the name of
    micro_batch_size. gradient_checkpointing: see language.model.Model. reduced: layers compute in
    bf16. fused: attention keeps no probabilities, as on GPUs.
    """

    sizes: Sizes
    networks: int
    rows: int
    tokens: int
    sampled_rows: int
    sampled_tokens: int
    predicted: int = 0
    micro_batch_size: int | None = None
    option: str = '--micro_batch_size'
    gradient_checkpointing: bool = False
    reduced: bool = False
    fused: bool = False
    ranks: int = 1
    batch_options: tuple[str, str] = (
        '--batch_size',
        '--rollout_batch_size',
    )  # that set rows and sampled_rows

    def peak(self) -> float:
        """The most that is held at a time; on CPUs, micro-batches leave holes between gradients, as
        much again."""
        every = max(self.rows, self.sampled_rows)
        most = min(self.micro_batch_size or every, every)
        working = max(
            self.learning(min(self.rows, most)), self.sampling(min(self.sampled_rows, most))
        )
        return self.lasting() + working * (2 if most < every and not self.fused else 1)

    def lasting(self) -> int:
        """The networks; of the one that is trained also gradient, two moments, and buckets that
        average over ranks.

        In bf16 there is a copy of the blocks of that one and, on CPUs, of the others: see
        precision.linear.
        """
        width, blocks = (
            self.sizes.n_embd,
            self.sizes.n_layer * (12 * self.sizes.n_embd + 13) * self.sizes.n_embd,
        )
        network = blocks + (self.sizes.n_vocab + self.sizes.n_ctx + 2) * width
        copies = self.reduced * (1 if self.fused else self.networks)
        return FLOAT * network * (self.networks + 3 + (self.ranks > 1)) + HALF * blocks * copies

    def inside(self, rows: int, tokens: int) -> int:
        """What a block keeps for the gradient: 16 numbers for each of its input's, 2 of which are
        always floats."""
        width, probabilities = self.sizes.n_embd, 0 if self.fused else self.sizes.n_head * tokens
        each = 2 * FLOAT * width + (14 * width + probabilities) * (HALF if self.reduced else FLOAT)
        return rows * tokens * each

    def learning(self, rows: int) -> float:
        """What blocks keep and one at work, logits, the gradients of their matrix and of tokens,
        which is the same."""
        inside, vocabulary, width = (
            self.inside(rows, self.tokens),
            self.sizes.n_vocab,
            self.sizes.n_embd,
        )
        kept = (
            FLOAT * rows * self.tokens * width + inside / self.sizes.n_layer
            if self.gradient_checkpointing
            else inside
        )
        logits = FLOAT * rows * self.predicted * vocabulary
        return (
            self.sizes.n_layer * kept
            + inside
            + logits
            + FLOAT * vocabulary * width * (1 + (self.predicted > 0))
        )

    def sampling(self, rows: int) -> int:
        """Keys and values, a block at work on the queries, logits of one step and what one is drawn
        from."""
        table = FLOAT * self.sizes.n_vocab * self.sizes.n_embd * (self.reduced and not self.fused)
        cached_tokens = rows * (self.sampled_tokens + CACHE_HEADROOM)
        cache = 2 * self.sizes.n_layer * cached_tokens * self.sizes.n_embd
        return (
            cache * (HALF if self.reduced else FLOAT)
            + self.inside(rows, self.sampled_tokens)
            + rows * self.sizes.n_vocab * (FLOAT + 3 * DOUBLE)
            + table
        )


def warning(training: MemoryEstimate, free: int) -> str | None:
    """What to tell the user where `free` bytes are too few for `training`, else None.

    Micro-batches are halved until they fit, first without checkpointing.
    """
    size, needed = min(training.micro_batch_size or training.rows, training.rows), training.peak()
    ways = [
        replace(training, micro_batch_size=size >> i, gradient_checkpointing=gradient_checkpointing)
        for gradient_checkpointing in sorted({training.gradient_checkpointing, True})
        for i in range(size.bit_length())
    ]
    way = next((way for way in ways if way.peak() <= free), ways[-1])
    again = (
        ' --run.gradient_checkpointing true'
        if way.gradient_checkpointing and not training.gradient_checkpointing
        else ''
    )
    return (
        None
        if needed <= free
        else (
            f'WARNING: training takes about {needed / 1e9:.1f} GB of memory for each rank, which'
            f' has {free / 1e9:.1f} GB: {"even " if way.peak() > free else ""}{way.option}'
            f' {way.micro_batch_size}{again} takes {way.peak() / 1e9:.1f} GB, for the same'
            ' gradients'
        )
    )


def check(training: MemoryEstimate, comm: Comm, device: torch.device) -> None:
    """Print that warning, before anything is loaded, for the rank that has least; UserError where
    nothing would help."""
    free = free_on(device, comm)
    check_rows(training, free)
    told = warning(replace(training, ranks=comm.size, fused=device.type == 'cuda'), free)
    if told and comm.rank == 0:
        print(told)


def check_rows(training: MemoryEstimate, free: int) -> None:
    """UserError where what rows hold alone takes more than `free` bytes, so that micro-batches
    would not help."""
    option, sampled_option = training.batch_options
    check_fits(option, training.rows, training.tokens * BYTES_OF_A_TOKEN, free)
    check_fits(
        sampled_option, training.sampled_rows, training.sampled_tokens * BYTES_OF_A_TOKEN, free
    )


def free_on(device: torch.device, comm: Comm) -> int:
    """Bytes of memory that are free on `device` for each rank, where there are fewest."""
    if device.type == 'cuda':
        import torch  # without which ./launch.py doctor reads this module

        # A training of the reward model before this one leaves all its memory there.
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
    else:
        free = on_host() // comm.local_size
    return min(comm.all_gather_object(free))


def check_fits(option: str, count: int, each: int, free: int) -> None:
    """UserError where `count` things, which `option` asks for, of `each` bytes take more than
    `free` bytes."""
    if count * each > free:
        raise UserError(
            f'{option}: what {count} of them hold takes {count * each / 1e9:.0f} GB of memory on'
            f' each rank, which has {free / 1e9:.0f} GB: take at most {free // each}'
        )


@contextlib.contextmanager
def explain_oom(option: str) -> Iterator[None]:
    """Within the block, that memory has run out is a UserError; option: the name of
    micro_batch_size."""
    try:
        yield
    except (
        MemoryError,
        RuntimeError,
    ) as e:  # the latter is PyTorch's, which has a class for GPUs only
        found = re.search(
            r"[^:]*out of memory.*|can't allocate memory.*|Unable to allocate.*", str(e)
        )
        if found is None:
            raise
        raise UserError(
            f'no memory is left ({found[0]:.100}): less is taken, for the same gradients, by a'
            f' smaller {option} and by --run.gradient_checkpointing true'
        ) from e


def on_host(proc: Path = Path('/proc'), cgroups: Path = Path('/sys/fs/cgroup')) -> int:
    """Bytes that processes here may take: what the system has left, or the limit of a control group
    that is lower."""
    meminfo = (proc / 'meminfo').read_text(encoding='ascii')
    available = re.search(r'MemAvailable: +(\d+)', meminfo)
    assert available is not None, 'meminfo has no MemAvailable'
    found = [int(available[1]) << 10]
    for line in (proc / 'self/cgroup').read_text(encoding='utf-8').splitlines():
        _, kind, path = line.split(':', 2)
        group = cgroups / kind / path.strip('/')
        for file in (
            folder / name
            for folder in (group, *group.parents)
            for name in ('memory.max', 'memory.limit_in_bytes')
        ):  # of versions 2 and 1
            limit = file.read_text(encoding='ascii').strip() if file.exists() else 'max'
            found += [int(limit)] if limit != 'max' else []
    return min(found)
