#!/usr/bin/env python3
"""One PPO update (rollout, reference, reward, 4 epochs) beside plain PyTorch on the same work.

    pipenv run python benchmarks/ppo_update.py [--model gpt2] [--size 124M] [--batch 16]
        [--repeats 3] [--threads 2] [--library default] [--no-bf16]

Both are measured in the same run. The plain version is what one would write first: transformers'
model, sampling with its cache, logits at every position, and a second pass over the rollout for
log-probabilities and values. Weights are random. TRL's PPO is compared if that package is
installed. `GFLOP` is the least work that an update needs in any implementation; `of rate` is the
achieved share of this machine's rate of matrix products, measured in the same process. One row has
an ensemble of four reward models in place of one (--rewards.ensemble 4), and one a head on the
reference's hidden states (features frozen); GFLOP stays that of one reward model.
"""

import functools
import sys
from collections.abc import Callable

import measuring
import torch
import trl_ppo
import workload
from workload import PADDING, QUERY_LENGTH, RESPONSE_LENGTH, RandomModel, SameQueries

from lm_human_preferences import train_policy
from lm_human_preferences.distributed import comm
from lm_human_preferences.language.networks.scopes import POLICY_NETWORKS
from lm_human_preferences.policy import Policy
from lm_human_preferences.reward_sources.frozen_head.reward import without_labels
from lm_human_preferences.reward_sources.sources import source_of
from lm_human_preferences.rewards import EnsembleReward, RewardModel, networks_of

TEMPERATURE = 0.7
ENSEMBLE = 'fp32-ensemble'  # a variant
MEMBERS = 4  # of it
HEAD = 'fp32-head'  # a variant


def hparams_of(episodes):
    """The descriptiveness setting at another batch size; nothing printed, nothing saved."""
    hparams = train_policy.HParams()
    hparams.override_from_dict(
        {
            'task.query_length': QUERY_LENGTH,
            'task.response_length': RESPONSE_LENGTH,
            'task.query_dataset': 'test',
            'task.policy.temperature': TEMPERATURE,
            'ppo.batch_size': episodes,
            'ppo.lr': 1e-5,
            'rewards.kl_coef': 0.15,
            'rewards.trained_model': 'test',
            'run.log_interval': 10**9,
        }
    )
    return hparams


class Ours:
    """The trainer that `./launch.py train_policy` uses."""

    def __init__(
        self,
        size,
        hparams,
        queries,
        world,
        model: Callable[[str], RandomModel] = RandomModel,
        members=1,
        has_head=False,
    ):
        trained_model = model(size)
        reference = Policy(trained_model, scope='ref_policy', temperature=TEMPERATURE)
        if has_head:
            scorer = without_labels(reference)
        else:
            self.reward_model = scorer = RewardModel(trained_model)
        if members > 1:
            scorer = EnsembleReward(
                [scorer, *(RewardModel(model(size)) for _ in range(1, members))]
            )
        elif not has_head:
            scorer.score = scorer.get_rewards
        self.trainer = train_policy.PPOTrainer(
            policy=Policy(trained_model, temperature=TEMPERATURE),
            reward_networks={} if has_head else networks_of(scorer),
            reward_blocks=scorer.blocks if has_head else (),
            roles=POLICY_NETWORKS if has_head else source_of(hparams).networks,
            comm=world,
            ref_policy=reference,
            query_sampler=SameQueries(queries),
            score_fn=train_policy.make_score_fn(hparams.task, scorer),
            **train_policy.learning_settings(hparams, scorer.encoder, world),
        )
        self.trainer.steps_done = 1  # step 0 would print

    def time_phases(self, clock):
        """Count each phase's seconds."""
        trainer = self.trainer
        trainer.policy.respond = clock.timed('rollout', trainer.policy.respond)
        trainer.ref_policy.analyze_responses = clock.timed(
            'reference', trainer.ref_policy.analyze_responses
        )
        trainer.score_fn = clock.timed('reward', trainer.score_fn)
        trainer.train = clock.timed('epochs', trainer.train)

    def update(self):
        self.trainer.step()


class Plain:
    """The same update in the plainest PyTorch."""

    def __init__(self, size, hparams, queries, model):
        self.policy = workload.plain_model(size, model)
        self.initial = workload.plain_model(size, model)
        self.scorer = workload.plain_model(size, model)
        width = self.policy.config.hidden_size
        device = self.policy.device
        self.value = torch.nn.Linear(width, 1, device=device)
        self.reward_head = torch.nn.Linear(width, 1, device=device)
        parameters = [*self.policy.parameters(), *self.value.parameters()]
        self.optimizer = torch.optim.Adam(parameters, lr=1e-5, eps=1e-5)
        self.ppo = hparams.ppo
        self.queries, self.query_mask = workload.padded_left(queries.to(device))
        self.mask = torch.nn.functional.pad(self.query_mask, (0, RESPONSE_LENGTH), value=True)

    def time_phases(self, clock):
        """Count each phase's seconds."""
        for name in ('rollout', 'reference', 'reward', 'epochs'):
            setattr(self, name, clock.timed(name, getattr(self, name)))

    def analyze(self, network, tokens):
        """Log-probabilities (batch, response_length) of the responses, and last hidden states."""
        output = network(
            tokens,
            attention_mask=self.mask.long(),
            position_ids=workload.positions(self.mask),
            output_hidden_states=True,
        )
        logprobs = (output.logits[:, :-1] / TEMPERATURE).log_softmax(-1)
        logprobs = logprobs.gather(-1, tokens[:, 1:, None]).squeeze(-1)[:, QUERY_LENGTH - 1 :]
        return logprobs, output.hidden_states[-1]

    def values_of(self, hidden):
        return self.value(hidden[:, QUERY_LENGTH - 1 : -1]).squeeze(-1)

    @torch.no_grad()
    def rollout(self):
        """Tokens, and the log-probabilities and values of their responses."""
        tokens = new = self.queries
        mask = self.query_mask
        cache = None
        for _ in range(RESPONSE_LENGTH):
            output = self.policy(
                new,
                attention_mask=mask.long(),
                past_key_values=cache,
                use_cache=True,
                position_ids=workload.positions(mask)[:, -new.shape[1] :],
            )
            cache = output.past_key_values
            new = torch.multinomial((output.logits[:, -1] / TEMPERATURE).softmax(-1), 1)
            tokens = torch.cat([tokens, new], dim=1)
            mask = torch.nn.functional.pad(mask, (0, 1), value=True)
        logprobs, hidden = self.analyze(self.policy, tokens)
        return tokens, logprobs, self.values_of(hidden)

    @torch.no_grad()
    def reference(self, tokens):
        return self.analyze(self.initial, tokens)[0]

    @torch.no_grad()
    def reward(self, tokens):
        return self.reward_head(self.analyze(self.scorer, tokens)[1][:, -1]).squeeze(-1)

    def targets(self, values, rewards):
        """Whitened advantages and returns."""
        rewards = (rewards - rewards.mean()) / (rewards.var() + 1e-8).sqrt() + rewards.mean()
        advantage, advantages = 0, []
        for t in reversed(range(RESPONSE_LENGTH)):
            following = values[:, t + 1] if t < RESPONSE_LENGTH - 1 else 0
            advantage = rewards[:, t] + following - values[:, t] + self.ppo.lam * advantage
            advantages.insert(0, advantage)
        advantages = torch.stack(advantages, 1)
        whitened = (advantages - advantages.mean()) / (advantages.var() + 1e-8).sqrt()
        return whitened, advantages + values

    def epochs(self, tokens, old_logprobs, old_values, advantages, returns):
        for _ in range(self.ppo.noptepochs):
            logprobs, hidden = self.analyze(self.policy, tokens)
            values = self.values_of(hidden)
            clipped = old_values + (values - old_values).clamp(-0.2, 0.2)
            value_loss = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2).mean() / 2
            ratio = (logprobs - old_logprobs).exp()
            policy_loss = torch.maximum(
                -advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)
            ).mean()
            self.optimizer.zero_grad()
            (policy_loss + 0.1 * value_loss).backward()
            self.optimizer.step()

    def update(self):
        tokens, logprobs, values = self.rollout()
        rewards = -0.15 * (logprobs - self.reference(tokens))
        rewards[:, -1] += self.reward(tokens)
        self.epochs(tokens, logprobs, values, *self.targets(values, rewards))


def flops(size, queries, epochs, length=RESPONSE_LENGTH, model='gpt2'):
    """The FLOPs of one update.

    It samples and scores once, and makes a forward and a backward pass (twice the work) in each
    epoch.
    """
    total = 0
    for real in (queries != PADDING).sum(1).tolist():
        tokens = real + length - 1
        attention = workload.attention_flops(size, tokens)
        analyzed = attention + workload.linear_flops(
            size, tokens=tokens, read=length, logits=length, model=model
        )
        scored = attention + workload.linear_flops(size, tokens=tokens + 1, read=1, model=model)
        total += (1 + 1 + 3 * epochs) * analyzed + scored
    return total


def measure(args):
    """One variant's update."""
    hparams = hparams_of(args.batch)
    queries = workload.queries(args.batch)
    if args.variant == 'plain':
        run = Plain(args.size, hparams, queries, args.model)
    elif args.variant == 'trl':
        run = trl_ppo.Trl(args.size, hparams, queries, TEMPERATURE)
    else:
        model = functools.partial(workload.random_model, model=args.model)
        members = MEMBERS if args.variant == ENSEMBLE else 1
        has_head = args.variant == HEAD
        run = Ours(args.size, hparams, queries, comm.init_comm(), model, members, has_head)
    clock = measuring.Clock()
    run.time_phases(clock)
    return {
        **measuring.repeat(run.update, clock, args.repeats),
        'flops': flops(args.size, queries, 4, model=args.model),
    }


def main():
    trl = {'trl': 'TRL, fp32'} if trl_ppo.is_installed() else {}
    rewards = {ENSEMBLE: f'ours, {MEMBERS} members', HEAD: 'ours, frozen head'}
    variants = {**measuring.VARIANTS, **rewards, **trl}
    args = measuring.arguments(__doc__, batch=16, variants=variants)
    measuring.main(args, measure, unit='update')
    if not trl and args.variant is None:
        print('TRL is not installed, so its PPO is left out', file=sys.stderr)


if __name__ == '__main__':
    main()
