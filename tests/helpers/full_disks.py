"""Disks that are full, as far as a test can make them."""

import contextlib
import resource


@contextlib.contextmanager
def largest_file(size):
    """The system refuses files beyond `size` bytes, as a full disk would."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
