"""What the runs of the figures measure, by hand."""

import json
import math
import types

import pytest
import torch

from lm_human_preferences import lm_tasks, train_policy, train_reward
from lm_human_preferences.evaluation import optimum
from lm_human_preferences.hparams.policy_options import AdaptiveKLParams
from lm_human_preferences.reproduction import jobs, online_figures
from lm_human_preferences.rewards import RewardModel

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

    def take_steps(trainer, curve, clock):
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


def test_the_share_of_the_gain_of_a_policy_with_labels_on_the_way(tmp_path, monkeypatch, trained):
    monkeypatch.setattr(online_figures, 'own_accuracy', lambda trainer: trainer.reward_version / 8)
    online_figures.run_online(str(tmp_path / 'x.json'), policy_hparams(), 'a task')
    assert json.loads((tmp_path / 'x.json').read_text()) == pytest.approx(
        {
            'models': 4,
            'kl': KL,
            'known_reward': 0.7,
            'optimal_reward': 0.9,
            'share': 0.5,
            'own_accuracy': 0.5,
        },
        rel=1e-4,
    )


def test_a_point_of_the_curve(monkeypatch):
    trainer = types.SimpleNamespace(hparams=policy_hparams(), global_step=3, policy='policy')
    trainer.hparams.ppo.batch_size = 20
    responses = known(2)

    def logprobs(policy, queries, length):
        assert (policy, length) == ('policy', trainer.hparams.task.response_length)
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


def test_a_reward_model_is_there_when_it_is_finished(tmp_path, monkeypatch):
    def train(hparams, comm):
        assert not (tmp_path / 'x.part').exists() and not (tmp_path / 'x').exists()
        (tmp_path / 'x.part').mkdir()
        (tmp_path / 'x.part' / 'new').touch()
        assert (hparams.run.save_dir, comm.size) == (f'{tmp_path}/x.part', 1)

    monkeypatch.setattr(train_reward, 'train', train)
    (tmp_path / 'x.part').mkdir()  # of a run that was killed
    (tmp_path / 'x.part' / 'old').touch()
    jobs.run_reward(f'{tmp_path}/x', train_reward.HParams())
    assert [path.name for path in (tmp_path / 'x').iterdir()] == ['new']


class Scores(RewardModel):
    """The reward of a response is what `scores` has for its last token."""

    def __init__(self, scores):
        torch.nn.Module.__init__(self)
        self.scores = torch.tensor(scores)

    def score(self, queries, responses):
        return self.scores[responses[:, -1]]


def test_how_often_a_reward_model_is_right_about_the_policy(monkeypatch):
    """One question of four has equal responses; of the others it is right about two."""
    responses = torch.tensor(
        [[[1, t] for t in of_query] for of_query in ([0, 1, 2, 3], [2, 2, 2, 2], [1, 0, 1, 0])]
        + [[[0, 2], [1, 2], [0, 3], [0, 0]]]
    )
    queries = torch.tensor([[5], [6], [7], [8]])

    def respond(rows, length):
        assert rows.tolist() == [[5]] * 4 + [[6]] * 4 + [[7]] * 4 + [[8]] * 4 and length == 2
        return {'responses': responses.flatten(0, 1)}

    def make_query_sampler(*, hparams, encoder, batch_size, mode):
        assert (encoder, batch_size, mode) == ('encoder', online_figures.OWN_QUESTIONS, 'test')
        return lambda: {'tokens': queries}

    monkeypatch.setattr(lm_tasks, 'make_query_sampler', make_query_sampler)
    monkeypatch.setattr(
        online_figures, 'load_reward_model', lambda name, encoding: Scores([0.0, 1.0, 2.0, 3.0])
    )
    hparams = policy_hparams()
    hparams.task.response_length = 2
    trainer = types.SimpleNamespace(
        hparams=hparams,
        policy=types.SimpleNamespace(
            encoder='encoder', respond=respond, trained_model=types.SimpleNamespace(encoding=None)
        ),
        networks={'reward_model': Scores([0.0, 1.0, 3.0, 2.0])},
    )
    assert online_figures.own_accuracy(trainer) == pytest.approx(1 / 3)
    trainer.networks['reward_model'] = Scores([0.0, 1.0, 2.0, 7.0])
    assert online_figures.own_accuracy(trainer) == 1


ROWS = [
    {
        'retrainings': retrainings,
        'error': error,
        'seed': seed,
        'kl': 4.0 + seed,
        'known_reward': 2.0 * seed,
        'share': 0.5 + 0.125 * seed - error,
        'own_accuracy': 0.25 * seed + retrainings / 8,
    }
    for error in (0.25, 0.0)
    for retrainings in (0, 3)
    for seed in (1, 2)
]


def test_the_summary_of_labels_on_the_way():
    lines = online_figures.summary(ROWS)
    assert [line.split() for line in lines[:3]] == [
        'error retrainings KL reward share of seeds accuracy of seeds'.split(),
        '0 0 5.50 3.00 68.8% 62.5% to 75.0% 37.5% 25.0% to 50.0%'.split(),
        '0 3 5.50 3.00 68.8% 62.5% to 75.0% 75.0% 62.5% to 87.5%'.split(),
    ]
    assert [line.split()[0] for line in lines[3:]] == ['0.25', '0.25']
    assert len({len(line) for line in lines}) == 1
