"""How many threads of the CPU compute a network."""

import os

import torch

from lm_human_preferences.machine.products import TINY_WIDTH


def limit_for(n_embd: int) -> None:
    """Have torch compute on one thread, for a network of a tiny width; OMP_NUM_THREADS prevails.

    Threads synchronise after every operation, and there each takes microseconds: on a busy machine
    they mostly wait for the last one.
    """
    if n_embd <= TINY_WIDTH and 'OMP_NUM_THREADS' not in os.environ:
        torch.set_num_threads(1)
