"""Random letters: the queries of the experiment `test`, as in the original's tests."""

import random
from collections.abc import Iterator

LETTERS = 'abcdefghijklmnopqrstuvwxyz.'
TEXT_LENGTH = 40  # letters


def generator(mode: str, seed: int = 0, shuffle: bool = False) -> Iterator[str]:
    """Yield random texts without end, the same for the same seed and split."""
    rng = random.Random(f'{mode} {seed}')
    while True:
        yield ''.join(rng.choices(LETTERS, k=TEXT_LENGTH))
