"""Ranks that torchrun starts, or an srun without MPI: the errors that a user sees."""

import re
import signal
from pathlib import Path

import pytest
from launched import TORCHRUN, Launch, eventually, start_by_slurm

pytestmark = pytest.mark.slow


def test_a_wrong_option_is_told_once(tmp_path):
    """Before the ranks meet: once by rank 0, once in the report of torchrun, whose status is 1."""
    failed = Launch(tmp_path, '--ppo.batch=8', started_by=TORCHRUN)
    assert failed.wait() == 1
    lines = failed.errors().splitlines()
    told = 'no such option: --ppo.batch (did you mean --ppo.batch_size?)'
    assert lines.count(f'error: {told}') == 1
    assert lines.count(f'  traceback : {told}') == 1
    assert re.search(r'exitcode  : 2 \(pid: \d+\)', failed.errors())


def ignores_sigterm(launch):
    status = Path('/proc', str(launch.process.pid), 'status').read_text()
    ignored = int(re.search(r'SigIgn:\s*(\w+)', status)[1], 16)
    return bool(ignored >> (signal.SIGTERM - 1) & 1)


def test_only_one_rank_speaks_and_tells_the_error_of_all(tmp_path):
    """The others do not lose the store, which rank 0 keeps, before they know that it is told.

    The SIGTERM by which srun ends ranks after the first does not change their status, which is
    srun's.
    """
    first, second = start_by_slurm(tmp_path, 'talk')
    eventually(lambda: ignores_sigterm(second), 60)
    second.process.terminate()
    assert (first.wait(), second.wait()) == (2, 2)
    assert first.output().splitlines() == ['rank 0 of [0, 1] speaks']
    assert first.errors().splitlines()[-1] == 'error: /labels.json is not a label file'
    assert first.errors().count('label file') == 1
    assert second.output() == second.errors() == ''


def test_a_killed_rank_under_srun_ends_the_other(tmp_path):
    """Though nothing but the connection tells."""
    first, second = start_by_slurm(tmp_path, 'wait_for_rank_1')
    first.reach_line('2 ranks wait for ever')
    second.process.send_signal(signal.SIGKILL)
    assert first.wait(60) == 1
    assert re.fullmatch('error: rank 0: the connection to another rank is lost: .*', first.errors())
