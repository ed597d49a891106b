"""Gradients and parameters of several ranks and of micro-batches, equal to 1e-6 (float64)."""

import numpy as np
import pytest
import torch
from compare import assert_norm_close
from experiments import resolved
from ranks import give_each_thread_its_own_numpy_random, need, on_ranks
from trainers import learner_with, rollout_of

from lm_human_preferences import train_policy, train_reward
from lm_human_preferences.distributed import comm as comms
from lm_human_preferences.language.model import Model
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.plan.phases import reward_phase
from lm_human_preferences.policy import Policy
from lm_human_preferences.rewards import RewardModel

RANKS = pytest.mark.parametrize('size, in_parts', [(2, False), (3, True)], ids=str)
BATCH, RTOL = 24, 1e-6
# Labels in each batch of the reward model: the last ones are too few for an equal share each.
BATCHES = (24, 24, 5, 1)
QUERY_LENGTH, RESPONSE_LENGTH, LETTERS = 3, 4, 27


def tokens(generator, *shape):
    return torch.randint(LETTERS + 1, shape, generator=generator)  # the last one is padding


def labels():
    generator = torch.Generator().manual_seed(1)
    count = sum(BATCHES)
    samples = {f'sample{i}': tokens(generator, count, RESPONSE_LENGTH) for i in range(4)}
    return {
        'query': tokens(generator, count, QUERY_LENGTH),
        **samples,
        'best': torch.randint(4, (count,), generator=generator),
    }


def rollouts():
    generator = torch.Generator().manual_seed(2)
    shape = BATCH, RESPONSE_LENGTH
    drawn = torch.randn((3, *shape), generator=generator, dtype=torch.float64)
    logprobs, values, rewards = drawn
    return rollout_of(
        queries=tokens(generator, BATCH, QUERY_LENGTH),
        responses=tokens(generator, *shape) % LETTERS,
        logprobs=-np.log(LETTERS) + 0.1 * logprobs,
        values=0.2 * values,
        rewards=rewards,
    )


def starting_alike(trainer):
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in trainer.optimizer.parameters.items():
            # What scales is near 1, all else near 0.
            parameter.fill_(name.endswith(('/g', '/gain')))
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return trainer


def ppo_trainer(comm, **settings):
    common = {'ppo.batch_size': BATCH * comm.size, 'ppo.nminibatches': 2, 'ppo.lr': 1e-3}
    common |= {'task.query_length': QUERY_LENGTH, 'task.response_length': RESPONSE_LENGTH}
    policy = Policy(TrainedModel('test'), temperature=0.7)
    policy.model.double()
    return starting_alike(learner_with(policy, {**common, **settings}, comm))


class Recorded:
    def __init__(self, trainer):
        self.gradients, self.parameters = [], []
        self.adam, self.drop = trainer.optimizer, trainer.optimizer.gradients.zero_grad
        trainer.optimizer.gradients.zero_grad = self.recorded_end_of_update

    def recorded_end_of_update(self):
        self.gradients.append({name: p.grad.clone() for name, p in self.adam.parameters.items()})
        self.drop()
        after = {name: p.detach().clone() for name, p in self.adam.parameters.items()}
        self.parameters.append(after)


def flat(tensors):
    return np.concatenate([tensor.numpy().ravel() for tensor in tensors.values()])


def assert_same(run, comm, alone, **settings):
    """Compare every update of `run` on the ranks of `comm` with that of one rank."""
    ours, theirs = run(comm, **settings), alone
    assert len(ours.gradients) == len(theirs.gradients) > 1
    for gradients, expected in zip(ours.gradients, theirs.gradients, strict=True):
        assert_norm_close(flat(gradients), flat(expected), rtol=RTOL, name='gradient')
    for parameters, expected in zip(ours.parameters, theirs.parameters, strict=True):
        for name, values in expected.items():
            assert_norm_close(parameters[name], values, rtol=RTOL, name=name)
    moved = flat(theirs.parameters[-1]) - flat(theirs.parameters[0])
    assert np.linalg.norm(moved) > 1e3 * RTOL * np.linalg.norm(flat(theirs.parameters[0]))
    return ours, theirs


def reward_training(comm, **settings):
    """Record updates on the same `BATCHES` of labels, however many ranks share them."""
    hparams = train_reward.HParams(batch_size=BATCH, lr=1e-3)
    hparams.override_from_dict({'labels.type': 'best_of_4', 'run.log_interval': 10**9, **settings})
    phase = reward_phase(hparams)
    trainer = train_reward.RewardModelTrainer(
        reward_model=RewardModel(TrainedModel('test')).double(),
        policy=None,
        query_sampler=None,
        labels=labels(),
        phase=phase,
        logger=train_reward.logger_of(phase, comm),
        comm=comm,
    )
    starting_alike(trainer)
    recorded = Recorded(trainer)
    recorded.losses = []
    for indices in np.split(np.arange(sum(BATCHES)), np.cumsum(BATCHES)[:-1]):
        stats = trainer.train_batch(indices[comm.rank :: comm.size], lr=1e-3)
        recorded.losses.append(stats['loss'])
    return recorded


def policy_training(comm, **settings):
    """Record all passes over the same rollouts, which every rank has, shuffled alike."""
    trainer = ppo_trainer(comm, **settings)
    recorded = Recorded(trainer)
    np.random.seed(3)
    recorded.stats = trainer.train(rollouts())
    return recorded


@RANKS
def test_reward_training(size, in_parts):
    need(size)
    alone = reward_training(comms.Comm())

    def work(comm):
        settings = {'micro_batch_size': 3 if in_parts else None}
        ours, theirs = assert_same(reward_training, comm, alone, **settings)
        np.testing.assert_allclose(ours.losses, theirs.losses, rtol=RTOL)

    on_ranks(size, work)


@RANKS
def test_policy_training(size, in_parts, monkeypatch):
    """All ranks have the same rows: whitening is over a rank's own rows."""
    need(size)
    give_each_thread_its_own_numpy_random(monkeypatch)
    alone = policy_training(comms.Comm())
    settings = {'ppo.micro_batch_size': 5 if in_parts else None}
    on_ranks(size, lambda comm: assert_same(policy_training, comm, alone, **settings))


@pytest.mark.parametrize('whiten_rewards, micro_batch_size', [(True, 1), (False, 5)])
def test_micro_batches_of_policy_training(micro_batch_size, whiten_rewards):
    """Whitening and advantages are over the whole minibatch; statistics are the same too."""
    settings = {'ppo.whiten_rewards': whiten_rewards}
    parts, whole = assert_same(
        policy_training,
        comms.Comm(),
        policy_training(comms.Comm(), **settings),
        **settings,
        **{'ppo.micro_batch_size': micro_batch_size},
    )
    assert set(parts.stats) == set(whole.stats)
    for name, values in whole.stats.items():
        np.testing.assert_allclose(parts.stats[name], values, rtol=RTOL, err_msg=name)


def test_no_more_rows_at_a_time(monkeypatch):
    rows, outputs = [], Model.outputs

    def counted(self, tokens, *args):
        rows.append(len(tokens))
        return outputs(self, tokens, *args)

    monkeypatch.setattr(Model, 'outputs', counted)
    size, expected = 5, {5, BATCH % 5}
    ppo = {'batch_size': BATCH, 'total_episodes': BATCH, 'micro_batch_size': size}
    settings = {f'ppo.{name}': value for name, value in ppo.items()}
    settings |= {'rewards.train_new_model': None, 'rewards.trained_model': 'test'}
    train_policy.train(resolved('train_policy', 'test', settings))
    assert set(rows) == expected
    rows.clear()
    names = ('labels.num_train', 'batch_size', 'rollout_batch_size', 'normalize_samples')
    settings = {**dict.fromkeys(names, BATCH), 'micro_batch_size': size}
    train_reward.train(resolved('train_reward', 'test', settings))
    assert set(rows) == expected


def test_samples_in_parts_go_together():
    trainer = ppo_trainer(comms.Comm(), **{'ppo.micro_batch_size': 5})
    trainer.policy.model.float()
    trained = []
    trainer.query_sampler = lambda: {
        'tokens': tokens(torch.Generator().manual_seed(5), BATCH, QUERY_LENGTH) % LETTERS
    }
    trainer.score_fn = lambda queries, responses: (1.0 * responses[:, 0], responses + 1, {})
    trainer.train = trained.append
    trainer.record_step_stats = lambda rollout, **given: {'objective/kl': 0.0}
    trainer.step()
    (rollout,) = trained
    assert torch.equal(rollout.queries, trainer.query_sampler()['tokens'])
    assert torch.equal(rollout.scores, 1.0 * rollout.responses[:, 0])
    assert torch.equal(rollout.scored_responses, rollout.responses + 1)
    analyzed = trainer.policy.analyze_responses(rollout.queries, rollout.responses)
    torch.testing.assert_close(rollout.logprobs, analyzed['logprobs'])
    torch.testing.assert_close(rollout.values, analyzed['values'])
    torch.testing.assert_close(rollout.ref_logprobs, analyzed['logprobs'])
