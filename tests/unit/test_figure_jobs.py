"""Measurements of the figures' runs, by hand."""

import json
import math
import types

import pytest
import torch
from figures import jobs

from lm_human_preferences import train_policy, train_reward
from lm_human_preferences.evaluation import optimum
from lm_human_preferences.hparams.policy_options import AdaptiveKLParams

# Two responses, as likely as each other, with rewards 0 and 1. The best policy at this KL chooses
# the second nine times in ten; its KL coefficient is 1 / log(9).
KL = 0.9 * math.log(1.8) + 0.1 * math.log(0.2)
HALF = math.log(0.5)


def known(queries=1):
    scores = torch.tensor([[0.0, 1.0]]).repeat(queries, 1).double()
    return jobs.Known(torch.arange(queries)[:, None], torch.full_like(scores, HALF), scores)


@pytest.fixture
def trained(monkeypatch):
    """Policies are not trained: their last point has that KL, and half of the gain."""
    started = types.SimpleNamespace(reward_version=4)

    def take_steps(trainer, hparams, curve, clock):
        assert trainer is started and clock.work == {'policy': 1}
        curve.points.append({'episodes': 80, 'kl': KL, 'known_reward': 0.7})

    monkeypatch.setattr(train_policy, 'take_steps', take_steps)
    monkeypatch.setattr(jobs, 'known_responses', lambda task: {'a task': known(9)}[task])
    monkeypatch.setattr(train_policy, 'start', lambda hparams, curve, comm: started)


def policy_hparams():
    hparams = train_policy.HParams()
    hparams.rewards.train_new_model = train_reward.HParams()
    hparams.rewards.adaptive_kl = AdaptiveKLParams(target=KL)
    return hparams


@pytest.mark.parametrize('reward_model, scale', [('mock', 1), ('directory', 2)])
def test_a_policy_begins_at_the_coefficient_of_its_target(
    tmp_path, monkeypatch, trained, reward_model, scale
):
    """Of the reward model that it is trained on, for which a part of the queries does."""

    def rewards_of_all(model, queries, length):
        assert (model, length) == ('directory', hparams.task.response_length)
        assert queries.tolist() == [[0], [8]]
        return known(2).scores * scale

    monkeypatch.setattr(optimum, 'all_rewards', rewards_of_all)
    monkeypatch.setattr(jobs.rewards, 'TrainedRewardModel', lambda path, encoding: path)
    hparams = policy_hparams()
    jobs.run_policy(str(tmp_path / 'x.json'), hparams, reward_model, 'a task')
    found = json.loads((tmp_path / 'x.json').read_text())
    assert found['kl_coef'] == pytest.approx(scale / math.log(9), rel=1e-4)
    assert (hparams.rewards.kl_coef, hparams.rewards.trained_model) == (
        found['kl_coef'],
        reward_model,
    )
    assert hparams.rewards.train_new_model is None
    assert found['optimal_reward'] == pytest.approx(0.9, rel=1e-4)
    assert found['curve'] == [
        {'episodes': 0, 'kl': 0.0, 'known_reward': 0.5},
        {'episodes': 80, 'kl': KL, 'known_reward': 0.7},
    ]


def test_a_point_of_the_curve(monkeypatch):
    trainer = types.SimpleNamespace(
        responses=types.SimpleNamespace(length=5),
        ppo=types.SimpleNamespace(batch_size=20),
        steps_done=3,
        policy='policy',
    )
    responses = known(2)

    def logprobs(policy, queries, length):
        assert (policy, length) == ('policy', 5)
        assert queries is responses.queries
        return torch.tensor([[0.1, 0.9], [0.5, 0.5]]).double().log()

    monkeypatch.setattr(optimum, 'all_logprobs', logprobs)
    with jobs.Curve(responses) as curve:
        curve.save(trainer)
    assert curve.points[1] == pytest.approx({'episodes': 60, 'kl': KL / 2, 'known_reward': 0.7})


def test_the_frontier_has_the_highest_reward_at_each_kl(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, 'known_responses', lambda task: {'a task': known()}[task])
    jobs.write_frontier(str(tmp_path / 'x.json'), 'a task')
    points = json.loads((tmp_path / 'x.json').read_text())
    assert len(points) == 50
    for point in points:
        share = point['known_reward']
        rest = 1 - share
        kl = share * math.log(2 * share) + (rest * math.log(2 * rest) if rest > 0 else 0)
        assert point['kl'] == pytest.approx(kl, abs=1e-6)
