"""Where the label files that were published with the paper can be had, should their store fail."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from lm_human_preferences import storage

MIRROR = f'{storage.HUB}datasets/vwxyzjn/lm-human-preferences'
MIRRORED = ('sentiment/offline_5k.json', 'descriptiveness/offline_5k.json')


@contextlib.contextmanager
def named_on_failure(path: str) -> Iterator[None]:
    """Within the block, failing to read the label file `path` is an error that names its mirror."""
    try:
        yield
    except storage.StorageError as e:
        mirror = _mirror_of(path)
        if mirror is None:
            raise
        raise storage.StorageError(
            f'{e}; or give its mirror {mirror} as the source of the labels'
        ) from e


def _mirror_of(path: str) -> str | None:
    """The hf:// path of a published label file that has one."""
    for name in MIRRORED:
        if storage.is_remote(path) and path.endswith(f'/lm-human-preferences/labels/{name}'):
            return f'{MIRROR}/{name}'
    return None
