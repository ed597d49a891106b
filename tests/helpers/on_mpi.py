"""pytest on the ranks of MPI: `mpiexec -n 2 python tests/helpers/on_mpi.py ENGINE,... TEST...`.

The tests are those that use ranks.on_ranks. All engines are tested in one start of the ranks,
because starting them takes longer than most of these tests.

After every update of the parameters, all ranks must have the same ones, to the bit. For each
engine, rank 0 prints how many tests of which functions passed on each rank; a rank where one failed
prints what pytest said.
"""

import collections
import contextlib
import hashlib
import io
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import ranks

from lm_human_preferences.distributed import comm
from lm_human_preferences.training.optimizer import Adam


class Passed:
    """A plugin that counts the tests of each function that passed."""

    def __init__(self):
        self.counts = collections.Counter()

    def pytest_runtest_logreport(self, report):
        if report.when == 'call' and report.passed:
            file, name = report.nodeid.partition('[')[0].split('::')
            self.counts[f'{Path(file).stem}::{name}'] += 1


def compare_parameters_after_updates():
    update = Adam.update

    def compared(adam, lr):
        update(adam, lr)
        digest = hashlib.sha256()
        for parameter in adam.parameters.values():
            digest.update(parameter.detach().contiguous().numpy())
        assert len(set(ranks.WORLD.all_gather_object(digest.digest()))) == 1, (
            'parameters differ between ranks'
        )

    Adam.update = compared


def main(engines, *tests):
    compare_parameters_after_updates()
    for engine in engines.split(','):
        run_tests(engine, tests)


def run_tests(engine, tests):
    ranks.WORLD = comm.init_comm(engine)
    passed, said = Passed(), io.StringIO()
    with contextlib.redirect_stdout(said):
        status = pytest.main(
            ['-x', '-q', '-n0', '-p', 'no:cacheprovider', *tests], plugins=[passed]
        )
    if status:
        print(f'rank {ranks.WORLD.rank}:\n{said.getvalue()}', flush=True)
        os._exit(1)  # the others may wait for this rank: without MPI's farewell, mpiexec ends them
    everyone = ranks.WORLD.all_gather_object(dict(sorted(passed.counts.items())))
    if ranks.WORLD.rank == 0:
        print(*everyone, sep='\n', flush=True)


if __name__ == '__main__':
    main(*sys.argv[1:])
