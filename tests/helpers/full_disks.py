"""Disks that are full, as far as a test can make them."""

import contextlib
import resource
import sys


@contextlib.contextmanager
def largest_file(size):
    """The system refuses files beyond `size` bytes, as a full disk would."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python 3.11 keeps a part of the code of a module that is imported meanwhile.
    writes_no_code, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        sys.dont_write_bytecode = writes_no_code
