"""Tests that share a fixture, or that need models of transformers, run in the same process.

pytest-xdist by itself would set up the fixtures, and import the models, in every process.
(`--dist loadgroup` of pytest-xdist 3.8 would do, but finds no groups with pytest 9.)
"""

import functools

from xdist.scheduler import LoadScopeScheduling

# In files, or in names of tests, that import models of transformers, for four seconds.
IN_FILES = ('tiny_causal_lms', 'tiny_classifiers', 'from transformers import GPT2')
IN_NAMES = (
    'transformers',
    'llama',
    '[sampling]',  # imports PyTorch's compiler as transformers does
    'exported',
    'runs_in_the_store',
    'parts_of_models',
)


@functools.cache
def group_of(path):
    """Return the group of tests that share a process with those of a file; None: no group."""
    text = path.read_text(encoding='utf-8')
    if any(name in text for name in IN_FILES):
        return 'transformers'
    if "scope='module'" in text:
        return str(path)
    return None


class Scheduling(LoadScopeScheduling):
    """A group of tests goes to one process, whole; other tests one by one."""

    def _split_scope(self, nodeid):
        if any(name in nodeid for name in IN_NAMES):
            return 'transformers'
        path = nodeid.partition('::')[0]
        return group_of(self.config.rootpath / path) or nodeid


def pytest_xdist_make_scheduler(config, log):
    return Scheduling(config, log)
