"""A reward model that learns its labels several times."""

import dataclasses
import re

import numpy as np
import pytest
from command_line import error_of, invoke, succeed
from events import events_of
from experiments import resolved
from interrupted import REWARD_STEP, failing
from run_folders import told

from lm_human_preferences import train_reward
from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.checkpointing.checkpointer import variables_of
from lm_human_preferences.checkpointing.tf_bundle import Bundle
from lm_human_preferences.distributed.comm import LocalComm
from lm_human_preferences.language import trained_models
from lm_human_preferences.plan.making import reward_phase
from lm_human_preferences.run_story import facts

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
    train_reward.train(hparams, LocalComm())
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
    told = r'held out, after each epoch: ([\d.]+), ([\d.]+), ([\d.]+); the last is kept'
    line = re.search(told, result.stdout)
    assert line is not None, result.stdout
    assert 'best' not in line.string[line.start() :].splitlines()[0]

    with failing(REWARD_STEP, STEPS + 2):
        assert 'interrupted' in invoke(f'{TRAINING} --save_dir {tmp_path}/parts').stderr
    assert len(list((tmp_path / 'parts/run').glob('**/*.index'))) == 2  # the last two
    other = invoke(f'{TRAINING} --epochs 2 --run.resume on --save_dir {tmp_path}/parts')
    assert 'the run was begun with --epochs 3: give that number' in other.stderr
    resumed = invoke(f'resume {tmp_path}/parts/run')
    assert line[0] in resumed.stdout
    whole, parts = (
        events_of(tmp_path / name / 'run/tb/reward_model') for name in ('whole', 'parts')
    )
    for tag in ('train_reward/held_out/accuracy', 'train_reward/minibatch/loss'):
        assert whole[tag] == parts[tag]


@pytest.fixture
def epochs(monkeypatch):
    """Parameters after each epoch; `accuracies` takes the place of what is measured there."""
    seen, accuracies = [], []
    end_epoch = train_reward.RewardModelTrainer.end_epoch

    def noted(trainer, prediction):
        seen.append({name: tensor.numpy().copy() for name, tensor in variables_of(trainer).items()})
        if accuracies:
            accuracy = accuracies[len(trainer.held_out_by_epoch)]
            prediction = dataclasses.replace(prediction, accuracy=accuracy)
        end_epoch(trainer, prediction)

    monkeypatch.setattr(train_reward.RewardModelTrainer, 'end_epoch', noted)
    return seen, accuracies


def is_of(directory, epoch):
    """Return whether a finished reward model, but for its scale, is that of an epoch."""
    bundle = Bundle(checkpoints.latest(f'{directory}/checkpoints'))
    others = r'(?!reward_model/)|.*(/adam|reward_norm)'
    names = [name for name in bundle if not re.match(others, name)]
    return bool(names) and all(np.array_equal(bundle[name], epoch[name]) for name in names)


@pytest.mark.parametrize(
    ('accuracies', 'kept'), [((0.9, 0.8, 0.7), 1), ((0.6, 0.8, 0.8), 2), ((0.6, 0.7, 0.8), 3)]
)
def test_the_best_epoch_is_kept(tmp_path, epochs, accuracies, kept):
    """Of equals, it is the earlier one."""
    seen, epochs[1][:] = epochs[0], accuracies
    result = succeed(f'{TRAINING} --keep best --save_dir {tmp_path}')
    model = tmp_path / 'run/reward_model'
    assert [is_of(model, epoch) for epoch in seen] == [number == kept for number in (1, 2, 3)]
    assert f'that of epoch {kept} is kept' in result.stdout
    printed = re.findall(r'% of \d+ labels .*; its epoch was selected by these', result.stdout)
    assert len(printed) == 2  # after the last epoch, and at the end of the command
    assert not any('best' in name for name in Bundle(str(model / 'checkpoints/model.ckpt')))
    logged = events_of(tmp_path / 'run/tb/reward_model')
    assert len(logged['train_reward/held_out_of_kept/accuracy']) == 1
    assert 'its epoch was selected by these labels' in told('held_out', facts.read_run(str(model)))


FINISH = REWARD_STEP.replace('.step', '.finish')


@pytest.mark.parametrize('moment, call', [(REWARD_STEP, 3 * STEPS), (FINISH, 1)])
def test_the_best_epoch_outlives_a_kill(tmp_path, epochs, moment, call):
    """The kill comes in the last epoch, the best being the first; or when all steps are done."""
    epochs[1][:] = (0.9, 0.8, 0.7)
    succeed(f'{TRAINING} --keep best --save_dir {tmp_path}/whole')
    with failing(moment, call):
        assert 'interrupted' in invoke(f'{TRAINING} --keep best --save_dir {tmp_path}/parts').stderr
    other = invoke(f'resume {tmp_path}/parts/run --keep last')
    assert other.exit_code == 2 and '--keep' in other.stderr
    succeed(f'resume {tmp_path}/parts/run')
    for name in ('model.ckpt.data-00000-of-00001', 'model.ckpt.index'):
        whole, parts = (
            (tmp_path / run / 'run/reward_model/checkpoints' / name).read_bytes()
            for run in ('whole', 'parts')
        )
        assert whole == parts
    whole, parts = (events_of(tmp_path / run / 'run/tb/reward_model') for run in ('whole', 'parts'))
    tag = 'train_reward/held_out_of_kept/accuracy'
    assert whole[tag] == parts[tag]


def test_each_model_of_a_policys_ensemble_keeps_its_best_epoch(tmp_path, epochs):
    epochs[1][:] = (0.9, 0.8, 0.7)
    options = TRAINING.replace('train_reward test run --mpi 1', '').replace(
        '--run.save_interval 1', '--keep best'
    )
    options = options.replace('--', '--rewards.train_new_model.')
    result = succeed(
        f'train_policy test run --mpi 1 --save_dir {tmp_path} --rewards.ensemble 2 {options}'
        ' --ppo.total_episodes 64 --run.evaluate off'
    )
    seen = epochs[0]
    for name, first in (('reward_model', seen[0]), ('reward_model_1', seen[3])):
        assert is_of(tmp_path / 'run' / name, first)
    mean = re.search('mean of 2 reward models: .*', result.stdout)
    assert mean is not None and 'its epoch was selected' in mean[0]


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ('', 'give --labels.held_out a share'),
        ('--labels.held_out 1e-9 --labels.num_train 32', 'none of 32 labels is held out'),
    ],
)
def test_the_best_epoch_needs_labels_held_out(tmp_path, options, message):
    words = f'train_reward test run --mpi 1 --save_dir {tmp_path} --keep best'
    assert message in error_of(invoke(f'{words} {options}'))


@pytest.mark.parametrize(('keep', 'networks', 'copies'), [('last', 2, 3), ('best', 3, 4)])
def test_the_copy_of_the_best_epoch_counts_as_memory(keep, networks, copies):
    hparams = resolved('train_reward', 'test')
    changes = {'keep': keep, 'labels.held_out': 0.3, 'run.save_interval': 1, 'run.save_dir': 'd'}
    hparams.override_from_dict(changes)
    plan = reward_phase(hparams).memory(trained_models.test_hparams(), ranks=1)[0]
    assert (plan.networks, plan.snapshot) == (networks, copies)
