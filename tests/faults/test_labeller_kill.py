"""kill -9 of those who answer while a policy trains and waits for them: the page's server, a
terminal, a simulated labeller. Whoever takes over gives the result of labellers left alone.

All choose what is shown first, which depends on their name, the question and the folder's key only.
LMHP_FAULTS=80 is the whole test, 30 kills of each kind; moments come from LMHP_TEST_SEED or a new
seed each time.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
from interrupted import assert_same
from label_folders import fix_key
from label_page import StubbornLabeller
from launched import FAULTS, REPOSITORY, eventually
from online_runs import alike, meanwhile, train
from page_client import Client, Server

from lm_human_preferences.online import collection

pytestmark = pytest.mark.slow
KILLS = max(1, FAULTS * 3 // 8)
# Two steps, each of which has to wait; the reward model is trained before both.
ASKED = 55  # 40, and 20 (1 - 1/4) more
SETTINGS = {
    'ppo__total_episodes': 128,
    'rewards__online__labels': 60,
    'rewards__online__initial': 40,
    'rewards__online__retrainings': 1,
    'rewards__online__ahead': 0,
    'rewards__online__repeated': 0.0,
    'rewards__online__validation': 0.0,
    'rewards__online__error': 0.0,
    'rewards__online__source': 'people',
    'rewards__online__patience': 0.1,
}
SIMULATED = """
import sys, time
from lm_human_preferences.labels.folder import LabelFolder
from lm_human_preferences.labels.labeller import Labeller
from lm_human_preferences.labels.page.key import folder_key
from lm_human_preferences.labels.simulated_labeller import simulate, small_tokens
with Labeller(LabelFolder(sys.argv[1]), 'anna', folder_key(sys.argv[1]).order) as anna:
    while True:
        simulate(anna, small_tokens, position_bias=1.0)
        time.sleep(0.01)
"""


def ask_as_needed(monkeypatch):
    """Ask a question when its answer is needed, and look often for that."""
    monkeypatch.setattr('lm_human_preferences.hparams.online_options.ASKED_AT_ONCE', 1)
    monkeypatch.setattr(collection, 'POLL_SECONDS', 0.02)


class Simulated:
    """A process that answers."""

    def __init__(self, folder):
        self.folder = folder
        self.begin()

    def begin(self):
        command = [sys.executable, '-c', SIMULATED, self.folder]
        self.process = subprocess.Popen(command, cwd=REPOSITORY)

    def close(self):
        self.process.kill()
        self.process.wait()

    def kill(self):
        """Kill what is at work, and have another go on."""
        self.close()
        self.begin()


class Page:
    """The page's server, and a labeller who sends again what got no reply."""

    def __init__(self, folder):
        self.folder = folder
        self.server = Server(folder, ['anna'])
        self.labeller = StubbornLabeller(Client(self.server.links['anna']))
        self.labeller.start()

    def close(self):
        self.labeller.is_over.set()
        self.labeller.join()
        self.server.end()

    def kill(self):
        self.server.end(signal.SIGKILL)
        self.server = Server(self.folder, ['anna'], self.server.port)


class Terminal(threading.Thread):
    """`label` in a terminal, where 1 is pressed again and again; begun anew when it has ended.

    The keys come through a pipe: from people it takes four a second at most.
    """

    def __init__(self, folder):
        super().__init__(daemon=True)
        self.folder = folder
        self.is_over = threading.Event()
        self.begin()
        self.start()

    def begin(self):
        self.process = subprocess.Popen(
            [sys.executable, 'launch.py', 'label', self.folder, '--labeller', 'anna'],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def run(self):
        while not self.is_over.wait(0.02):
            if self.process.poll() is not None:
                self.process.stdin.close()
                self.begin()
            with contextlib.suppress(BrokenPipeError):
                os.write(self.process.stdin.fileno(), b'1')

    def close(self):
        self.is_over.set()
        self.join()
        self.kill()
        self.process.stdin.close()

    def kill(self):
        self.process.kill()
        self.process.wait()


def lines_in(path):
    return path.read_text().count('\n') if path.exists() else 0


def answered(directory, labellers, kills):
    """The result of a run; kills: [(after how many answers, seconds after that)]."""

    def work(directory, done):
        eventually((directory / 'labels/task.json').exists, 60)
        fix_key(directory / 'labels')
        answers = directory / 'labels/answers/anna.jsonl'
        with contextlib.closing(labellers(str(directory / 'labels'))) as at_work:
            for count, seconds in kills:
                while lines_in(answers) < count and not done.wait(0.002):
                    pass
                time.sleep(seconds)
                at_work.kill()
            done.wait()

    with meanwhile(work, directory):
        train(directory, **SETTINGS)
    return alike(directory)


@pytest.fixture(scope='module')
def alone(tmp_path_factory):
    """The result of a run whose labeller is left alone."""
    with pytest.MonkeyPatch.context() as patch:
        ask_as_needed(patch)
        return answered(tmp_path_factory.mktemp('alone') / 'run', Simulated, [])


@pytest.mark.parametrize('labellers', [Simulated, Page, Terminal])
def test_labellers_that_are_killed(tmp_path, alone, labellers, monkeypatch):
    ask_as_needed(monkeypatch)
    seed = os.environ.get('LMHP_TEST_SEED', str(random.randrange(10**6)))
    chance = random.Random(f'{seed} {labellers.__name__}')
    kills = sorted((chance.randrange(ASKED), chance.uniform(0, 0.02)) for _ in range(KILLS))
    print(f'LMHP_TEST_SEED={seed}, killed after so many answers and seconds: {kills}')
    assert_same(answered(tmp_path / 'run', labellers, kills), alone)
