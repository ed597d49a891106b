"""How much memory training takes, how much there is, and what to do where that is not enough."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.model_sizes import CACHE_HEADROOM, FLOAT, HALF

if TYPE_CHECKING:
    import torch

    from lm_human_preferences.distributed.comm import Comm
    from lm_human_preferences.hparams.model_sizes import Sizes

DOUBLE = 8  # bytes
# Of a token of an episode: its id, log-probabilities, value, reward, advantage, return and so on.
BYTES_OF_A_TOKEN = 48
OUT_OF_MEMORY = re.compile(
    r"[^:]*out of memory.*|can't allocate memory.*|Unable to allocate.*"
)  # messages of PyTorch on GPUs, PyTorch on CPUs and numpy


@dataclass
class MemoryEstimate:
    """What one rank works on, for an estimate of its memory in bytes; padding counts as tokens do.

    sizes: of the network. networks: how many of that size there are. learning: how many of
    them learn. retrained: how many of the others learn at another time, see plans.Networks. rows,
    tokens: of a backward pass, and sampled_rows, sampled_tokens: of sampling, before micro-batches
    make rows fewer. predicted: tokens of a row whose logits have a gradient.
    option: the name of micro_batch_size. batch_options: the names of the options that set rows and
    sampled_rows. gradient_checkpointing: see language.network.Network. reduced: layers compute in
    bf16. fused: attention keeps no probabilities, as on GPUs.
    """

    sizes: Sizes
    networks: int
    rows: int
    tokens: int
    sampled_rows: int
    sampled_tokens: int
    learning: int = 1
    retrained: int = 0
    predicted: int = 0
    micro_batch_size: int | None = None
    option: str = '--micro_batch_size'
    gradient_checkpointing: bool = False
    reduced: bool = False
    fused: bool = False
    ranks: int = 1
    batch_options: tuple[str, str] = ('--batch_size', '--rollout_batch_size')

    def peak(self) -> float:
        """The most that is held at a time."""
        all_rows = max(self.rows, self.sampled_rows)
        at_once = min(self.micro_batch_size or all_rows, all_rows)
        learning = self.learning_bytes(min(self.rows, at_once))
        sampling = self.sampling_bytes(min(self.sampled_rows, at_once))
        working = max(learning, sampling)
        if at_once < all_rows and not self.fused:
            working *= 2  # on CPUs, micro-batches leave holes between gradients, as much again
        return self.lasting_bytes() + working

    def lasting_bytes(self) -> int:
        """What stays from step to step.

        The networks; of those that learn also gradients, two moments, and buckets that average over
        ranks. The buckets of those that learn at another time stay as well. In bf16 there is a copy
        of the blocks of the one at work and, on CPUs, of the others: see precision.linear.
        """
        network = self.sizes.parameters()
        of_each_that_learns = 4 if self.ranks > 1 else 3
        networks = self.networks + self.learning * of_each_that_learns
        if self.ranks > 1:
            networks += self.retrained
        if not self.reduced:
            return FLOAT * network * networks
        copies = 1
        if self.sizes.copies_all_blocks and not self.fused:
            copies = self.networks
        in_bf16 = HALF * self.sizes.parameters_of_blocks() * copies
        return FLOAT * network * networks + in_bf16

    def block_bytes(self, rows: int, tokens: int) -> int:
        """What a block keeps for the gradient.

        Unless attention is fused, there are also its weights of each head.
        """
        weights = 0 if self.fused else self.sizes.attention_weights * tokens
        number = HALF if self.reduced else FLOAT
        of_a_token = self.sizes.kept_by_block(self.reduced) + weights * number
        return rows * tokens * of_a_token

    def learning_bytes(self, rows: int) -> float:
        """What a backward pass takes.

        What blocks keep and one at work, logits, and the gradients of the embeddings: those of
        tokens and those of logits.
        """
        block = self.block_bytes(rows, self.tokens)
        layers = self.sizes.n_layer
        of_each_block = block
        if self.gradient_checkpointing:
            inputs = FLOAT * rows * self.tokens * self.sizes.n_embd
            of_each_block = inputs + block / layers
        blocks = layers - 1 + self.sizes.kept_by_last_block(self.predicted / self.tokens)
        logits = FLOAT * rows * self.predicted * self.sizes.n_vocab
        embeddings = FLOAT * self.sizes.n_vocab * self.sizes.n_embd
        gradients = 2 if self.predicted > 0 else 1
        return blocks * of_each_block + block + logits + gradients * embeddings

    def sampling_bytes(self, rows: int) -> int:
        """What sampling takes.

        Keys and values, a block at work on the queries, logits of one step and what a token is
        drawn from. In bf16 on CPUs, also a copy of the embeddings.
        """
        tokens = rows * (self.sampled_tokens + CACHE_HEADROOM)
        numbers = 2 * self.sizes.n_layer * tokens * self.sizes.key_value_width
        cache = numbers * (HALF if self.reduced else FLOAT)
        block = self.block_bytes(rows, self.sampled_tokens)
        drawing = rows * self.sizes.n_vocab * (FLOAT + 3 * DOUBLE)
        copy = 0
        if self.reduced and not self.fused:
            copy = FLOAT * self.sizes.n_vocab * self.sizes.n_embd
        return cache + block + drawing + copy


def warning(estimate: MemoryEstimate, free: int) -> str | None:
    """What to tell the user where `free` bytes are too few for a training, else None.

    It names the largest micro-batch that fits, halving it, first without gradient checkpointing.
    """
    needed = estimate.peak()
    if needed <= free:
        return None
    size = min(estimate.micro_batch_size or estimate.rows, estimate.rows)
    smaller: list[MemoryEstimate] = []
    for gradient_checkpointing in sorted({estimate.gradient_checkpointing, True}):
        for halvings in range(size.bit_length()):
            smaller.append(
                replace(
                    estimate,
                    micro_batch_size=size >> halvings,
                    gradient_checkpointing=gradient_checkpointing,
                )
            )
    fitting = [choice for choice in smaller if choice.peak() <= free]
    advice = fitting[0] if fitting else smaller[-1]
    options = f'{advice.option} {advice.micro_batch_size}'
    if advice.gradient_checkpointing and not estimate.gradient_checkpointing:
        options += ' --run.gradient_checkpointing true'
    if not fitting:
        options = f'even {options}'
    return (
        f'WARNING: training takes about {needed / 1e9:.1f} GB of memory for each rank, which'
        f' has {free / 1e9:.1f} GB: {options} takes {advice.peak() / 1e9:.1f} GB, for the same'
        ' gradients'
    )


def check(estimate: MemoryEstimate, comm: Comm, device: torch.device) -> None:
    """Print `warning`'s text for the rank with the least free memory, before any model is loaded.

    UserError if no smaller micro-batch would help.
    """
    free = free_on(device, comm)
    check_rows(estimate, free)
    text = warning(on_ranks(estimate, comm.size, device), free)
    if text is not None and comm.rank == 0:
        print(text)


def on_ranks(estimate: MemoryEstimate, ranks: int, device: torch.device) -> MemoryEstimate:
    """`estimate` of one of so many ranks, on such a device."""
    return replace(estimate, ranks=ranks, fused=device.type == 'cuda')


def check_rows(estimate: MemoryEstimate, free: int) -> None:
    """UserError where the episodes alone take more than `free` bytes: micro-batches do not help."""
    option, sampled_option = estimate.batch_options
    check_fits(option, estimate.rows, estimate.tokens * BYTES_OF_A_TOKEN, free)
    check_fits(
        sampled_option, estimate.sampled_rows, estimate.sampled_tokens * BYTES_OF_A_TOKEN, free
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
    """UserError if `count` things of `each` bytes take more than `free` bytes.

    option: the one whose value `count` is.
    """
    if count * each > free:
        raise UserError(
            f'{option}: what {count} of them hold takes {count * each / 1e9:.0f} GB of memory on'
            f' each rank, which has {free / 1e9:.0f} GB: take at most {free // each}'
        )


@contextlib.contextmanager
def explain_oom(option: str) -> Iterator[None]:
    """Make running out of memory in the block a UserError.

    option: the name of micro_batch_size.
    """
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


def on_host(proc: Path = Path('/proc'), cgroups: Path = Path('/sys/fs/cgroup')) -> int:
    """Bytes that processes here may take: what the system has left.

    Or a control group's limit, if that is lower.
    """
    meminfo = (proc / 'meminfo').read_text(encoding='ascii')
    available = re.search(r'MemAvailable: +(\d+)', meminfo)
    assert available is not None, 'meminfo has no MemAvailable'
    limits = [int(available[1]) << 10]
    for line in (proc / 'self/cgroup').read_text(encoding='utf-8').splitlines():
        _, controller, path = line.split(':', 2)
        group = cgroups / controller / path.strip('/')
        for folder in (group, *group.parents):
            limits += _limits_in(folder)
    return min(limits)


def _limits_in(folder: Path) -> list[int]:
    """The limits of memory in the folder of a control group, of version 2 or 1."""
    limits = []
    for name in ('memory.max', 'memory.limit_in_bytes'):
        file = folder / name
        if file.exists():
            text = file.read_text(encoding='ascii').strip()
            if text != 'max':
                limits.append(int(text))
    return limits
