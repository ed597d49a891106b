#!/usr/bin/env python3
"""Time that collecting labels adds to a PPO step, besides the trainings of the reward model.

    pipenv run python benchmarks/online_step.py [--size 124M] [--batch 16] [--steps 3]

Before every second step, questions about the policy are asked and answered by a script; before the
others there is nothing to do but to see that. From the cost of both follows what a step costs more
at a number of labels per episode. Weights are random, the queries are letters.
"""

import argparse
import functools
import statistics

import measuring
import ppo_update
import torch
import workload
from workload import QUERY_LENGTH, RESPONSE_LENGTH

from lm_human_preferences import lm_tasks, train_reward
from lm_human_preferences.checkpointing.checkpointer import Checkpointer
from lm_human_preferences.distributed import comm
from lm_human_preferences.hparams.online_options import OnlineHParams, Schedule
from lm_human_preferences.language import encodings
from lm_human_preferences.online.collection import Collection
from lm_human_preferences.plan.making import policy_phase

RATES = {
    '5,000 labels in 2,000,000 episodes': 5_000 / 2_000_000,
    '60,000 labels in 2,000,000 episodes': 60_000 / 2_000_000,
}


class LetterModel(workload.RandomModel):
    """A model of random weights whose queries are letters, which need no file."""

    @functools.cached_property
    def encoding(self) -> encodings.Encoding:
        return encodings.Test


class AlternateSchedule(Schedule):
    """Asks a batch of questions before every second step; the reward model is left as it is."""

    def labels_at(self, step):
        return OnlineHParams.asked_at_once * (step // 2 + 1)

    def questions_at(self, step):
        return self.labels_at(step)

    def is_trained_at(self, step):
        return False


def hparams_of(args):
    """The setting of ppo_update, with labels that a script gives while the policy trains."""
    hparams = ppo_update.hparams_of(args.batch)
    hparams.ppo.total_episodes = args.batch * args.steps
    hparams.rewards.trained_model = None
    hparams.rewards.online = OnlineHParams()
    hparams.rewards.online.override_from_dict(
        {'labels': OnlineHParams.asked_at_once * args.steps, 'source': 'test'}
    )
    new_model = hparams.rewards.train_new_model = train_reward.HParams()
    new_model.labels.type = 'best_of_4'
    new_model.labels.source = 'test'
    new_model.task = hparams.task
    return hparams


def measure(args):
    """Seconds of (a step, the asking of a batch of questions, a look that finds nothing to do)."""
    world = comm.init_comm()
    hparams = hparams_of(args)
    sampler = lm_tasks.make_query_sampler(
        hparams=hparams.task, encoder=encodings.Test.get_encoder(), batch_size=args.batch
    )
    ours = ppo_update.Ours(args.size, hparams, sampler()['tokens'], world, LetterModel)
    trainer = ours.trainer
    checkpointer = Checkpointer(None, world, resume=False)
    checkpointer.set_seed(1)
    steps, asked, idle = [], [], []
    collection = Collection(trainer, policy_phase(hparams), checkpointer)
    collection.schedule = AlternateSchedule(**vars(collection.schedule))
    with checkpointer, collection:
        collection.labels.schedule = collection.schedule
        for step in range(2, 2 * args.steps + 4):
            begin = measuring.now()
            collection.before_step(step)
            looked = measuring.now()
            trainer.step()
            if step >= 4:  # the first of each kind warm up
                seconds = idle if step % 2 else asked
                seconds.append(looked - begin)
                steps.append(measuring.now() - looked)
    return [statistics.median(seconds) for seconds in (steps, asked, idle)]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--size', choices=workload.SIZES, default='124M')
    parser.add_argument('--batch', type=int, default=16)
    parser.add_argument('--steps', type=int, default=3, help='of each kind')
    parser.add_argument('--threads', type=int, default=2, help='of the CPU')
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    measuring.set_up('fp32', args.size)
    step, asked, idle = measure(args)
    print(
        f'{measuring.machine(args.size)}, torch {torch.__version__}, {args.size},'
        f' batch {args.batch}, queries of {QUERY_LENGTH} and responses of {RESPONSE_LENGTH} tokens'
    )
    print(f'a step: {step:.2f} s')
    print(f'asking {OnlineHParams.asked_at_once} questions of four samples: {asked:.2f} s')
    print(f'a look that finds nothing to do: {1000 * idle:.1f} ms, {idle / step:.2%} of a step')
    for name, rate in RATES.items():
        more = args.batch * rate * (asked - idle) / OnlineHParams.asked_at_once + idle
        print(f'{name}: {more / step:.2%} of a step more')


if __name__ == '__main__':
    main()
