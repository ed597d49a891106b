"""Alarms: every fault rings, no healthy training does, and `stop` keeps the moment."""

from types import SimpleNamespace

import pytest
import torch
from command_line import invoke, last_error_of, succeed
from golden_data import load_json, load_npz
from ranks import on_ranks

from lm_human_preferences import label_types
from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.distributed.comm import LocalComm
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams import policy_options
from lm_human_preferences.plan.phases import TrainPolicy
from lm_human_preferences.trainers import health, policy_hooks, reward_hooks
from lm_human_preferences.trainers.reward_trainer import LearnedBatch, RewardModelTrainer
from lm_human_preferences.training import optimizer
from lm_human_preferences.utils import logging

HEALTHY = {
    'ppo/loss/total': 0.3,
    'objective/kl': 5.0,
    'objective/score': 1.0,
    'ppo/policy/entropy': 1.0,
    policy_hooks.PENALIZED: 0.2,
}
NAN, INF = float('nan'), float('inf')


def limits(**overrides):
    found = policy_options.HParams()
    found.override_from_dict(
        {
            'task.response_length': 24,
            'task.truncate_token': 13,
            'rewards.adaptive_kl': 'on',
            'rewards.adaptive_kl.target': 6.0,
        }
    )
    found.override_from_dict(overrides)
    return policy_hooks.policy_limits(TrainPolicy(found, source=None))


@pytest.mark.parametrize(
    'changes, settings, rings',
    [
        ({}, {}, None),
        ({'objective/kl': 29.9}, {}, None),
        ({'objective/kl': 59, 'objective/score': 0.5}, {}, None),
        ({'ppo/loss/total': NAN}, {}, 'ppo/loss/total'),
        ({'objective/score': -INF}, {}, 'objective/score'),
        ({'objective/kl': 61}, {}, 'objective/kl'),
        ({'objective/kl': 31}, {}, 'objective/kl'),
        ({'objective/kl': 31}, {'rewards.adaptive_kl': None}, 'objective/kl'),
        ({'objective/kl': 23}, {'rewards.adaptive_kl': None}, None),
        ({'objective/kl': 49, 'objective/score': 0}, {'rewards.adaptive_kl': None}, 'objective/kl'),
        ({'ppo/policy/entropy': 0.01}, {}, 'ppo/policy/entropy'),
        ({policy_hooks.PENALIZED: 0.96}, {}, policy_hooks.PENALIZED),
        ({'objective/score_std': 0.69}, {}, None),
        ({'objective/score_std': 0.71}, {}, 'objective/score_std'),
    ],
)
def test_rules(changes, settings, rings):
    alarms = policy_hooks.policy_alarms(
        {**HEALTHY, **changes},
        {**HEALTHY, 'objective/score': 0.9, 'objective/score_std': 0.4},
        limits(**settings),
    )
    assert [alarm.statistic for alarm in alarms] == ([rings] if rings else [])


def test_no_alarm_in_the_recorded_trainings():
    """Ten trainings of the original, to three times the target KL and 1/25 of the entropy."""
    curves, settings = load_npz('curves', 'curves.npz'), load_json('curves', 'overrides.json')
    settings = limits(
        **{key: settings[key] for key in ('rewards.adaptive_kl.target', 'task.response_length')}
    )
    for seed in range(10):
        first, *steps = (
            {**{name: runs[seed, i] for name, runs in curves.items()}, policy_hooks.PENALIZED: 0}
            for i in range(150)
        )
        assert not any(policy_hooks.policy_alarms(stats, first, settings) for stats in steps)


@pytest.mark.parametrize(
    'agreements, loss, rings',
    [
        ([0.2] * 10, 1.0, []),
        ([], 1.0, []),
        ([-0.1] * 10, 1.0, []),
        ([-0.2] * 10, 1.0, ['agreement']),
        ([0.0] * 10, 1.0, []),
        ([], NAN, ['loss']),
        ([0.2] * 10, 2.0, []),
        ([], 9.0, []),
        ([0.2] * 10, 2.1, ['loss']),
        ([-0.2] * 10, 9.0, ['agreement', 'loss']),
    ],
)
def test_rules_of_reward_training(agreements, loss, rings):
    """320 labels: the limit of the agreement is -0.11; guessing among four has a loss of 1.39."""
    judged = [LearnedBatch(32, loss, agreement) for agreement in agreements]
    alarms = reward_hooks.reward_alarms({'loss': loss}, judged, guessing_loss=1.386)
    assert [alarm.statistic for alarm in alarms] == rings


def test_a_small_last_batch_rings_no_alarm_alone():
    """Each label counts alike: here a bad one after 32 good ones."""
    judged = [LearnedBatch(32, 1.0, 0.2), LearnedBatch(1, 4.0, -1.0)]
    assert reward_hooks.reward_alarms({'loss': 4.0}, judged, guessing_loss=1.386) == []


@pytest.mark.parametrize(
    'name, labels, expected',
    [
        ('best_of_4', {'best': [0, 3]}, 1.3862944),
        ('scalar_rating', {'score': [1.0, 5.0]}, 4.0),
        ('scalar_compare', {'difference': [1.0, -3.0]}, 5.0),
    ],
)
def test_loss_of_guessing(name, labels, expected):
    labels = {field: torch.tensor(values) for field, values in labels.items()}
    assert label_types.get(name).guessing_loss(labels) == pytest.approx(expected)


def test_a_reward_model_that_ends_above_guessing_is_reported(tmp_path, monkeypatch):
    # No learning rate leads there, and not to NaN, on every processor.
    monkeypatch.setattr(reward_hooks, 'FAR_ABOVE_GUESSING', 0.1)
    result = succeed(f'train_reward test first --mpi 1 --save_dir {tmp_path}')
    told = 'WARNING: step 32: the loss of the reward model ended far above that of guessing, 1.386'
    assert told in result.stdout


@pytest.mark.parametrize('loss, is_shown', [(1.386, False), (1.387, True), (2.5, False)])
def test_a_reward_model_that_ends_at_guessing_is_reported(monkeypatch, loss, is_shown):
    """Of four: ln 4 is 1.38629. The alarm of far larger losses says enough."""
    monkeypatch.setattr(reward_hooks, 'mean_loss', lambda batches: loss)
    words = 'train_reward mock_sentiment first --mpi 1 --save_dir None --labels.num_train 512'
    printed = succeed(words).output
    warning = f'WARNING: the reward model ended no better than by guessing (loss {loss}, of guess'
    assert (warning in printed) == is_shown


@pytest.mark.parametrize(
    'name, labels, rewards, expected',
    [
        ('best_of_3', {'best': [1, 0]}, [[0, 2, 1], [1, 2, 0]], 0.5),
        ('best_of_3', {'best': [1]}, [[0, 0, 0]], 0),
        ('best_of_1', {'best': [0]}, [[1]], 0),
        ('best_of_2', {'best': [1, 1]}, [[3, 1], [2, 0]], -1),
        ('scalar_compare', {'difference': [1.0, -2.0, 0.0]}, [[0, 5], [1, 3], [0, 1]], 0),
        ('scalar_rating', {'score': [1.0, 2.0, 3.0]}, [[-2], [-4], [-6]], -1),
        ('scalar_rating', {'score': [1.0]}, [[1]], 0),
    ],
)
def test_agreement(name, labels, rewards, expected):
    labels = {field: torch.tensor(values) for field, values in labels.items()}
    found = label_types.get(name).agreement(torch.tensor(rewards, dtype=torch.float32), labels)
    assert found.item() == pytest.approx(expected, abs=1e-6)


class Checkpointer:
    saved = 0

    def save_on_error(self, trainer):
        self.saved += 1


ALARM = health.Alarm('objective/kl', 61.0, 60.0, 'too far')


class Trainer:
    def __init__(self, comm=None):
        self.logger, self.texts = self, []
        self.comm = comm or LocalComm()

    def log_text(self, tag, text, step):
        assert tag == 'alarms'
        self.texts.append((step, text))


@pytest.mark.parametrize('console', ['summary', 'original'])
def test_warnings_are_seldom_and_always_heard(console, capsys, monkeypatch):
    monkeypatch.setattr(logging, '_console', console)
    trainer = Trainer()
    monitor = health.HealthMonitor('warn', trainer, Checkpointer())
    for step in range(10, 250):
        monitor.raise_alarms(step, [ALARM])
    # Step 10 has been counted once it is done; TensorBoard counts from 0.
    assert trainer.texts == [(step, f'    {ALARM}') for step in (9, 109, 209)]
    health.HealthMonitor('off', None, Checkpointer()).raise_alarms(10, [ALARM])
    assert capsys.readouterr().out.splitlines() == [
        f'WARNING: step {step}: too far (objective/kl is 61, the limit 60)'
        for step in (10, 110, 210)
    ]


def test_stop_stops_every_rank():
    def work(comm):
        checkpointer = Checkpointer()
        with pytest.raises(UserError, match='stopped at step 10 by --run.on_anomaly stop: too far'):
            health.HealthMonitor('stop', Trainer(comm), checkpointer).raise_alarms(10, [ALARM])
        return checkpointer.saved

    assert on_ranks(2, work) == [1, 1]


BASE = (
    'train_policy test first --mpi 1 --save_dir {} --ppo.total_episodes 320 --run.save_interval 1'
)


def test_a_training_without_numbers_is_stopped_and_the_step_before_is_whole(tmp_path):
    result = invoke(
        f'{BASE.format(tmp_path)} --run.on_anomaly stop --ppo.lr 2e38 --ppo.noptepochs 1 '
        '--rewards.train_new_model off --rewards.trained_model test'
    )
    assert 'WARNING' not in result.stdout
    told = last_error_of(result)
    assert told.startswith('stopped at step 2 by --run.on_anomaly stop: the loss is NaN')
    directory = tmp_path / 'first' / 'policy' / 'checkpoints'
    assert (directory / 'model.ckpt-2.index').exists()
    prefix, _ = checkpoints.latest_resumable(directory)
    assert prefix.endswith('model.ckpt-1')  # from which resume goes on


def test_a_reward_model_that_learns_the_opposite_stops_each_command(tmp_path, monkeypatch):
    """But for that, mode and settings let both trainings end."""
    succeed(f'{BASE.format(tmp_path / "healthy")} --run.on_anomaly stop')
    minimize = optimizer.Adam.minimize
    monkeypatch.setattr(
        optimizer.Adam, 'minimize', lambda adam, loss, lr: minimize(adam, loss, -lr)
    )
    reward = f'train_reward test reward --mpi 1 --save_dir {tmp_path}'
    for words in (reward, BASE.format(tmp_path)):
        assert last_error_of(invoke(f'{words} --run.on_anomaly stop')).startswith(
            'stopped at step 32 by --run.on_anomaly stop: the reward model is worse than chance'
        )
    assert not (tmp_path / 'reward/reward_model/checkpoints').exists()
    assert not (tmp_path / 'first/policy').exists()


def test_rewards_that_are_no_numbers_are_told_in_one_line():
    """Where nothing has stopped the training before they were to be normalised."""
    result = invoke(
        'train_policy test first --mpi 1 --save_dir None --ppo.total_episodes 64'
        ' --rewards.train_new_model.labels.num_train 64 --rewards.train_new_model.lr 2e38'
    )
    told = 'the rewards of 256 samples are nan +- nan, so they cannot be normalised: lower the'
    assert last_error_of(result).startswith(told)


@pytest.mark.parametrize(
    'labels, steps', [(64, 2), (68, 3), (16, 2), (20, 3), (8, 1), (3, 1)], ids=str
)
def test_steps_that_tell_how_a_training_of_rewards_went(labels, steps):
    """In batches of 8: a quarter of the whole ones, or all of fewer than four, and what remains."""
    settings = SimpleNamespace(batch_size=8)
    trainer = SimpleNamespace(num_train=labels, settings=settings, batches=list(range(100)))
    assert len(RewardModelTrainer.judged_batches(trainer)) == steps
