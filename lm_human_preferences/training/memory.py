"""Memory of trainings: estimates, what is available, and advice where it is not enough."""

from __future__ import annotations

import contextlib
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lm_human_preferences.errors import UserError
from lm_human_preferences.machine import processors
from lm_human_preferences.training.model_sizes import FLOAT, HALF

if TYPE_CHECKING:
    import torch

    from lm_human_preferences.distributed.comm import Comm
    from lm_human_preferences.training.model_sizes import Sizes

DOUBLE = 8  # bytes
FRAGMENTATION = 1.8  # factor on the memory of a micro-batch; 1.1 to 1.9 were measured
LIBRARIES = 440_000_000  # bytes of Python, PyTorch and transformers at work on a CPU
# Of a token of an episode: its id, log-probabilities, value, reward, advantage, return and so on.
BYTES_OF_A_TOKEN = 48
FILLED = 0.9  # share of a GPU's memory: up to 7 % more than was announced were taken
OUT_OF_MEMORY = re.compile(
    r"[^:]*out of memory.*|can't allocate memory.*|Unable to allocate.*"
)  # messages of PyTorch on GPUs, PyTorch on CPUs and numpy


@dataclass
class MemoryEstimate:
    """Workload of a rank, for an estimate of its memory in bytes; padding counts as tokens."""

    sizes: Sizes
    networks: int  # of these sizes
    rows: int  # of a backward pass, before micro-batches make them fewer
    tokens: int
    sampled_rows: int
    sampled_tokens: int
    learning: int = 1  # networks
    retrained: int = 0  # networks that learn at another time, see networks.Networks
    predicted: int = 0  # tokens of a row whose logits are computed together
    together: int = 1  # rows whose predicted tokens follow the other tokens, which are the same
    micro_batch_size: int | None = None
    option: str = '--micro_batch_size'
    gradient_checkpointing: bool = False
    reduced: bool = False  # layers compute in bf16
    fused: bool = False  # attention keeps no probabilities, as on GPUs
    lays_out: bool = False  # fp32 products of few rows use prepacked copies of the weights
    ranks: int = 1
    batch_options: tuple[str, str] = ('--batch_size', '--rollout_batch_size')
    snapshot: int = 0  # tensors of a network's size in the host's memory for a checkpoint
    sampling: int = 1  # networks that sample

    def peak(self) -> float:
        """Return the most memory that the process takes at a time."""
        libraries = 0 if self.fused else LIBRARIES
        if not self.learning:
            rows = self.sampled_rows
            working = self.sampling_bytes(rows) + self.logits_bytes(rows)
            return libraries + self.lasting_bytes() + working
        all_rows = max(self.rows, self.sampled_rows)
        at_once = min(self.micro_batch_size or all_rows, all_rows)
        learning = self.learning_bytes(min(self.rows, at_once))
        sampling = self.sampling_bytes(min(self.sampled_rows, at_once))
        gradients = FLOAT * self.sizes.own_parameters()
        if self.fused:
            learning += gradients
        elif at_once < all_rows:
            # On CPUs, micro-batches fragment the heap.
            learning = gradients + FRAGMENTATION * learning
            sampling = FRAGMENTATION * sampling
        else:  # parameter gradients are allocated while activations are freed
            learning = max(gradients, learning)
        return libraries + self.lasting_bytes() + max(learning, sampling)

    def lasting_bytes(self) -> int:
        """Return the bytes that stay from step to step: networks, moments, buckets and copies."""
        network = self.sizes.own_parameters()
        of_each_that_learns = 3 if self.ranks > 1 else 2  # moments, and buckets over ranks
        networks = self.networks + self.learning * of_each_that_learns
        if self.ranks > 1:
            networks += self.retrained
        if not self.fused:
            networks += self.snapshot
        held = FLOAT * network * networks + self.sizes.shared_bytes(self.reduced)
        if self.reduced:
            copies = 1 if self.fused else self.networks
            if self.sizes.learned:  # the base itself is in bf16; CPUs have a prepacked copy
                copies = int(not self.fused)
            return held + HALF * self.sizes.parameters_of_blocks() * copies
        if self.sizes.learned:
            held += self._laid_out_bytes()
        return held

    def block_bytes(self, rows: int, tokens: int) -> int:
        """Return the activation bytes of a block, with attention weights unless fused."""
        weights = 0 if self.fused else self.sizes.attention_weights * tokens
        number = HALF if self.reduced else FLOAT
        of_a_token = self.sizes.kept_by_block(self.reduced) + weights * number
        return rows * tokens * of_a_token

    def learning_bytes(self, rows: int) -> float:
        """Return the bytes of a backward pass beside the gradients of parameters."""
        tokens = self.tokens + (self.together - 1) * self.predicted  # of rows in one
        block = self.block_bytes(rows, tokens) / self.together
        layers = self.sizes.n_layer
        of_each_block = block
        if self.gradient_checkpointing:
            inputs = FLOAT * rows * tokens / self.together * self.sizes.n_embd
            of_each_block = inputs + block / layers
        read = self.together * self.predicted / tokens
        blocks = layers - 1 + self.sizes.kept_by_last_block(read)
        embeddings = FLOAT * self.sizes.embedding_rows * self.sizes.n_embd
        gradients = 2 if self.predicted > 0 else 1
        if 0 < self.sizes.learned < self.sizes.embedding_rows * self.sizes.n_embd:
            gradients = 0  # fewer numbers learn: the embeddings are frozen
        return blocks * of_each_block + block + self.logits_bytes(rows) + gradients * embeddings

    def logits_bytes(self, rows: int) -> int:
        """Return the bytes of logits of all predicted tokens."""
        return FLOAT * rows * self.predicted * self.sizes.n_vocab

    def _laid_out_bytes(self) -> int:
        """Return the bytes of prepacked fp32 weights, which products of few rows use."""
        if not self.lays_out:
            return 0
        table = self.sizes.embedding_rows * self.sizes.n_embd
        return FLOAT * (self.sizes.parameters_of_blocks() * self.sampling + table)

    def sampling_bytes(self, rows: int) -> int:
        """Return the bytes of sampling: cache, a block at work, logits and copies of weights."""
        numbers = 2 * self.sizes.n_layer * rows * self.sampled_tokens * self.sizes.key_value_width
        cache = numbers * (HALF if self.reduced else FLOAT)
        block = self.block_bytes(rows, self.sampled_tokens)
        drawing = rows * self.sizes.n_vocab * (FLOAT + 3 * DOUBLE)
        copy = 0
        if self.reduced and not self.fused:
            copy = FLOAT * self.sizes.embedding_rows * self.sizes.n_embd
        elif not self.reduced and not self.sizes.learned:
            copy = self._laid_out_bytes()
        return cache + block + drawing + copy


def warning(estimate: MemoryEstimate, free: int) -> str | None:
    """Return a warning with the largest micro-batch that fits in `free` bytes; None if all does."""
    needed = estimate.peak()
    if needed <= free:
        return None
    size = min(estimate.micro_batch_size or estimate.rows, estimate.rows)
    smaller: list[MemoryEstimate] = []
    for recomputes in sorted({estimate.gradient_checkpointing, True}):
        choice = replace(estimate, gradient_checkpointing=recomputes)
        for halvings in range(size.bit_length()):
            smaller.append(replace(choice, micro_batch_size=size >> halvings))
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


def fitting_micro_batch(estimate: MemoryEstimate, free: int, multiple: int) -> int | None:
    """Return a micro-batch, a multiple of `multiple`, that fits on a GPU with `free` bytes.

    None if none is needed, or none fits. estimate: as `estimate_on_ranks` returns it.
    """
    if not estimate.fused or estimate.micro_batch_size or estimate.peak() <= FILLED * free:
        return None
    queries = estimate.rows // multiple
    for halvings in range(1, queries.bit_length()):
        size = multiple * (queries >> halvings)
        if replace(estimate, micro_batch_size=size).peak() <= FILLED * free:
            return size
    return None


def check_training(estimate: MemoryEstimate, free: int, comm: Comm, device: torch.device) -> None:
    """Print a warning if a rank needs more than `free` bytes; UserError if no micro-batch helps."""
    check_rows(estimate, free)
    text = warning(estimate_on_ranks(estimate, comm.size, device), free)
    if text is not None and comm.rank == 0:
        print(text)


def sampling_estimate(
    sizes: Sizes,
    rows: int,
    *,
    query_length: int,
    response_length: int,
    networks: int,
    sampling: int,
    precision: str,
) -> MemoryEstimate:
    """Return the estimate for a command where `sampling` of the networks sample `rows` at once."""
    return MemoryEstimate(
        sizes,
        networks=networks,
        rows=0,
        tokens=0,
        predicted=response_length if networks > 1 else 0,  # others look at the responses
        sampled_rows=rows,
        sampled_tokens=query_length + response_length,
        learning=0,
        reduced=precision == 'bf16',
        sampling=sampling,
    )


def check_sampling(estimate: MemoryEstimate, comm: Comm, device: torch.device) -> None:
    """Print a warning where sampling alone takes more memory than is free, before it begins."""
    needed = estimate_on_ranks(estimate, comm.size, device).peak()
    free = free_bytes_on(device, comm)
    if needed > free and comm.rank == 0:
        print(
            f'WARNING: sampling takes about {needed / 1e9:.1f} GB of memory for each rank, which'
            f' has {free / 1e9:.1f} GB: a smaller --batch_size than {estimate.sampled_rows} takes'
            ' less'
        )


def estimate_on_ranks(estimate: MemoryEstimate, ranks: int, device: torch.device) -> MemoryEstimate:
    """Return `estimate` for one of `ranks` ranks, on a device of the type of `device`."""
    from lm_human_preferences.machine import products  # here, for `doctor`

    is_gpu = device.type == 'cuda'
    library = products.choose(estimate.sizes.n_embd)
    rows = products.prepacked_rows(processors.this_processor(), library)
    return replace(estimate, ranks=ranks, fused=is_gpu, lays_out=bool(rows) and not is_gpu)


def check_rows(estimate: MemoryEstimate, free: int) -> None:
    """Raise UserError if the episodes alone exceed `free` bytes: micro-batches would not help."""
    option, sampled_option = estimate.batch_options
    check_fits(option, estimate.rows, estimate.tokens * BYTES_OF_A_TOKEN, free)
    check_fits(
        sampled_option, estimate.sampled_rows, estimate.sampled_tokens * BYTES_OF_A_TOKEN, free
    )


def free_bytes_on(device: torch.device, comm: Comm) -> int:
    """Return the bytes free on `device` for each rank: the least of all ranks. Collective."""
    if device.type == 'cuda':
        import torch  # here, so that `doctor` imports this module without it

        # A training of the reward model before this one leaves all its memory there.
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
    else:
        # What this process takes counts as free, as estimates count libraries, too.
        free = available_on_host() // comm.local_size + resident_bytes()
    return min(comm.all_gather_object(free))


def resident_bytes() -> int:
    """Return the bytes of memory that this process takes now."""
    pages = int(Path('/proc/self/statm').read_text(encoding='ascii').split()[1])
    return pages * resource.getpagesize()


def check_fits(option: str, count: int, each: int, free: int) -> None:
    """Raise UserError if the `count` things that `option` sets, of `each` bytes, exceed `free`."""
    if count * each > free:
        raise UserError(
            f'{option}: what {count} of them hold takes {count * each / 1e9:.0f} GB of memory on'
            f' each rank, which has {free / 1e9:.0f} GB: use at most {free // each}'
        )


@contextlib.contextmanager
def explain_oom(option: str) -> Iterator[None]:
    """Make running out of memory a UserError; option: the name of micro_batch_size."""
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
    for folder in processors.control_groups('memory', cgroups, proc / 'self/cgroup'):
        for name in ('memory.max', 'memory.limit_in_bytes'):
            with contextlib.suppress(OSError, ValueError):  # such as 'max'
                limits.append(int((folder / name).read_text(encoding='ascii')))
    return min(limits)
