"""A reward model that learns its labels several times."""

import re

import numpy as np
import pytest
from command_line import invoke, succeed
from events import events_of
from experiments import resolved
from interrupted import REWARD_STEP, failing

from lm_human_preferences import train_reward
from lm_human_preferences.distributed.comm import Comm

# Some 64 labels to train on, in batches of 32: the last one of an epoch is smaller.
TRAINING = (
    'train_reward test run --mpi 1 --labels.num_train 96 --labels.held_out 0.3 --epochs 3'
    ' --normalize_samples 64 --run.save_interval 1'
)
STEPS = 3  # of an epoch


@pytest.fixture
def batches(monkeypatch):
    seen = []
    train_batch = train_reward.RewardModelTrainer.train_batch

    def noted(trainer, indices, lr):
        seen.append((indices.tolist(), lr))
        return train_batch(trainer, indices, lr)

    monkeypatch.setattr(train_reward.RewardModelTrainer, 'train_batch', noted)
    return seen


def test_each_epoch_learns_every_label_once(batches):
    hparams = resolved('train_reward', 'test')
    hparams.override_from_dict({'labels.num_train': 96, 'labels.held_out': 0.3, 'epochs': 3})
    train_reward.train(hparams, Comm())
    assert len(batches) == 3 * STEPS
    orders = []
    for epoch in range(3):
        of_epoch = [labels for labels, _ in batches[epoch * STEPS :][:STEPS]]
        assert [len(labels) for labels in of_epoch[:-1]] == [32] * (STEPS - 1)
        orders.append([label for labels in of_epoch for label in labels])
    assert len(orders[0]) % 32 > 0  # the last batch is smaller
    assert all(sorted(order) == list(range(len(orders[0]))) for order in orders)
    assert orders[0] != orders[1] != orders[2]
    rates = [lr for _, lr in batches]
    np.testing.assert_allclose(rates, hparams.lr * (1 - np.arange(len(rates)) / len(rates)))


def test_held_out_labels_are_predicted_after_each_epoch(tmp_path):
    """Interrupted in the second epoch, it ends alike."""
    result = succeed(f'{TRAINING} --save_dir {tmp_path}/whole')
    (line,) = re.findall('^held out: .*', result.stdout, re.MULTILINE)
    with failing(REWARD_STEP, STEPS + 2):
        assert 'interrupted' in invoke(f'{TRAINING} --save_dir {tmp_path}/parts').stderr
    assert len(list((tmp_path / 'parts/run').glob('**/*.index'))) == 2  # the last two
    other = invoke(f'{TRAINING} --epochs 2 --run.resume on --save_dir {tmp_path}/parts')
    assert f'--epochs 2: the run in {tmp_path}/parts/run began with 3' in other.stderr
    resumed = invoke(f'resume {tmp_path}/parts/run')
    assert line in resumed.stdout
    logs = (tmp_path / name / 'run/tb/reward_model' for name in ('whole', 'parts'))
    whole, parts = map(events_of, logs)
    for tag in ('train_reward/held_out/accuracy', 'train_reward/minibatch/loss'):
        assert whole[tag] == parts[tag]
