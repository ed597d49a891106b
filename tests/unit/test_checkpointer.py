"""Checkpointer on several ranks, as threads: who saves what, and who gets what back."""

import signal
import threading
import time
from unittest import mock

import numpy as np
import pytest
import torch
from ranks import on_ranks

from lm_human_preferences.checkpointing import checkpointer
from lm_human_preferences.checkpointing.checkpointer import Checkpointer
from lm_human_preferences.distributed.comm import LocalComm


@pytest.fixture
def generators(monkeypatch):
    """Gives each thread its own generators of numpy and torch, as each rank has in its process."""
    local = threading.local()

    def numpy_random():
        if not hasattr(local, 'numpy'):
            local.numpy = np.random.RandomState(0)
        return local.numpy

    def torch_random():
        if not hasattr(local, 'torch'):
            local.torch = torch.Generator()
        return local.torch

    monkeypatch.setattr(np.random, 'seed', lambda seed: numpy_random().seed(seed))
    monkeypatch.setattr(np.random, 'get_state', lambda: numpy_random().get_state())
    monkeypatch.setattr(np.random, 'set_state', lambda state: numpy_random().set_state(state))
    monkeypatch.setattr(torch, 'manual_seed', lambda seed: torch_random().manual_seed(seed))
    monkeypatch.setattr(torch, 'get_rng_state', lambda: torch_random().get_state())
    monkeypatch.setattr(torch, 'set_rng_state', lambda state: torch_random().set_state(state))
    return lambda: (numpy_random(), torch_random())


class CountingTrainer:
    """A trainer whose only variable is the number of its steps."""

    def __init__(self):
        self.logger = mock.Mock()
        self.steps = torch.tensor(0)

    def tf_variables(self):
        return {'global_step': self.steps}

    def state_dict(self):
        return {'step': int(self.steps)}

    def load_state_dict(self, state):
        self.loaded = state


def draw(generators):
    """Some numbers from this rank's generators."""
    numpy_random, torch_random = generators()
    return numpy_random.permutation(100).tolist(), torch.rand(5, generator=torch_random).tolist()


@pytest.mark.parametrize('size', [1, 2, 3])
def test_every_rank_goes_on_from_its_own_random_state(tmp_path, generators, size):
    def train(comm):
        trainer = CountingTrainer()
        with Checkpointer(str(tmp_path), comm, resume=False) as checkpoints:
            checkpoints.set_seed(5)
            draw(generators)
            trainer.steps += 3
            checkpoints.save(trainer)
        return draw(generators)

    def go_on(comm):
        trainer = CountingTrainer()
        with Checkpointer(str(tmp_path), comm, resume=True) as checkpoints:
            checkpoints.set_seed(None)
            checkpoints.restore(trainer, saves=1)
        assert trainer.steps == 3
        assert trainer.loaded == {'step': 3}
        return draw(generators)

    drawn = on_ranks(size, train)
    assert len({str(numbers) for numbers in drawn}) == size
    assert on_ranks(size, go_on) == drawn


def test_another_seed_gives_every_rank_another_stream(tmp_path, generators):
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


def test_a_step_that_does_not_end_is_interrupted(tmp_path, capfd):
    """Stop signals wait for its end, but no longer than they are allowed to."""
    with Checkpointer(str(tmp_path), LocalComm(), resume=False, stop_timeout=1) as checkpoints:
        since = time.monotonic()
        with pytest.raises(KeyboardInterrupt), checkpoints.defer_signals():
            signal.raise_signal(signal.SIGTERM)
            time.sleep(20)
    assert 0.9 < time.monotonic() - since < 10
    assert 'if it finishes within 1 s; interrupt again' in capfd.readouterr().err
