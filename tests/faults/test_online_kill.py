"""kill -9 of a run that collects labels, at random moments (LMHP_FAULTS=80: 30 kills)."""

import signal

import pytest
from interrupted import MOMENTS, assert_same, run
from launched import FAULTS
from online_runs import WORDS, models_of, online_result

pytestmark = pytest.mark.slow
KILLS = max(1, FAULTS * 3 // 8)


def words(directory):
    where = [f'--save_dir={directory}', '--run.resume=on']
    return ['train_policy', 'test', 'run', '--mpi=1', *where, *WORDS]


@pytest.fixture(scope='module')
def alone(tmp_path_factory):
    directory = tmp_path_factory.mktemp('alone')
    assert run(words(directory), directory / 'out', counter=directory / 'count') == 0
    assert len(models_of(directory / 'run')) == 5
    return online_result(directory / 'run'), int((directory / 'count').read_text())


@pytest.mark.parametrize('attempt', range(KILLS))
def test_killed_run_goes_on(tmp_path, alone, attempt, chance):
    expected, count = alone
    # In equal parts of the run, so that all of its phases are met.
    first = chance.randrange(count * attempt // KILLS, count * (attempt + 1) // KILLS) + 1
    second = chance.randrange(count // 2) + 1
    print(f'killed at {first}, then at {second} of {count} ({MOMENTS})')
    statuses = [
        run(words(tmp_path), tmp_path / 'out', kill_at=moment) for moment in (first, second)
    ]
    assert statuses[0] == -signal.SIGKILL and statuses[1] in (-signal.SIGKILL, 0)
    if statuses[1] != 0:
        assert run(words(tmp_path), tmp_path / 'out') == 0, (tmp_path / 'out').read_text()
    assert_same(online_result(tmp_path / 'run'), expected)
