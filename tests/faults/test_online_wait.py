"""Several ranks wait for labels for longer than they wait for each other."""

import pytest
from launched import Launch, eventually, needs_mpi
from online_runs import WORDS, lines_of, meanwhile, models_of

from lm_human_preferences.labels.folder import LabelFolder
from lm_human_preferences.labels.labeller import Labeller
from lm_human_preferences.labels.simulated import simulate, small_tokens

SHORTEST_TIMEOUT = 10  # seconds that the options allow
# Before the second step, when ranks have averaged gradients already, 28 labels are needed.
SETTINGS = {
    'ppo.total_episodes': 128,
    'rewards.online.source': 'people',
    'rewards.online.error': 0.0,
    'rewards.online.labels': 32,
    'rewards.online.initial': 16,
    'rewards.online.retrainings': 1,
    'rewards.online.patience': 0.05,
    'run.allreduce_timeout': SHORTEST_TIMEOUT,
}


def answer_late(directory, done):
    """Answer 16 questions at once, and the others when that timeout is over."""
    eventually((directory / 'labels/task.json').exists, 60)
    with Labeller(LabelFolder(str(directory / 'labels')), 'anna') as anna:
        while len(anna.log.uuids) < 16 and not done.wait(0.05):
            simulate(anna, small_tokens, answers=16 - len(anna.log.uuids))
        used = directory / 'labels/used.jsonl'
        while '"trained"' not in used.read_text() and not done.wait(0.05):
            pass
        done.wait(1.3 * SHORTEST_TIMEOUT)
        simulate(anna, small_tokens)


@needs_mpi
@pytest.mark.slow
def test_two_ranks_wait_longer_than_for_each_other(tmp_path):
    """They meet every second."""
    words = [f'--{name}={value}' for name, value in SETTINGS.items()]
    launch = Launch(tmp_path, '--mpi=2', *WORDS, *words, '--run.allreduce=torch')
    with meanwhile(answer_late, launch.run):
        status = launch.wait()
    assert status == 0, launch.errors()
    assert launch.output().startswith('2 ranks, averaging by torch')
    answers = lines_of(launch.run / 'labels/answers/anna.jsonl')
    assert answers[16]['time'] - answers[15]['time'] > SHORTEST_TIMEOUT
    first, second = [line['labels'] for line in models_of(launch.run)]
    assert first == 16
    assert 28 <= second <= 32  # the run goes on at 28, while the others are being given
