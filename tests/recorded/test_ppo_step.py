"""PPO step around the updates: rewards, logged statistics, KL controllers, schedule."""

import pytest
import torch
from compare import assert_close
from golden_data import json_if_there, load_json, load_npz, under
from ranks import on_ranks
from trainers import hparams_of, ppo_trainer

from lm_human_preferences import ppo, train_policy
from lm_human_preferences.distributed import comm as comms

FOLDERS = [folder for folder in ('ppo', 'ppo_2ranks') if json_if_there(folder, 'configs.json')]
CLOCK = {'elapsed/fps', 'elapsed/time'}


def with_rewards(configs, **rewards):
    hparams = configs['configs'][0]['hparams']
    return {**hparams, 'rewards': {**hparams['rewards'], **rewards}}


@pytest.mark.parametrize('folder', FOLDERS)
def test_rewards_and_step_statistics(folder):
    configs, arrays = load_json(folder, 'configs.json'), load_npz(folder, 'pieces.npz')
    inputs, size = under(arrays, 'inputs/'), configs['ranks']
    kl_coef = float(arrays['compute_rewards/kl_coef'])

    def work(comm):
        rows = slice(comm.rank, None, size)
        scores, logprobs, ref_logprobs = (
            torch.from_numpy(inputs[name][rows]) for name in ('scores', 'logprobs', 'ref_logprobs')
        )
        trainer = ppo_trainer(with_rewards(configs, kl_coef=kl_coef), comm)
        trainer.steps_done = int(arrays['record_step_stats_global_step'])
        coef = trainer.kl_ctl.value
        rewards, non_score_reward = ppo.compute_rewards(scores, logprobs, ref_logprobs, coef)
        assert_close(rewards, arrays['compute_rewards/rewards'][rows], rtol=1e-6, atol=1e-7)
        expected = arrays['compute_rewards/non_score_reward'][rows]
        assert_close(non_score_reward, expected, rtol=1e-6, atol=1e-7)
        train_stats = {
            name: list(torch.from_numpy(values[comm.rank]))
            for name, values in under(inputs, 'train_stats/').items()
        }
        nothing = torch.full_like(logprobs, torch.nan)
        unused = dict.fromkeys(('queries', 'responses', 'values', 'scored_responses'), nothing)
        of_step = {'logprobs': logprobs, 'ref_logprobs': ref_logprobs, 'scores': scores}
        rollout = ppo.Rollout(**unused, **of_step, rewards=rewards)
        return trainer.record_step_stats(
            rollout,
            kl_coef=trainer.kl_ctl.value,
            non_score_reward=non_score_reward,
            train_stats=train_stats,
        )

    expected = under(arrays, 'record_step_stats/')
    for stats in on_ranks(size, work):
        assert set(stats) == set(expected) | CLOCK
        # The step began with the trainer, moments ago.
        assert isinstance(stats['elapsed/fps'], int) and stats['elapsed/fps'] > 0
        assert 0 <= stats['elapsed/time'] < 60
        for name, value in expected.items():
            assert_close(stats[name], value, rtol=1e-5, atol=1e-7, name=name)


@pytest.mark.parametrize('folder', FOLDERS)
def test_kl_controllers(folder):
    recorded = load_json(folder, 'kl_controllers.json')
    for case in recorded['adaptive']:
        hparams = train_policy.AdaptiveKLParams(target=case['target'], horizon=case['horizon'])
        controller, values = train_policy.AdaptiveKLController(case['init'], hparams), []
        for current in case['current']:
            controller.update(current, case['n_steps'])
            values.append(controller.value)
        assert_close(values, case['values'], rtol=1e-14)
    fixed = train_policy.FixedKLController(recorded['fixed']['init'])
    fixed.update(17.0, 8)
    assert fixed.value == recorded['fixed']['after_update']


@pytest.mark.parametrize('folder', FOLDERS)
def test_number_of_updates(folder):
    for config in load_json(folder, 'configs.json')['configs']:
        hparams = hparams_of(train_policy.HParams, config['hparams'])
        assert hparams.ppo.nupdates == config['nupdates']


def test_a_last_incomplete_batch_counts():
    hparams = train_policy.HParams()
    hparams.ppo.total_episodes, hparams.ppo.batch_size = 65, 16
    assert hparams.ppo.nupdates == 5


@pytest.mark.parametrize('folder', FOLDERS)
def test_the_controller_chosen(folder):
    """Adaptive where rewards.adaptive_kl is on, starting from rewards.kl_coef."""
    configs, values = load_json(folder, 'configs.json'), []
    for adaptive_kl in (None, {'target': 4.0, 'horizon': 10}):
        controller = ppo_trainer(
            with_rewards(configs, kl_coef=0.3, adaptive_kl=adaptive_kl), comms.init_comm()
        ).kl_ctl
        controller.update(2.0, 5)
        values.append(controller.value)
    assert values == [0.3, pytest.approx(0.3 * (1 - 0.2 * 5 / 10))]


class SpyController:
    def __init__(self):
        self.value, self.told = 0.5, []

    def update(self, current, n_steps):
        self.told.append((current, n_steps))
        self.value += 1


@pytest.mark.parametrize('folder', FOLDERS)
def test_steps_tell_the_controller_their_kl_and_use_its_coefficient(folder):
    """The recorded runs stay so far below their target that any small KL would do."""
    nested = with_rewards(load_json(folder, 'configs.json'))
    query_length = nested['task']['query_length']
    trainer = ppo_trainer(nested, comms.init_comm())
    trainer.kl_ctl = SpyController()
    trainer.query_sampler = lambda: {'tokens': torch.arange(4 * query_length).reshape(4, -1) % 26}
    trainer.ppo.batch_size = 4
    ones = torch.ones(4)
    trainer.score_fn = lambda queries, responses: (ones, responses, {'score': ones})
    stats = [trainer.step() for _ in range(3)]
    assert trainer.kl_ctl.told == [(s['objective/kl'], 4) for s in stats]
    assert [s['objective/kl_coef'] for s in stats] == [0.5, 1.5, 2.5]
    for s in stats:
        expected = 1 - s['objective/kl_coef'] * s['objective/kl']
        assert_close(s['objective/score_total'], expected, atol=1e-6)
