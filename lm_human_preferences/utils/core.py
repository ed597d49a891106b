"""Functions on numbers and tensors (the original's utils/core.py)."""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self, TypeVar

import numpy as np
import torch
import torch.nn.functional as F

# If np.random were loaded only at its first use, during a run, a Ctrl-C might be lost then.
from numpy import random as numpy_random

# In the original, ceil_div and exact_div are in this module.
from lm_human_preferences.utils.option_checks import ceil_div as ceil_div
from lm_human_preferences.utils.option_checks import exact_div as exact_div
from lm_human_preferences.utils.original_names import explain_missing

MIN_TEMPERATURE = 1e-10  # lowest temperature in the original, used instead of 0 for greedy sampling
LARGE_VOCABULARY = 4096  # size of a vocabulary above which tokens are drawn in two steps
PIECE = 256  # size of ranges of token ids; in a large vocabulary, we draw a range, then an id in it
RANK_SEED_STRIDE = 100003  # difference between the seeds of neighbouring ranks, as in the original


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread within the block, so that sums always have the same order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class Schema:
    """Type and shape of a field of one example, without the batch dimension."""

    dtype: torch.dtype
    shape: tuple


TokenIds = torch.Tensor | np.ndarray


def token_ids(ids: TokenIds) -> torch.Tensor:
    """Return token ids (a tensor, or an array as in the original) as int64 in host memory."""
    return torch.as_tensor(ids, dtype=torch.int64, device='cpu')


def set_seed(seed: int | None, rank: int = 0) -> None:
    """Seed numpy and torch for this rank as set_mpi_seed did originally; None seeds at random."""
    if seed is not None:
        seed += rank * RANK_SEED_STRIDE
    numpy_random.seed(seed and seed % 2**32)  # numpy accepts seeds of at most 32 bits
    if seed is None:
        torch.seed()
    else:
        torch.manual_seed(seed)


set_mpi_seed = set_seed  # name of set_seed in the original


@contextlib.contextmanager
def random_stream(*key: object) -> Iterator[None]:
    """Within the block, draw random numbers from a stream whose seed is the tuple `key`."""
    seed = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:4], 'big')
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    before = numpy_random.get_state()
    with torch.random.fork_rng(devices=devices):
        set_seed(seed)
        try:
            yield
        finally:
            numpy_random.set_state(before)


def whiten(
    values: torch.Tensor, shift_mean: bool = True, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `values` scaled to variance 1, and to mean 0 if `shift_mean`; 0 outside `mask`."""
    var, mean = torch.var_mean(those_in(values, mask), correction=0)
    whitened = (values - mean) * torch.rsqrt(var + 1e-8)
    if not shift_mean:
        whitened = whitened + mean
    if mask is None:
        return whitened
    return whitened.masked_fill(~mask.to(values.device, non_blocking=True), 0)


def those_in(values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the elements (n,) of `values` where `mask` is true; all of `values` if `mask` is None.

    With a mask in host memory, the host does not wait for the GPU.
    """
    if mask is None:
        return values
    indices = torch.from_numpy(np.flatnonzero(mask.cpu().numpy()))
    return values.flatten().index_select(0, indices.to(values.device, non_blocking=True))


def sample_from_cdf(cdf: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw tokens from an unnormalised `cdf (..., n_vocab)`, one per number in `uniform (...)`."""
    drawn = torch.searchsorted(cdf, uniform.unsqueeze(-1) * cdf[..., -1:], right=True)
    return drawn.clamp_(max=cdf.shape[-1] - 1).squeeze(-1)


def sample_from_probs(
    probs: torch.Tensor, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw tokens from unnormalised `probs (rows, n_vocab)`, with random float64 `uniform (rows,)`.

    Return tokens, int64 (rows,), and the row sums of `probs`, float64 (rows,). From a large
    vocabulary, a piece is drawn first and then a token in it, so only a piece becomes float64.
    """
    # Sum in float64: float32 is too coarse for the rare tokens of a large vocabulary.
    n_vocab = probs.shape[1]
    if n_vocab <= LARGE_VOCABULARY:
        cdf = probs.cumsum(1, dtype=torch.float64)
        return sample_from_cdf(cdf, uniform), cdf[:, -1]
    whole = n_vocab - n_vocab % PIECE
    sums = probs[:, :whole].unflatten(1, (-1, PIECE)).sum(-1)
    rest = probs[:, whole:].sum(-1, keepdim=True)
    ends = torch.cat([sums, rest], dim=1).cumsum(1, dtype=torch.float64)
    piece = sample_from_cdf(ends, uniform).unsqueeze(1)
    columns = PIECE * piece + torch.arange(PIECE, device=probs.device)
    words = probs.gather(1, columns.clamp(max=n_vocab - 1)).masked_fill_(columns >= n_vocab, 0)
    total = ends[:, -1]
    start = F.pad(ends, (1, 0)).gather(1, piece).squeeze(1)
    end = ends.gather(1, piece).squeeze(1)
    within = (uniform * total - start) / (end - start)
    word = sample_from_cdf(words.cumsum(1, dtype=torch.float64), within)
    return (PIECE * piece.squeeze(1) + word).clamp_(max=n_vocab - 1), total


def index_each(a: torch.Tensor, ix: torch.Tensor) -> torch.Tensor:
    """Return a[i, ix[i]] for each row i of `a (batch, n, ...)`; `ix (batch, ...)` has indices."""
    rows = torch.arange(a.shape[0], device=a.device).reshape(-1, *[1] * (ix.ndim - 1))
    return a[rows, ix]


def pearson_r(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return Pearson's correlation of two vectors; NaN if one of them is constant."""
    (x_var, x_mean), (y_var, y_mean) = (
        torch.var_mean(x, correction=0),
        torch.var_mean(y, correction=0),
    )
    return ((x - x_mean) * (y - y_mean)).mean() / torch.sqrt(x_var * y_var)


def as_numbers(scalars: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return scalar tensors as {name: number}, sorted by name; waits only once for the device."""
    names = sorted(scalars)
    values = torch.stack([scalars[name] for name in names]).tolist()
    return dict(zip(names, values, strict=True))


def mean_and_std(values: np.ndarray | torch.Tensor) -> tuple[float, float]:
    """Return (mean, standard deviation), computed precisely: in float64 and two passes."""
    values = np.asarray(values, np.float64)
    return float(values.mean()), float(values.std())


def digest_of(parameters: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of names, shapes and values of float32 `parameters` on the CPU."""
    digest = hashlib.sha256()
    for name, parameter in sorted(parameters.items()):
        digest.update(f'{name} {tuple(parameter.shape)}\n'.encode())
        values: Any = parameter.detach().contiguous().numpy()
        digest.update(values)
    return digest.hexdigest()


@dataclass
class TensorBatch:
    """Base class of dataclasses whose fields, tensors or None, are indexed and split together."""

    def __len__(self) -> int:
        first = fields(self)[0]
        return len(getattr(self, first.name))

    def __getitem__(self, rows: torch.Tensor | slice) -> Self:
        selected = dict.fromkeys(vars(self))
        for name, tensor in vars(self).items():
            if tensor is None:
                continue
            if isinstance(rows, slice):
                selected[name] = tensor[rows]
            else:
                selected[name] = tensor[rows.to(tensor.device, non_blocking=True)]
        return type(self)(**selected)

    def split(self, size: int) -> Sequence[Self]:
        """Return batches of `size` rows each; the last batch has the remaining rows."""
        return [self[start : start + size] for start in range(0, len(self), size)]


Batch = TypeVar('Batch', bound=torch.Tensor | TensorBatch)


def micro_batches(batch: Batch, size: int | None) -> Sequence[Batch]:
    """Return `batch` split into micro-batches of at most `size` rows; None: in one piece."""
    return batch.split(size or len(batch))  # pyright: ignore[reportReturnType]


def concatenate(parts: Sequence[Batch]) -> Batch:
    """Return one batch with the rows of all `parts`, in order."""
    first: Any = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(parts)  # pyright: ignore
    joined = dict.fromkeys(vars(first))
    for name, tensor in vars(first).items():
        if tensor is not None:
            joined[name] = torch.cat([getattr(part, name) for part in parts])
    return type(first)(**joined)


def map_micro_batches(
    function: Callable[..., Batch], size: int | None, *batches: torch.Tensor
) -> Batch:
    """Return `function(*batches)`, computed in micro-batches of `size` rows (None: of all rows)."""
    parts = zip(*(micro_batches(batch, size) for batch in batches), strict=True)
    return concatenate([function(*part) for part in parts])


explain_missing(__name__)
