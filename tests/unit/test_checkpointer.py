"""Checkpointer on several ranks, as threads: who saves what, and who gets what back."""

import random
import signal
import threading
import time
from unittest import mock

import pytest
import torch
from ranks import on_ranks

from lm_human_preferences.checkpointing import checkpointer
from lm_human_preferences.checkpointing import checkpoints as saving
from lm_human_preferences.checkpointing.checkpointer import Checkpointer
from lm_human_preferences.checkpointing.tf_bundle import Bundle
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.language.networks.gpt2_files import TensorFlowNames
from lm_human_preferences.utils import stop_signals


@pytest.fixture
def generator(monkeypatch):
    """A generator for each rank, which is a thread here, in place of those of the process."""
    local = threading.local()

    def seed(seed, rank):
        local.drawn = random.Random(f'{seed} {rank}')

    monkeypatch.setattr(checkpointer, 'set_seed', seed)
    monkeypatch.setattr(checkpointer, 'random_state', lambda: [*local.drawn.getstate()])
    monkeypatch.setattr(
        checkpointer,
        'set_random_state',
        lambda state: local.drawn.setstate((state[0], (*state[1],), state[2])),
    )
    return local


class CountingTrainer:
    def __init__(self):
        self.logger = mock.Mock()
        self.variable_names = TensorFlowNames()
        self.steps = torch.tensor(0)

    def tensors(self):
        return {'ppo/step': self.steps}

    def state_dict(self):
        return {'step': int(self.steps)}

    def load_state_dict(self, state):
        self.loaded = state


def test_how_a_run_multiplies_is_kept(tmp_path):
    with Checkpointer(str(tmp_path), Comm(), resume=False) as checkpoints:
        checkpoints.set_seed(5)
        checkpoints.library = 'onednn'
        checkpoints.save(CountingTrainer())
    with Checkpointer(str(tmp_path), Comm(), resume=True) as checkpoints:
        assert checkpoints.library == 'onednn'


def test_a_run_that_goes_on_without_a_gpu_says_so(tmp_path, monkeypatch, capsys):
    trainer, state = CountingTrainer(), checkpointer.random_state()
    state['cuda'] = state['torch']
    monkeypatch.setattr(checkpointer, 'random_state', lambda: state)
    with Checkpointer(str(tmp_path), Comm(), resume=False) as checkpoints:
        checkpoints.set_seed(5)
        checkpoints.save(trainer)
    monkeypatch.setattr(checkpointer, 'set_seed', lambda seed, rank: None)
    with Checkpointer(str(tmp_path), Comm(), resume=True) as checkpoints:
        checkpoints.set_seed(None)
        checkpoints.restore(trainer, saves=1)
    note = 'note: 1 rank(s) on CPU, before 1 rank(s) on GPU: results differ from'
    assert note in capsys.readouterr().out


def test_every_rank_goes_on_from_its_own_random_state(tmp_path, generator):
    def train(comm):
        trainer = CountingTrainer()
        with Checkpointer(str(tmp_path), comm, resume=False) as checkpoints:
            checkpoints.set_seed(5)
            generator.drawn.random()
            trainer.steps += 3
            checkpoints.save(trainer)
        return generator.drawn.random()

    def go_on(comm):
        trainer = CountingTrainer()
        with Checkpointer(str(tmp_path), comm, resume=True) as checkpoints:
            checkpoints.set_seed(None)
            checkpoints.restore(trainer, saves=1)
        assert trainer.steps == 3
        assert trainer.loaded == {'step': 3}
        return generator.drawn.random()

    drawn = on_ranks(2, train)
    assert len(set(drawn)) == 2
    assert on_ranks(2, go_on) == drawn


def test_another_seed_gives_every_rank_another_stream(tmp_path, generator):
    def run(comm, resume, seed):
        trainer = CountingTrainer()
        with Checkpointer(str(tmp_path), comm, resume=resume) as checkpoints:
            checkpoints.set_seed(seed)
            if resume:
                checkpoints.restore(trainer, saves=1)
            else:
                checkpoints.save(trainer)
        return checkpointer.random_state()

    first = on_ranks(2, lambda comm: run(comm, False, 5))
    again = on_ranks(2, lambda comm: run(comm, True, 6))
    assert len({str(state) for state in first + again}) == 4


def test_a_checkpoint_holds_the_values_of_its_own_step(tmp_path, monkeypatch):
    """On a disk that is slower than the training: the next one waits."""
    save = saving.save

    def save_slowly(*arguments, **settings):
        time.sleep(0.3)
        return save(*arguments, **settings)

    monkeypatch.setattr(saving, 'save', save_slowly)
    trainer = CountingTrainer()
    with Checkpointer(str(tmp_path), Comm(), resume=False) as checkpoints:
        checkpoints.set_seed(1)
        for _ in range(2):
            trainer.steps += 1
            checkpoints.save(trainer)
    for step in (1, 2):
        assert Bundle(f'{tmp_path}/model.ckpt-{step}')['global_step'] == step


def test_a_step_that_does_not_end_is_interrupted(tmp_path, capfd):
    """Stop signals wait for its end, but no longer than they are allowed to."""
    with Checkpointer(str(tmp_path), Comm(), resume=False, stop_timeout=1) as checkpoints:
        since = time.monotonic()
        with pytest.raises(KeyboardInterrupt), checkpoints.defer_signals():
            signal.raise_signal(signal.SIGTERM)
            time.sleep(20)
    assert 0.9 < time.monotonic() - since < 10
    assert 'if it finishes within 1 s; interrupt again' in capfd.readouterr().err


SESSION = 'TERM HUP, HUP TERM, USR1 TERM, TERM XCPU'.split(', ')


@pytest.mark.parametrize('numbers', SESSION)
def test_the_end_of_a_session_is_one_signal(numbers, tmp_path, capfd):
    """Systemd and Slurm send two; another Ctrl-C or SIGTERM still interrupts."""
    before = {number: signal.getsignal(number) for number in stop_signals.WARNINGS}
    with (
        Checkpointer(str(tmp_path), Comm(), resume=False) as checkpoints,
        checkpoints.defer_signals(),
    ):
        for name in numbers.split():
            signal.raise_signal(signal.Signals[f'SIG{name}'])
        assert checkpoints.stop_requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    for number, handler in before.items():
        signal.signal(number, handler)
    assert capfd.readouterr().err.count('interrupt again') == 1


def test_a_run_that_was_asked_to_end_has_saved_when_it_does(tmp_path):
    trainer = CountingTrainer()
    with Checkpointer(str(tmp_path), Comm(), resume=False) as checkpoints:
        checkpoints.set_seed(1)
        trainer.steps += 1
        checkpoints.stop_requested = True
        with pytest.raises(KeyboardInterrupt):
            checkpoints.after_step(trainer)
        assert checkpoints.writing is None
        assert saving.latest(str(tmp_path)) == f'{tmp_path}/model.ckpt-1'
