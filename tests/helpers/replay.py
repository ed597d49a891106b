"""Training functions run on recorded queries and responses; all that passes through is kept."""

import copy
import re
import threading
from collections import deque

import numpy as np
import torch
from compare import assert_close, assert_equal, assert_stats, tokens
from golden_data import require, under
from ranks import give_each_thread_its_own_numpy_random, need, on_ranks, rank_prefix, ranks_here
from sample_files import tf_variables
from trainers import snapshot

from lm_human_preferences import lm_tasks, train_policy, train_reward
from lm_human_preferences.language import sample
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.trainers.additions import tracked_samples
from lm_human_preferences.training.loop import Hook

# What the recordings call them
INITIAL_MODELS = {'golden': 'train_model', 'tiny-main': 'tiny_main_model'}


def local_paths(hparams, save_dir):
    for group in (hparams, getattr(getattr(hparams, 'rewards', None), 'train_new_model', None)):
        if group is None:
            continue
        policy = group.task.policy
        if policy.initial_model != 'test':
            name = INITIAL_MODELS.get(policy.initial_model, policy.initial_model)
            policy.initial_model = str(require(name))
        if hasattr(group, 'labels'):
            group.labels.source = str(require(*group.labels.source.split('/')))
        group.run.save_dir = str(save_dir)
    return hparams


def numbered(arrays, kind):
    """[the entries of kind0/, those of kind1/, ...]."""
    numbers = sorted({int(m[1]) for m in (re.match(rf'{kind}(\d+)/', key) for key in arrays) if m})
    return [under(arrays, f'{kind}{i}/') for i in numbers]


class TracedRewardTrainer(train_reward.RewardModelTrainer):
    """Keeps each batch (indices, lr, statistics) and each estimate of the scale of rewards."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.traced, self.scales, self.rewards = [], [], []
        get_rewards = self.reward_model.get_rewards

        def traced(queries, responses):
            self.rewards.append(get_rewards(queries, responses))
            return self.rewards[-1]

        self.reward_model.get_rewards = traced

    def train_batch(self, indices, lr):
        stats = super().train_batch(indices, lr)
        self.traced.append((indices, lr, stats))
        return stats

    def sampled_mean_std(self, n_samples):
        self.rewards.clear()
        mean, std = super().sampled_mean_std(n_samples)
        self.scales.append({'mean': mean, 'std': std, 'rewards': torch.cat(self.rewards)})
        return mean, std

    def normalize(self, target_mean, target_std):
        which = len(self.scales)
        super().normalize(target_mean, target_std)
        self.scales[which].update(
            target_mean=target_mean,
            target_std=target_std,
            gain=self.reward_model.reward_gain.item(),
            bias=self.reward_model.reward_bias.item(),
        )


class TracedPPOTrainer(train_policy.PPOTrainer):
    """Keeps of each step what the recordings have of it, under their names."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.steps = []

    def train(self, rollout):
        stats = super().train(rollout)
        step = {
            'scores': rollout.scores,
            'postprocessed_responses': rollout.scored_responses,
            'rewards': rollout.rewards,
            'respond/logprobs': rollout.logprobs,
            'respond/values': rollout.values,
            'ref/logprobs': rollout.ref_logprobs,
        }
        step['train_stats'] = {name: [each.item() for each in of] for name, of in stats.items()}
        self.steps.append(step)
        return stats

    def record_step_stats(self, rollout, *, kl_coef, non_score_reward, train_stats):
        stats = super().record_step_stats(
            rollout, kl_coef=kl_coef, non_score_reward=non_score_reward, train_stats=train_stats
        )
        self.steps[-1].update(
            kl_coef=kl_coef,
            non_score_reward=non_score_reward,
            global_step=self.steps_done,
            step_stats=stats,
        )
        return stats

    def step(self):
        stats = super().step()
        self.steps[-1].update(
            kl_coef_after=self.kl_ctl.value,
            policy_params_after=snapshot(tf_variables(self.policy.parameters_by_name(), 'policy')),
        )
        return stats


class Replay:
    """Feeds recorded queries and responses in place of those of the data set and of sampling.

    episodes: per rank, a list of (queries, responses), arrays of a row per episode, in the order of
    their use. initial: recorded starting values by variable name, for models that start at random.
    """

    def __init__(self, monkeypatch, episodes, initial=None):
        self.left = [deque() for _ in episodes]
        for left, rank in zip(self.left, episodes, strict=True):
            for queries, responses in rank:
                left.extend(zip(tokens(queries), tokens(responses), strict=True))
        self.size = len(episodes)
        need(self.size)
        self.now = threading.local()  # the batch of each rank, and how much of it was answered
        self.reward_trainers, self.ppo_trainers = {}, {}  # by rank, those in this process
        if self.size > 1:
            give_each_thread_its_own_numpy_random(monkeypatch)
        monkeypatch.setattr(lm_tasks, 'make_query_sampler', self.make_query_sampler)
        # The recording has no samples but those of the steps.
        monkeypatch.setattr(tracked_samples, 'TrackedSamples', lambda *_: Hook())
        monkeypatch.setattr(sample, 'sample_from_probs', self.sample_from_probs)
        keep_reward = self.keeping(TracedRewardTrainer, self.reward_trainers)
        monkeypatch.setattr(train_reward, 'RewardModelTrainer', keep_reward)
        keep_ppo = self.keeping(TracedPPOTrainer, self.ppo_trainers)
        monkeypatch.setattr(train_policy, 'PPOTrainer', keep_ppo)
        build = self.starting_from(initial or {}, TrainedModel.build)
        monkeypatch.setattr(TrainedModel, 'build', build)

    def make_query_sampler(self, *, batch_size, comm, **settings):
        def sampler():
            rows = [self.left[comm.rank].popleft() for _ in range(batch_size)]
            queries, responses = zip(*rows, strict=True)
            self.now.responses, self.now.position = torch.stack(responses), 0
            return {'tokens': torch.stack(queries)}

        sampler.position = None  # these runs are not interrupted
        return sampler

    def sample_from_probs(self, probs, uniform):
        self.now.position += 1
        tokens = self.now.responses[:, self.now.position - 1]
        return tokens, probs.sum(-1, dtype=torch.float64)

    @staticmethod
    def keeping(cls, kept):
        def make(**kwargs):
            kept[kwargs['comm'].rank] = cls(**kwargs)
            return kept[kwargs['comm'].rank]

        return make

    @staticmethod
    def starting_from(initial, build):
        def patched(trained_model, *, scope, scalar_heads=()):
            model = build(trained_model, scope=scope, scalar_heads=scalar_heads)
            for name, variable in tf_variables(model.named_parameters(), scope).items():
                if name in initial:
                    assert variable.shape == initial[name].shape
                    variable.copy_(torch.from_numpy(initial[name]))
            return model

        return patched

    def run(self, train, hparams):
        """train(hparams, comm) on every rank; all recorded episodes must be used."""
        hparams = copy.deepcopy(hparams)
        hparams.run.console = 'original'
        on_ranks(self.size, lambda comm: train(copy.deepcopy(hparams), comm))
        unused = [len(self.left[rank]) for rank in ranks_here(self.size)]
        assert not any(unused), 'fewer episodes used than recorded'


def episodes_of_normalizations(arrays, size):
    """Per rank, the sampled episodes of a recorded reward training."""
    episodes = []
    for rank in range(size):
        cases = numbered(under(arrays, rank_prefix(rank, size)), 'normalize')
        episodes.append([(case['queries'], case['responses']) for case in cases])
    return episodes


def check_batches(trainers, recorded, stats, permutation):
    """Check the order, learning rates and statistics of all batches; recorded: per rank."""
    for rank, trainer in trainers.items():
        arrays = recorded[rank]
        indices, lr, ours = zip(*trainer.traced, strict=True)
        assert_equal(np.stack(indices), arrays['indices'], name='indices')
        own = permutation[rank :: len(recorded)]
        assert_equal(np.concatenate(indices), own, name='permutation')
        assert_close(lr, arrays['lr'], rtol=1e-12, name='lr')
        assert_stats({name: [s[name] for s in ours] for name in ours[0]}, stats)


def check_normalization(trainers, recorded):
    """Sampled rewards, their scale over all ranks, targets, gain and bias."""
    for rank, trainer in trainers.items():
        cases = numbered(recorded[rank], 'normalize')
        for ours, case in zip(trainer.scales, cases, strict=True):
            assert set(ours) == set(case) - {'queries', 'responses'}
            for name, value in ours.items():
                assert_close(value, case[name], atol=2e-5, name=name)
