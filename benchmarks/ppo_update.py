#!/usr/bin/env python3
"""One PPO update (rollout, reference, reward, 4 epochs) against plain PyTorch, on the same work in the same run.

    pipenv run python benchmarks/ppo_update.py [--size 124M] [--episodes 16] [--repeats 3]

The plain one is what one writes first: transformers' GPT-2, `generate`-like sampling with its cache, logits at every
position, and a second pass over the rollout for log-probabilities and values. Weights are random; both get the same.
"""
import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import GPT2LMHeadModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lm_human_preferences import train_policy  # noqa: E402
from lm_human_preferences.language import encodings, model  # noqa: E402
from lm_human_preferences.policy import Policy  # noqa: E402
from lm_human_preferences.rewards import RewardModel  # noqa: E402
from lm_human_preferences.utils import comm  # noqa: E402

SIZES = {'test': (64, 2, 2), '124M': (768, 12, 12), '355M': (1024, 16, 24), '774M': (1280, 20, 36)}
QUERY_LENGTH, RESPONSE_LENGTH, VOCABULARY, PADDING = 64, 24, 50257, 50259


class RandomModel:
    """Stands in for TrainedModel: random weights of a size, without the files of the encoding."""
    is_random = True

    class encoding:
        name, n_vocab = 'main', VOCABULARY

        @staticmethod
        def get_encoder():
            return argparse.Namespace(padding_token=PADDING)

    def __init__(self, size):
        n_embd, n_head, n_layer = SIZES[size]
        self.sizes = model.HParams(n_vocab=VOCABULARY, n_ctx=1024, n_embd=n_embd, n_head=n_head, n_layer=n_layer)

    def hparams(self):
        return self.sizes

    def build(self, *, scope, scalar_heads=()):
        torch.manual_seed(0)
        return model.Model(self.sizes, scalar_heads).initialize()


def hparams_of(episodes):
    """The descriptiveness setting at another batch size; nothing printed, nothing saved."""
    hparams = train_policy.HParams()
    hparams.override_from_dict({
        'task.query_length': QUERY_LENGTH, 'task.response_length': RESPONSE_LENGTH, 'task.query_dataset': 'test',
        'task.policy.temperature': 0.7, 'ppo.batch_size': episodes, 'ppo.lr': 1e-5, 'rewards.kl_coef': 0.15,
        'rewards.trained_model': 'test', 'run.log_interval': 10 ** 9})
    return hparams


class Ours:
    """The trainer that `./launch.py train_policy` uses."""

    def __init__(self, size, hparams, queries, world):
        trained_model = RandomModel(size)
        scorer = RewardModel(trained_model)
        scorer.score = scorer.get_rewards
        self.trainer = train_policy.PPOTrainer(
            policy=Policy(trained_model, temperature=0.7), score_model=scorer,
            ref_policy=Policy(trained_model, scope='ref_policy', temperature=0.7), hparams=hparams, comm=world,
            query_sampler=lambda: {'tokens': queries},
            score_fn=train_policy.make_score_fn(hparams.task, scorer))
        self.trainer.global_step = 1  # step 0 would print

    def update(self):
        self.trainer.step()


class Plain:
    """The same update in the plainest PyTorch."""

    def __init__(self, size, hparams, queries):
        config = model.Model(RandomModel(size).sizes).transformer.config
        self.policy, self.reference, self.scorer = (GPT2LMHeadModel(config) for _ in range(3))
        self.value, self.reward = torch.nn.Linear(config.n_embd, 1), torch.nn.Linear(config.n_embd, 1)
        parameters = [*self.policy.parameters(), *self.value.parameters()]
        self.optimizer = torch.optim.Adam(parameters, lr=1e-5, eps=1e-5)
        self.ppo, self.queries = hparams.ppo, queries

    def analyze(self, network, tokens):
        """Log-probabilities (batch, response_length) and last hidden states of the responses in `tokens`."""
        output = network(tokens, output_hidden_states=True)
        logprobs = (output.logits[:, :-1] / 0.7).log_softmax(-1)
        logprobs = logprobs.gather(-1, tokens[:, 1:, None]).squeeze(-1)[:, QUERY_LENGTH - 1:]
        return logprobs, output.hidden_states[-1]

    @torch.no_grad()
    def sample(self):
        """`tokens (batch, query_length + response_length)` with a cache."""
        tokens, new, cache = self.queries, self.queries, None
        for _ in range(RESPONSE_LENGTH):
            output = self.policy(new, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            new = torch.multinomial((output.logits[:, -1] / 0.7).softmax(-1), 1)
            tokens = torch.cat([tokens, new], dim=1)
        return tokens

    @torch.no_grad()
    def rollout(self):
        """Tokens, log-probabilities, values and rewards of a batch of episodes."""
        tokens = self.sample()
        logprobs, hidden = self.analyze(self.policy, tokens)
        values = self.value(hidden[:, QUERY_LENGTH - 1:-1]).squeeze(-1)
        rewards = -0.15 * (logprobs - self.analyze(self.reference, tokens)[0])
        rewards[:, -1] += self.reward(self.analyze(self.scorer, tokens)[1][:, -1]).squeeze(-1)
        return tokens, logprobs, values, rewards

    def targets(self, values, rewards):
        """Whitened advantages and returns."""
        rewards = (rewards - rewards.mean()) / (rewards.var() + 1e-8).sqrt() + rewards.mean()
        advantage, advantages = 0, []
        for t in reversed(range(RESPONSE_LENGTH)):
            following = values[:, t + 1] if t < RESPONSE_LENGTH - 1 else 0
            advantage = rewards[:, t] + following - values[:, t] + self.ppo.lam * advantage
            advantages.insert(0, advantage)
        advantages = torch.stack(advantages, 1)
        return (advantages - advantages.mean()) / (advantages.var() + 1e-8).sqrt(), advantages + values

    def update(self):
        tokens, old_logprobs, old_values, rewards = self.rollout()
        advantages, returns = self.targets(old_values, rewards)
        for _ in range(self.ppo.noptepochs):
            logprobs, hidden = self.analyze(self.policy, tokens)
            values = self.value(hidden[:, QUERY_LENGTH - 1:-1]).squeeze(-1)
            clipped = old_values + (values - old_values).clamp(-0.2, 0.2)
            value_loss = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2).mean() / 2
            ratio = (logprobs - old_logprobs).exp()
            policy_loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)).mean()
            self.optimizer.zero_grad()
            (policy_loss + 0.1 * value_loss).backward()
            self.optimizer.step()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--size', choices=SIZES, default='124M')
    parser.add_argument('--episodes', type=int, default=16)
    parser.add_argument('--repeats', type=int, default=3)
    args = parser.parse_args()
    assert encodings.Main.n_vocab == VOCABULARY
    hparams = hparams_of(args.episodes)
    queries = torch.randint(VOCABULARY, (args.episodes, QUERY_LENGTH))
    runs = {'ours': Ours(args.size, hparams, queries, comm.world()), 'plain': Plain(args.size, hparams, queries)}
    seconds = {name: [] for name in runs}
    for repeat in range(args.repeats + 1):
        for name, run in runs.items():
            started = time.perf_counter()
            run.update()
            if repeat:  # the first warms up
                seconds[name].append(time.perf_counter() - started)
    ours, plain = (statistics.median(seconds[name]) for name in ('ours', 'plain'))
    print(f'{args.size}, {args.episodes} episodes, {torch.get_num_threads()} threads: ours {ours:.2f} s, '
          f'plain {plain:.2f} s per update; ours takes {ours / plain:.2f} of the time')


if __name__ == '__main__':
    main()
