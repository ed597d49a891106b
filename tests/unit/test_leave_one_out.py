"""Several responses to each query: each is compared with the mean of the others."""

import math

import pytest
import torch
from compare import assert_norm_close
from tiny_causal_lms import write_chat_model
from trainers import learner_with, rollout_of

from lm_human_preferences import ppo, train_policy
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import UserError
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.policy import Policy, responses_in_a_row
from lm_human_preferences.utils.core import whiten

SAME, QUERY, LIMIT = 3, 3, 5  # of at most 8 tokens


@pytest.fixture(scope='module')
def llama(tmp_path_factory):
    return str(write_chat_model(tmp_path_factory.mktemp('llama')))


@pytest.fixture(params=['test', 'llama'])
def policy(request, llama):
    torch.manual_seed(1)
    policy = Policy(TrainedModel(llama if request.param == 'llama' else 'test'))
    torch.nn.init.normal_(policy.model.heads['value'].w)
    return policy


def queries_of(policy):
    """Two queries, one of them with padding, each as often as it is answered."""
    queries = torch.randint(1, 25, (2, QUERY), generator=torch.Generator().manual_seed(0))
    queries[0, -1] = policy.padding_token
    return queries.repeat_interleave(SAME, dim=0)


def test_baselines_and_advantages_by_hand():
    rewards = torch.tensor([[0.0, 1], [1, 1], [1, 5], [0, 0], [-1, 1], [0, 3]])
    baselines = ppo.leave_one_out(rewards, 3)
    assert baselines.tolist() == [4, 3.5, 1.5, 1.5, 1.5, 0]
    assert ppo.leave_one_out(rewards, 1) is None
    rollout = rollout_of(
        queries=torch.ones(6, 1),
        responses=torch.ones(6, 2),
        logprobs=torch.ones(6, 2),
        values=torch.full((6, 2), 9.0),
    )
    rollout.rewards, rollout.baselines = rewards, baselines
    minibatch = ppo.add_advantages(rollout, train_policy.PpoHParams(samples_per_query=3))
    of_responses = torch.tensor([[-3.0], [-1.5], [4.5], [-1.5], [-1.5], [3]]).expand(-1, 2)
    torch.testing.assert_close(minibatch.advantages, whiten(of_responses))
    assert torch.equal(minibatch.returns, rewards.sum(1, keepdim=True).expand(-1, 2))
    assert torch.equal(minibatch.values, baselines[:, None].expand(-1, 2))


def test_an_analysis_computes_a_query_once_with_the_same_result(policy):
    """In rows of a few responses, as the cost of a row grows with the square of their number."""
    assert [responses_in_a_row(n) for n in (1, 6, 12, 16, 48)] == [1, 6, 6, 8, 8]
    queries = queries_of(policy).repeat_interleave(4, dim=0)
    responses = torch.randint(1, 25, (24, LIMIT), generator=torch.Generator().manual_seed(1))
    for row, end in (0, 1), (2, 4):
        responses[row, end:] = policy.padding_token
    weights = torch.randn(3, 24, LIMIT)
    results = []
    for same in (1, SAME, 12):
        policy.model.zero_grad()
        outputs = policy.analyze_responses_op(queries, responses, same)
        sum((w * out).sum() for w, out in zip(weights, outputs.values())).backward()
        gradients = [p.grad for p in policy.parameters_by_name().values() if p.grad is not None]
        results.append([*outputs.values(), *gradients])
    for expected, *found in zip(*results, strict=True):
        for each in found:
            assert_norm_close(each.detach(), expected.detach(), rtol=1e-5)


def test_sampling_computes_a_query_once_with_the_same_result(policy, monkeypatch):
    policy.temperature = 1e-6
    queries = queries_of(policy)
    expected = policy.respond(queries, LIMIT)
    rows, own = [], policy.model.outputs
    monkeypatch.setattr(
        policy.model, 'outputs', lambda new, *more: rows.append(len(new)) or own(new, *more)
    )
    torch.testing.assert_close(policy.respond(queries, LIMIT, SAME), expected)
    assert rows == [2] + [6] * (LIMIT - 1)


def trainer_of(policy, comm, **settings):
    common = {'task.query_length': QUERY, 'task.response_length': LIMIT, 'ppo.batch_size': 24}
    common |= {'ppo.samples_per_query': SAME, 'ppo.total_episodes': 96, 'ppo.lr': 1e-3}
    trainer = learner_with(policy, {**common, 'rewards.kl_coef': 0.1, **settings}, comm)
    trainer.query_sampler = lambda: {'tokens': torch.arange(24).view(8, QUERY) % 25}
    trainer.score_fn = lambda queries, responses: (responses[:, 0].float(), responses, {})
    return trainer


def test_with_a_relative_coefficient_the_scale_of_the_reward_does_not_matter():
    def learned(scale, **settings):
        torch.manual_seed(1)
        policy = Policy(TrainedModel('test'))
        settings['rewards.relative_kl_coef'] = True
        trainer = trainer_of(policy, Comm(), **settings)
        trainer.ref_policy = Policy(TrainedModel('test'), temperature=0.5)
        scores = []

        def score(queries, responses):
            scores.append(scale * responses[:, 0].float())
            return scores[-1], responses, {}

        trainer.score_fn = score
        trainer.step()
        assert trainer.kl_ctl.value == pytest.approx(0.1 * scores[0].std(correction=0).item())
        trainer.step()
        return trainer.kl_ctl.value, policy.parameters_by_name()

    coefficient, parameters = learned(1)
    of_scaled, others = learned(64)
    assert of_scaled == pytest.approx(64 * coefficient)
    torch.testing.assert_close(others, parameters, rtol=0, atol=1e-6)


@pytest.mark.parametrize('same, reward', [(1, 0.0), (SAME, 1234.5678)])
def test_a_step_whose_rewards_are_all_alike_teaches_nothing_but_has_statistics(same, reward):
    """As those of a strict judge are at first; the policy is still the reference."""
    torch.manual_seed(1)
    policy = Policy(TrainedModel('test'))
    torch.nn.init.zeros_(policy.model.heads['value'].w)
    settings = {'ppo.samples_per_query': same, 'rewards.kl_coef': 0.0}
    trainer = trainer_of(policy, Comm(), **settings)
    scores = torch.full((24,), reward)
    trainer.score_fn = lambda queries, responses: (scores, responses, {})
    queries = torch.ones(24 // same, QUERY, dtype=torch.int64)
    trainer.query_sampler = lambda: {'tokens': queries}
    stats = trainer.step()
    assert all(map(math.isfinite, stats.values())), stats
    assert stats['ppo/returns/var'] == stats['ppo/val/var_explained'] == 0
    assert stats['ppo/loss/policy'] == 0


def test_a_step_keeps_the_responses_to_a_query_together(policy):
    trainer = trainer_of(policy, Comm(), **{'ppo.nminibatches': 2})
    seen = []
    trainer.train_minibatch = lambda rollout: seen.append(rollout) or {}
    trainer.record_step_stats = lambda *args, **stats: {'objective/kl': 0}
    trainer.step()
    assert [len(each) for each in seen] == [12] * 2 * trainer.ppo.noptepochs
    for minibatch in seen:
        of_each = minibatch.queries.view(-1, SAME, QUERY)
        assert torch.equal(of_each, of_each[:, :1].expand(-1, SAME, -1))
        others = minibatch.rewards.sum(1).view(-1, SAME).roll(1, 1)
        others = (others + others.roll(1, 1)) / 2
        torch.testing.assert_close(minibatch.baselines, others.flatten())
    assert len(seen[0].queries.unique(dim=0)) == 4


def test_an_update_is_the_same_in_micro_batches_and_leaves_the_value_head(policy):
    trainer = trainer_of(policy, Comm())
    queries = trainer.query_sampler()['tokens'].repeat_interleave(SAME, dim=0)
    rollout = trainer.generate(queries, SAME)
    rollout.rewards = rollout.logprobs + rollout.scores[:, None]
    rollout.baselines = ppo.leave_one_out(rollout.rewards, SAME)
    gradients = []
    for micro_batch in (None, 6):
        trainer = trainer_of(policy, Comm(), **{'ppo.micro_batch_size': micro_batch})
        trainer.optimizer.gradients.zero_grad = lambda: None  # the update would drop them
        trainer.ppo.lr = 0
        policy.model.zero_grad()
        stats = trainer.train_minibatch(rollout)
        gradients.append({n: p.grad for n, p in policy.parameters_by_name().items()})
        returns = rollout.rewards.sum(1)
        error = (rollout.baselines - returns).square().mean()
        torch.testing.assert_close(stats['val/error'], error)
    assert gradients[0]['heads.value.w'] is None
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    'settings, message',
    [
        ({'batch_size': 30}, '--ppo.batch_size 30 is not a multiple of --ppo.samples_per_query 4'),
        ({'batch_size': 36, 'nminibatches': 2}, '2 x --ppo.samples_per_query 4 = 8: use 32 or 40'),
        ({'micro_batch_size': 6}, '--ppo.micro_batch_size 6 is not a multiple of'),
    ],
)
def test_batches_that_divide_the_responses_to_a_query_are_refused(settings, message):
    hparams = train_policy.HParams()
    hparams.override_from_dict({f'ppo.{name}': value for name, value in settings.items()})
    hparams.ppo.samples_per_query = 4
    with pytest.raises(UserError, match=message.replace('.', r'\.')):
        list(hparams.problems())
