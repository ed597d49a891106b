"""Recordings of the original program: their place, and functions that read them.

The set at hand is one directory: $LMHP_GOLDEN, else ../shared/golden beside the repository, else
the small set in tests/golden. Files of different sets belong to different runs, so they are never
mixed. A test whose file the set lacks is skipped, and the reason names the file.
"""

import functools
import json
import os
from pathlib import Path

import numpy as np
import pytest

TESTS = Path(__file__).resolve().parents[1]
OUTSIDE = TESTS.parent.parent / 'shared'


def _root():
    if 'LMHP_GOLDEN' in os.environ:
        root = Path(os.environ['LMHP_GOLDEN']).resolve()
        assert root.is_dir(), f'LMHP_GOLDEN: no directory {root}'
        return root
    outside = OUTSIDE / 'golden'
    return outside if outside.is_dir() else TESTS / 'golden'


ROOT = _root()


def golden(*parts):
    """Path in the set at hand, whether or not it is there."""
    return ROOT.joinpath(*parts)


def require(*parts):
    """Path in the set at hand; where it is missing, skips the test (or module, at import)."""
    path = golden(*parts)
    if not path.exists():
        pytest.skip(f'{"/".join(parts)} is not in the golden set {ROOT}', allow_module_level=True)
    return path


def found(pattern):
    """Names (relative to the set) that match a glob pattern, sorted; for parametrising tests."""
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))


@functools.lru_cache(maxsize=8)
def _npz(path):
    with np.load(path) as arrays:
        return dict(arrays)


def load_npz(*parts):
    return dict(_npz(require(*parts)))


def npz_keys(*parts):
    """Keys of a .npz file of the set, none where it is missing; for parametrising tests."""
    if not golden(*parts).exists():
        return ()
    with np.load(golden(*parts)) as arrays:
        return tuple(arrays)


def load_json(*parts):
    return json.loads(require(*parts).read_text(encoding='utf-8'))


def json_if_there(*parts, default=()):
    """Contents of a JSON file of the set, or `default` if missing; for parametrising tests."""
    if not golden(*parts).exists():
        return default
    return json.loads(golden(*parts).read_text(encoding='utf-8'))


def under(arrays, prefix):
    return {key[len(prefix) :]: array for key, array in arrays.items() if key.startswith(prefix)}


def bpe_directory():
    """Return the folder of GPT-2's encoder.json and vocab.bpe, or None; no golden set has them."""
    given = os.environ.get('LMHP_GPT2_ENCODINGS')
    folder = Path(given) if given else OUTSIDE / 'gpt-2' / 'encodings' / 'main'
    is_there = (folder / 'encoder.json').exists() and (folder / 'vocab.bpe').exists()
    return folder if is_there else None


def require_bpe():
    folder = bpe_directory()
    if folder is None:
        pytest.skip('encoder.json and vocab.bpe of GPT-2 are not at hand (set LMHP_GPT2_ENCODINGS)')
    return folder
