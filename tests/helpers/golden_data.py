"""Where the recordings of the original program are, and how to read them.

The set at hand is one directory: $LMHP_GOLDEN, else ../shared/golden beside the repository, else
the small set in tests/golden. Files of different sets belong to different runs, so they are never
mixed. A test whose file the set lacks is skipped, and the reason names the file. This holds for
parametrised tests, too, of which no case is left then: conftest.py asks why_no_cases.
"""

import functools
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

TESTS = Path(__file__).resolve().parents[1]
OUTSIDE = TESTS.parent.parent / 'shared'


_missing: dict[str, list[str]] = {}  # by the module that asked for it while it was imported


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
    """Path in the set at hand; skips the running test (or module, at import) where the set lacks
    it."""
    path = golden(*parts)
    if not path.exists():
        pytest.skip(f'{"/".join(parts)} is not in the golden set {ROOT}', allow_module_level=True)
    return path


def _is_there(name):
    """Whether the set has a match for the glob pattern `name`; notes what is missing."""
    there = any(ROOT.glob(name))
    if not there:
        module = sys._getframe(2).f_globals['__name__']
        _missing.setdefault(module, []).append(name)
    return there


def why_no_cases(module):
    """Which files are missing for a parametrised test in the module of that name to have cases."""
    asked = [module] if module in _missing else [m for m in _missing if not m.startswith('test_')]
    names = [name for asker in asked for name in _missing[asker]]
    if not names:
        return None
    return f'{", ".join(dict.fromkeys(names))}: not in the golden set {ROOT}'


def found(pattern):
    """Names (relative to the set) that match a glob pattern, sorted; for parametrising tests."""
    if not _is_there(pattern):
        return []
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))


@functools.lru_cache(maxsize=8)
def _npz(path):
    with np.load(path) as arrays:
        return dict(arrays)


def load_npz(*parts):
    """All arrays of a .npz file of the set: {key: numpy array}."""
    return dict(_npz(require(*parts)))


def npz_keys(*parts):
    """Keys of a .npz file of the set, none where it is missing; for parametrising tests."""
    if not _is_there('/'.join(parts)):
        return ()
    with np.load(golden(*parts)) as arrays:
        return tuple(arrays)


def load_json(*parts):
    return json.loads(require(*parts).read_text(encoding='utf-8'))


def json_if_there(*parts, default=()):
    """Contents of a JSON file of the set, or `default` where it is missing; for parametrising
    tests."""
    if not _is_there('/'.join(parts)):
        return default
    return json.loads(golden(*parts).read_text(encoding='utf-8'))


def under(arrays, prefix):
    """The entries whose key starts with `prefix`, which is taken off."""
    return {key[len(prefix) :]: array for key, array in arrays.items() if key.startswith(prefix)}


def bpe_directory():
    """Folder with encoder.json and vocab.bpe of GPT-2, or None. They are not part of any golden
    set."""
    given = os.environ.get('LMHP_GPT2_ENCODINGS')
    folder = Path(given) if given else OUTSIDE / 'gpt-2' / 'encodings' / 'main'
    return (
        folder if (folder / 'encoder.json').exists() and (folder / 'vocab.bpe').exists() else None
    )


def require_bpe():
    folder = bpe_directory()
    if folder is None:
        pytest.skip('encoder.json and vocab.bpe of GPT-2 are not at hand (set LMHP_GPT2_ENCODINGS)')
    return folder
