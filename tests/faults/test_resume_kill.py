"""kill -9 at random moments, again and again, and going on after each: the result is that of a run
left alone.

LMHP_FAULTS is how many kills there are, with a fifth of that on two ranks: 50 is the whole test.
Moments and the engine come from a seed, LMHP_TEST_SEED or a new one each time; it is printed with a
failure.
"""

import contextlib
import os
import random
import re
import shlex
import signal
import time

import pytest
from interrupted import RECORD_STEP_STATS, TRAIN_BATCH, assert_same, result_anywhere, run, start
from launched import EVERYWHERE, FAULTS, PATIENCE, SMALL, Launch, eventually

from lm_human_preferences.checkpointing import checkpoints

pytestmark = pytest.mark.slow
NEW = '--rewards.train_new_model'
WORDS = [
    '--ppo.total_episodes=640',
    '--run.save_interval=2',
    f'{NEW}.run.save_interval=4',
]  # 32 steps, then 10


@pytest.fixture
def chance():
    seed = os.environ.get('LMHP_TEST_SEED', str(random.randrange(10**6)))
    print(f'LMHP_TEST_SEED={seed}')
    return random.Random(seed)


def words(directory):
    return [
        'train_policy',
        'test',
        'run',
        '--mpi=1',
        f'--save_dir={directory}',
        *WORDS,
        '--run.resume=on',
    ]


def test_killed_at_random_moments(tmp_path, chance):
    """A run is killed wherever it is, and what goes on as well, five times or until it is
    through."""
    (tmp_path / 'alone').mkdir()
    began = time.monotonic()
    assert run(words(tmp_path / 'alone'), tmp_path / 'alone/out') == 0
    duration, expected = time.monotonic() - began, result_anywhere(tmp_path / 'alone')
    kills, runs = 0, 0
    while kills < FAULTS:
        directory = tmp_path / f'run{runs}'
        directory.mkdir()
        for _ in range(min(5, FAULTS - kills)):
            child = start(words(directory), directory / 'out')
            time.sleep(chance.uniform(0, 0.7 * duration))
            child.kill()
            if child.wait() == 0:
                break
            kills += 1
        assert run(words(directory), directory / 'out') == 0, (directory / 'out').read_text()[
            -2000:
        ]
        assert_same(result_anywhere(directory), expected)
        runs += 1
    print(f'{kills} kills in {runs} runs')


@pytest.mark.parametrize(
    'moment, count, number',
    [(TRAIN_BATCH, 2, signal.SIGTERM), (RECORD_STEP_STATS, 3, signal.SIGINT)],
    ids=['reward', 'policy'],
)
def test_asked_to_end(tmp_path, moment, count, number):
    """The step is finished and saved, whatever the interval, and the run goes on from there as one
    left alone, by the command that is named."""

    def argv(name):
        (tmp_path / name).mkdir(exist_ok=True)
        return [
            *words(tmp_path / name),
            '--run.save_interval=1000',
            f'{NEW}.run.save_interval=1000',
            f'--run.stop_timeout={PATIENCE}',  # however busy the machine is
        ]

    assert run(argv('alone'), tmp_path / 'alone/out') == 0
    output, asked = tmp_path / 'asked/out', argv('asked')
    assert run(asked, output, kill_at=count, moments=[moment], number=number) == 130
    assert (
        output.read_text().count(
            f'\nStopping: the current step is saved if it finishes within {PATIENCE} s;'
        )
        == 1
    )
    (saved,) = (tmp_path / 'asked').rglob('*.resume.json')
    done = output.read_text().count('[ppo_step')
    assert saved.name.startswith(f'model.ckpt-{done}.' if done else 'model.ckpt-')
    step = saved.name.removeprefix('model.ckpt-').partition('.')[0]
    trained = 'policy' if done else 'reward model'
    said, _, command = output.read_text().rstrip().splitlines()[-1].partition('./launch.py ')
    assert said == f'Step {step} of the {trained} is saved; to go on from there: '
    assert not (tmp_path / 'asked/run/lock').exists()
    assert run(shlex.split(command), output) == 0
    assert f'Going on from {saved.parent}/model.ckpt-' in output.read_text()
    more = re.compile(
        rf'policy/checkpoints/(checkpoint|{saved.name.split(".resume")[0]}\.\w+)'
    )  # than alone
    assert_same(
        *(
            {
                key: value
                for key, value in result_anywhere(tmp_path / name).items()
                if not more.fullmatch(key if isinstance(key, str) else key[0])
            }
            for name in ('asked', 'alone')
        )
    )


def test_two_ranks_asked_to_end(tmp_path, chance):
    """By their launcher, with any engine."""
    settings = (
        f'--run.allreduce={chance.choice(EVERYWHERE)}',
        '--run.save_interval=1000',
        '--ppo.total_episodes=64_000_000',
    )
    asked = Launch(tmp_path, '--mpi=2', *SMALL, *settings)
    reached = chance.randrange(1, 10)
    asked.reach(reached)
    number = chance.choice([signal.SIGINT, signal.SIGTERM])
    since = time.monotonic()
    asked.process.send_signal(number)
    assert asked.wait(10) == 128 + number
    asked.assert_nothing_left(since + 10 - time.monotonic())
    asked.assert_checkpoint_is_intact()
    assert re.fullmatch(asked.saved_step(), asked.errors())
    assert asked.output().endswith(
        'Stopping: the current step is saved if it finishes within 20 s; interrupt again to stop'
        ' at once\n'
    )
    directory = asked.run / 'policy/checkpoints'
    prefix, state = checkpoints.latest_resumable(str(directory))
    assert state['trainer']['step'] > reached and len(state['random']) == 2


def begun(directory, engine):
    """Two ranks that train, averaging by `engine`."""
    launch = Launch(directory, '--mpi=2', f'--run.allreduce={engine}', *WORDS)
    eventually(lambda: 'training on' in launch.output() or launch.process.poll() is not None)
    return launch


def test_two_ranks_killed(tmp_path, chance):
    """One rank of two, or the launcher, is killed; `./launch.py resume` knows how many ranks there
    were."""
    engine = chance.choice(EVERYWHERE)
    alone = begun(tmp_path / 'alone', engine)
    assert alone.wait() == 0, alone.errors()
    expected = result_anywhere(tmp_path / 'alone')
    for attempt in range(max(1, FAULTS // 5)):
        directory = tmp_path / str(attempt)
        killed = begun(directory, engine)
        if chance.random() < 0.7:
            killed.reach(chance.randrange(6))  # of 10
        time.sleep(chance.random() / 5)
        victim = chance.choice([killed.process.pid, *killed.ranks()])
        with contextlib.suppress(ProcessLookupError):  # which has come to its end meanwhile
            os.kill(victim, signal.SIGKILL)
        killed.wait()
        eventually(lambda killed=killed: not killed.processes(), 10)
        if (
            victim != killed.process.pid
            or not (killed.run / 'policy/checkpoints/model.ckpt-10.index').exists()
        ):
            killed.assert_nothing_left(
                10
            )  # a launcher that dies after its ranks are done leaves their folder behind
        again = Launch(directory / 'again', command=('launch.py', 'resume', str(killed.run)))
        assert again.wait() == 0, again.errors()
        assert re.search('^2 ranks, averaging by', again.output(), re.MULTILINE)
        assert_same(result_anywhere(directory), expected)
        again.assert_nothing_left(10)
