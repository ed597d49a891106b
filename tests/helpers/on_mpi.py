"""pytest on real ranks: `mpiexec -n 2 python tests/helpers/on_mpi.py ENGINE TEST...`.

The tests are those that use ranks.on_ranks. After every update, all ranks must have the same
parameters, to the bit. Rank 0 prints how many tests of which functions passed on each rank; a rank
where one failed prints what pytest said.
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

from lm_human_preferences.cli.launch import import_for_good
from lm_human_preferences.distributed import meeting

TESTS = Path(__file__).resolve().parents[1]

ranks = import_for_good('ranks')
comm = import_for_good('lm_human_preferences.distributed.comm')
Adam = import_for_good('lm_human_preferences.training.optimizer').Adam


class PassedCounter:
    def __init__(self):
        self.counts = collections.Counter()

    def pytest_runtest_logreport(self, report):
        if report.when == 'call' and report.passed:
            file, name = report.nodeid.partition('[')[0].split('::')
            self.counts[f'{Path(file).stem}::{name}'] += 1


def compare_parameters_after_updates():
    update = Adam.update

    def update_and_compare(adam, lr):
        update(adam, lr)
        digest = hashlib.sha256()
        for parameter in adam.parameters.values():
            digest.update(parameter.detach().contiguous().numpy())
        digests = ranks.WORLD.all_gather_object(digest.hexdigest())
        assert len(set(digests)) == 1, 'parameters differ between ranks'

    Adam.update = update_and_compare


def main(engine, *tests):
    compare_parameters_after_updates()
    ranks.WORLD = comm.init_comm(engine)
    passed, output = PassedCounter(), io.StringIO()
    options = ['-x', '-q', '-n0', '-p', 'no:cacheprovider']
    with contextlib.redirect_stdout(output):
        status = pytest.main([*options, *(str(TESTS / test) for test in tests)], [passed])
    if status:
        print(f'rank {ranks.WORLD.rank}:\n{output.getvalue()}', flush=True)
        # Others may be waiting for this rank. As it ends without finalizing MPI, mpiexec ends them.
        os._exit(1)
    counts_of_ranks = ranks.WORLD.all_gather_object(dict(sorted(passed.counts.items())))
    if ranks.WORLD.rank == 0:
        print(f'averaged by {ranks.WORLD.name}', *counts_of_ranks, sep='\n', flush=True)
    ranks.WORLD.close()
    meeting.leave_mpi()


if __name__ == '__main__':
    main(*sys.argv[1:])
    os._exit(0)  # as the program ends: threads of libraries may still run
