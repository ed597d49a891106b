"""Which process of pytest-xdist runs a test: those that share a fixture run in the same one.

By itself pytest-xdist would set up the fixture of a module in every process. (`--dist loadgroup` of
pytest-xdist 3.8 would do, but finds no groups with pytest 9.)
"""

import functools

from xdist.scheduler import LoadScopeScheduling


@functools.cache
def has_a_shared_fixture(path):
    """Whether the file of tests has a fixture that is set up once for all of them."""
    return "scope='module'" in path.read_text(encoding='utf-8')


class Scheduling(LoadScopeScheduling):
    """A file with a shared fixture goes to one process, whole; other tests one by one."""

    def _split_scope(self, nodeid):
        path = nodeid.partition('::')[0]
        return path if has_a_shared_fixture(self.config.rootpath / path) else nodeid


def pytest_xdist_make_scheduler(config, log):
    return Scheduling(config, log)
