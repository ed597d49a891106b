"""Runs asked to end, and one of two ranks killed, go on (LMHP_FAULTS=50: 10 kills)."""

import contextlib
import os
import re
import shlex
import signal
import time

import pytest
from interrupted import RECORD_STEP_STATS, TRAIN_BATCH, assert_same, result_anywhere, run
from launched import EVERYWHERE, FAULTS, PATIENCE, Launch, eventually

pytestmark = pytest.mark.slow
NEW = '--rewards.train_new_model'
# 32 steps, then 10
WORDS = f'--ppo.total_episodes=640 --run.save_interval=2 {NEW}.run.save_interval=4'.split()


def words(directory):
    begun = f'train_policy test run --mpi=1 --save_dir={directory} --run.resume=on'
    return [*begun.split(), *WORDS]


MORE = f'--run.save_interval=1000 {NEW}.run.save_interval=1000'.split()
MORE += [f'--run.stop_timeout={PATIENCE}']  # however busy the machine is


@pytest.fixture(scope='module')
def alone(tmp_path_factory):
    directory = tmp_path_factory.mktemp('alone')
    assert run([*words(directory), *MORE], directory / 'out') == 0
    return directory


@pytest.mark.parametrize(
    'moment, count, number',
    [(TRAIN_BATCH, 2, signal.SIGTERM), (RECORD_STEP_STATS, 3, signal.SIGINT)],
    ids=['reward', 'policy'],
)
def test_asked_to_end(alone, tmp_path, moment, count, number):
    """The step is saved, and the command that is named goes on as a run left alone."""
    output, asked = tmp_path / 'out', [*words(tmp_path), *MORE]
    assert run(asked, output, kill_at=count, moments=[moment], number=number) == 130
    stopping = f'\nStopping: the current step is saved if it finishes within {PATIENCE} s;'
    assert output.read_text().count(stopping) == 1
    (saved,) = tmp_path.rglob('*.resume.json')
    done = output.read_text().count('[ppo_step')
    assert saved.name.startswith(f'model.ckpt-{done}.' if done else 'model.ckpt-')
    step = saved.name.removeprefix('model.ckpt-').partition('.')[0]
    trained = 'policy' if done else 'reward model'
    said, _, command = output.read_text().rstrip().splitlines()[-1].partition('./launch.py ')
    assert said == f'Step {step} of the {trained} is saved; to go on from there: '
    assert not (tmp_path / 'run/lock').exists()
    assert run(shlex.split(command), output) == 0
    assert f'Going on from {saved.parent}/model.ckpt-' in output.read_text()
    name = saved.name.split('.resume')[0]
    more_than_alone = re.compile(rf'policy/checkpoints/(checkpoint|{name}\.\w+)')
    assert_same(result_without(more_than_alone, tmp_path), result_without(more_than_alone, alone))


def result_without(files, directory):
    """The result of the run in `directory` but for the files that match."""
    found = {}
    for key, value in result_anywhere(directory).items():
        name = key if isinstance(key, str) else key[0]
        if not files.fullmatch(name):
            found[key] = value
    return found


def begun(directory, engine):
    launch = Launch(directory, '--mpi=2', f'--run.allreduce={engine}', *WORDS)
    eventually(lambda: 'training on' in launch.output() or launch.process.poll() is not None)
    return launch


def test_two_ranks_killed(tmp_path, chance):
    """A rank or the launcher, or all by Ctrl-C: nothing is left; `resume` knows how many ranks."""
    engine = chance.choice(EVERYWHERE)
    alone = begun(tmp_path / 'alone', engine)
    assert alone.wait() == 0, alone.errors()
    # A rank that notices the loss of another one saves its step, if it still can.
    of_the_loss = re.compile(r'policy/checkpoints/(checkpoint|model\.ckpt-[13579]\.\w+)')
    expected = result_without(of_the_loss, tmp_path / 'alone')
    for attempt in range(max(2, FAULTS // 5)):
        directory = tmp_path / str(attempt)
        killed = begun(directory, engine)
        if chance.random() < 0.7:
            killed.reach(chance.randrange(6))  # of 10
        time.sleep(chance.random() / 5)
        ranks = killed.ranks()
        victim = chance.choice(ranks if attempt == 0 else [killed.process.pid, *ranks])
        with contextlib.suppress(ProcessLookupError):  # which has come to its end meanwhile
            if attempt == 1:
                os.killpg(killed.process.pid, signal.SIGINT)
            else:
                os.kill(victim, signal.SIGKILL)
        killed.wait()
        eventually(lambda killed=killed: not killed.processes(), 10)
        is_done = (killed.run / 'policy/checkpoints/model.ckpt-10.index').exists()
        if victim in ranks and not is_done:
            assert 'Traceback' not in killed.errors()
        again = Launch(directory / 'again', command=('launch.py', 'resume', str(killed.run)))
        assert again.wait() == 0, again.errors()
        assert re.search('^2 ranks, averaging by', again.output(), re.MULTILINE)
        assert_same(result_without(of_the_loss, directory), expected)
        again.assert_nothing_left(10)
