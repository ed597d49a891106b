"""Sampling from an autoregressive model; knows nothing of the encoding."""

import copy
from collections.abc import Callable
from typing import Self

import numpy as np
import torch

from lm_human_preferences.language.decoding import Decoding
from lm_human_preferences.machine.graphs import Graph
from lm_human_preferences.utils.core import MIN_TEMPERATURE, ceil_div, sample_from_cdf

LEAVING = 0.2  # ended rows leave when they are this share of all, as the cache is then copied
# Tokens from one look at what has ended to the next: a look has to wait for a GPU.
LOOK_EVERY = {'cpu': 1, 'cuda': 8}


class Sampling:
    """Tables (length, batch) of what is drawn, and the `kept` columns, whose rows still go on.

    outputs: see sample_sequence.
    """

    def __init__(
        self,
        rows: Decoding,
        outputs: Callable[[torch.Tensor], dict[str, torch.Tensor]],
        length: int,
        temperature: float,
    ) -> None:
        self.rows, self.outputs = rows, outputs
        self.temperature = temperature
        self.graph: Graph | None = None  # of a step
        first = outputs(rows.h)
        shape = length, len(rows.h)
        logits = first['logits']
        self.number = torch.zeros(1, dtype=torch.int64, device=logits.device)  # for the graph
        self.tables = {
            'tokens': logits.new_zeros(shape, dtype=torch.int64),
            'probs': logits.new_zeros(shape, dtype=torch.float64),
        }
        for name in first.keys() - {'logits'}:
            self.tables[name] = first[name].new_zeros(shape)
        self.uniform = torch.rand(shape, dtype=torch.float64, device=logits.device)
        self.kept: slice | torch.Tensor = slice(None)
        if length > 0:
            self._draw(first, 0)

    def step(self, number: int) -> None:
        """Draw the `number`-th tokens, after those before."""
        if self.graph is None:
            self._step(number)
        else:
            self.number.fill_(number)
            self.graph.replay()

    def _step(self, number: int | torch.Tensor) -> None:
        tokens = self.tables['tokens'][number - 1, self.kept].view(-1)
        self._draw(self.outputs(self.rows.step(tokens, number - 1)), number)

    def _draw(self, outputs: dict[str, torch.Tensor], number: int | torch.Tensor) -> None:
        logits = outputs.pop('logits').float()
        if self.temperature != 1:
            logits = logits / max(self.temperature, MIN_TEMPERATURE)
        probs = logits.softmax(-1)
        # In float64, as float32 has too few numbers for the tail of a large vocabulary.
        cdf = probs.cumsum(-1, dtype=torch.float64)
        tokens = sample_from_cdf(cdf, self.uniform[number, self.kept].view(-1))
        # A softmax errs by 2e-5, the same for all words: its sum in float64 shows by how much.
        chosen = probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) / cdf[..., -1]
        for name, values in {'tokens': tokens, 'probs': chosen, **outputs}.items():
            self.tables[name][number, self.kept] = values

    def select(self, rows: torch.Tensor) -> Self:
        """Return the sampling that goes on with these of the rows that are kept."""
        selected = copy.copy(self)
        selected.graph = None
        selected.kept = rows if isinstance(self.kept, slice) else self.kept[rows]
        selected.rows = self.rows.select(rows)
        return selected

    def capture(self, number: int) -> None:
        """Capture the steps from the `number`-th on; RuntimeError if that fails."""
        self.number = torch.full_like(self.number, number)
        self.graph = Graph(lambda: self._step(self.number))

    def tensors(self) -> list[torch.Tensor]:
        """Return all that a captured step reads and writes."""
        kept = [] if isinstance(self.kept, slice) else [self.kept]
        return [*self.tables.values(), self.uniform, *kept, *self.rows.tensors()]


class CapturedSteps:
    """Graphs of steps, one for each number of rows and columns.

    A graph computes on the tensors of the sampling that it was captured from, which are kept.
    Those of a later sampling are copied there.
    """

    def __init__(self) -> None:
        self._captured: dict[tuple[object, ...], Sampling] = {}
        self._has_failed = False

    def take(self, sampling: Sampling, number: int) -> Sampling:
        """Return a captured sampling that goes on with the `number`-th tokens in place of this."""
        if self._has_failed:
            return sampling
        try:
            return self._captured_one(sampling, number)
        except RuntimeError as e:
            self._has_failed = True
            print(f'note: --run.graphs: sampling cannot be captured ({e!s:.200})')
            return sampling

    def _captured_one(self, sampling: Sampling, number: int) -> Sampling:
        tensors = sampling.tensors()
        key = (sampling.temperature, *(tensor.shape for tensor in tensors))
        captured = self._captured.get(key)
        if captured is None:
            sampling.capture(number)
            self._captured[key] = sampling
            return sampling
        for own, new in zip(captured.tensors(), tensors, strict=True):
            own.copy_(new)
        return captured


@torch.no_grad()
def sample_sequence(
    *,
    rows: Decoding,
    outputs: Callable[[torch.Tensor], dict[str, torch.Tensor]],
    length: int,
    temperature: float = 1.0,
    is_end: Callable[[torch.Tensor, int], torch.Tensor] | None = None,
    padding_token: int = 0,
    captured: CapturedSteps | None = None,
) -> dict[str, torch.Tensor]:
    """Continue `rows` by `length` tokens, or until every row has ended.

    outputs: function of outputs (rows, n_embd) that returns the 'logits' (rows, n_vocab) and others
        (rows,).
    is_end: function of sampled tokens (batch,) and their position that returns where a row ends:
        bool (batch,). Rows that have ended leave the batch, by `rows.select`.
    captured: steps by CUDA graphs. A graph is for one number of rows, so these leave by quarters.
    Returns 'tokens' (batch, length), padded after the end of a row, 'logprobs' at the temperature,
    and each of the other outputs where the token was chosen; 0 after the end.
    """
    sampling = Sampling(rows, outputs, length, temperature)
    if captured is not None and length > 1:
        sampling = captured.take(sampling, 1)
    tokens = sampling.tables['tokens']
    ends = torch.zeros_like(tokens, dtype=torch.bool)
    multiple = 1 if captured is None else ceil_div(tokens.shape[1], 4)
    for number in range(length):
        if number > 0:
            sampling.step(number)
        if is_end is None:
            continue
        ends[number] = is_end(sampling.tables['tokens'][number], number)
        is_last = number + 1 == length
        if is_last or (number + 1) % LOOK_EVERY[tokens.device.type] > 0:
            continue
        ended = ends[:, sampling.kept].any(0).cpu().numpy()
        if ended.all():
            break
        remaining = multiple * ceil_div(int(np.count_nonzero(~ended)), multiple)
        if 1 - remaining / len(ended) >= LEAVING:
            leaving_last = torch.from_numpy(np.argsort(ended, kind='stable'))
            staying = leaving_last[:remaining].to(tokens.device, non_blocking=True)
            sampling = sampling.select(staying)
            if captured is not None:
                sampling = captured.take(sampling, number + 1)
    results = dict(sampling.tables)
    results['logprobs'] = results.pop('probs').log().float()
    after_end = ends.cumsum(0) > ends
    for name, table in results.items():
        filling = padding_token if name == 'tokens' else 0
        results[name] = table.masked_fill(after_end, filling).T.contiguous()
    return results
