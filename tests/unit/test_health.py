"""Alarms: NaN and a KL divergence far above its limit ring, no healthy training does."""

from unittest import mock

import pytest
from command_line import invoke, last_error_of
from golden_data import load_json, load_npz
from ranks import on_ranks

from lm_human_preferences import train_policy
from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams import policy_options
from lm_human_preferences.training.loop import HealthMonitor

HEALTHY = {'ppo/loss/total': 0.3, 'objective/kl': 5.0, 'objective/score': 1.0}
NAN, INF = float('nan'), float('inf')


def monitor_of(mode='warn', comm=None, **overrides):
    settings = policy_options.HParams()
    settings.override_from_dict(
        {'task.response_length': 24, 'rewards.adaptive_kl.target': 6.0, 'rewards.adaptive_kl': 'on'}
    )
    settings.override_from_dict(overrides)
    most_kl = train_policy.most_kl(settings)
    trainer, checkpointer = mock.Mock(comm=comm or Comm()), mock.Mock()
    return HealthMonitor(mode, trainer, checkpointer, train_policy.FINITE, most_kl)


@pytest.mark.parametrize(
    'changes, settings, rings',
    [
        ({}, {}, ''),
        ({'objective/kl': 60}, {}, ''),
        ({'objective/kl': 61}, {}, 'objective/kl'),
        ({'objective/kl': 48}, {'rewards.adaptive_kl': None}, ''),
        ({'objective/kl': 49}, {'rewards.adaptive_kl': None}, 'objective/kl'),
        ({'objective/kl': NAN}, {}, 'objective/kl'),
        ({'objective/kl': 61, 'ppo/loss/total': NAN}, {}, 'ppo/loss/total'),
        ({'objective/score': -INF}, {}, 'objective/score'),
    ],
)
def test_rules(changes, settings, rings):
    alarm = monitor_of(**settings).alarm({**HEALTHY, **changes})
    assert alarm[0] == rings


def test_no_alarm_in_the_recorded_trainings():
    """Ten trainings of the original, to three times the target KL."""
    curves, settings = load_npz('curves', 'curves.npz'), load_json('curves', 'overrides.json')
    monitor = monitor_of(
        **{key: settings[key] for key in ('rewards.adaptive_kl.target', 'task.response_length')}
    )
    for seed in range(10):
        for step in range(150):
            stats = {name: runs[seed, step] for name, runs in curves.items()}
            assert monitor.alarm(stats) == ('', '')


TOLD = (
    'objective/kl is 61, above 60: the policy has moved far from the initial language model: lower'
    ' --ppo.lr or raise --rewards.kl_coef'
)
FAR = {**HEALTHY, 'objective/kl': 61}


def test_warnings_are_seldom(capsys):
    monitor = monitor_of()
    for step in range(10, 250):
        monitor.after_step(step, FAR)
    # Step 10 has been counted once it is done; TensorBoard counts from 0.
    logged = [mock.call('alarms', f'    {TOLD}', step) for step in (9, 109, 209)]
    assert monitor.trainer.logger.log_text.call_args_list == logged
    told = [f'WARNING: step {step}: {TOLD}' for step in (10, 110, 210)]
    assert capsys.readouterr().out.splitlines() == told


def test_stop_stops_every_rank():
    def work(comm):
        monitor = monitor_of('stop', comm)
        with pytest.raises(UserError, match='stopped at step 10 by --run.on_anomaly stop: objecti'):
            monitor.after_step(10, FAR)
        return monitor.checkpointer.save_on_error.call_count

    assert on_ranks(2, work) == [1, 1]


def test_a_training_without_numbers_is_stopped_and_the_step_before_is_whole(tmp_path):
    result = invoke(
        f'train_policy test first --mpi 1 --save_dir {tmp_path} --ppo.total_episodes 320'
        ' --run.save_interval 1 --run.on_anomaly stop --ppo.lr 2e38 --ppo.noptepochs 1'
        ' --rewards.train_new_model off --rewards.trained_model test'
    )
    assert 'WARNING' not in result.stdout
    told = last_error_of(result)
    assert told.startswith('stopped at step 2 by --run.on_anomaly stop: ppo/loss/total is nan')
    directory = tmp_path / 'first' / 'policy' / 'checkpoints'
    assert (directory / 'model.ckpt-2.index').exists()
    prefix, _ = checkpoints.latest_resumable(directory)
    assert prefix.endswith('model.ckpt-1')  # from which resume goes on


def test_a_reward_model_without_numbers_is_stopped_and_not_seen(tmp_path):
    reward = f'train_reward test reward --mpi 1 --save_dir {tmp_path} --lr 2e38'
    told = last_error_of(invoke(f'{reward} --run.on_anomaly stop'))
    assert told.startswith('stopped at step 2 by --run.on_anomaly stop: loss is nan')
    assert not (tmp_path / 'reward/reward_model/checkpoints').exists()


def test_rewards_that_are_no_numbers_are_told_in_one_line():
    """Where nothing has stopped the training before they were to be normalised."""
    result = invoke(
        'train_policy test first --mpi 1 --save_dir None --ppo.total_episodes 64'
        ' --rewards.train_new_model.labels.num_train 64 --rewards.train_new_model.lr 2e38'
    )
    told = 'the rewards of 256 samples are nan +- nan, so they cannot be normalised: '
    assert last_error_of(result).startswith(told)
