"""Checksum of TensorFlow's checkpoints and TensorBoard's files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from google_crc32c import value as crc32c

if TYPE_CHECKING:
    import numpy as np


def masked_crc(data: bytes | bytearray | memoryview | np.ndarray) -> int:
    """Return the CRC32C of a bytes-like object as TensorFlow stores it (lib/hash/crc32c.h)."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
