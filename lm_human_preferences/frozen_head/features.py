"""Features of a response: hidden states of the initial model, pooled over its tokens."""

import torch

# Fractions of the depth where hidden states are read: chosen on a real model, see docs/real-run.md
MIDDLE, LATE = 0.6, 0.9


def blocks_of(n_layer: int) -> tuple[int, int]:
    """Return the two blocks, counted from 0, whose inputs are pooled."""
    last = n_layer - 1
    return min(round(MIDDLE * n_layer), last), min(round(LATE * n_layer), last)


def n_features(n_embd: int) -> int:
    """Return the number of features of a response, see pooled."""
    return 3 * n_embd


def pooled(states: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Return features (batch, 3 * n_embd): middle block's mean and last state, late block's mean.

    states: (2, batch, length, n_embd), from which each token is predicted. real: bool (batch,
    length), False at padding. For an empty response, the state at the end of the query is read.
    """
    real = real.clone()
    real[:, 0] = True
    count = real.sum(1)
    fractions = real / count.unsqueeze(1)
    middle, late = torch.einsum('kbte,bt->kbe', states.float(), fractions)
    rows = torch.arange(len(count), device=count.device)
    last = states[0, rows, count - 1].float()
    return torch.cat([middle, last, late], dim=1)
