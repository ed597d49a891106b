#!/usr/bin/env python3
"""How long saving a checkpoint holds up policy training, as a share of the steps between two of
them.

    pipenv run python benchmarks/checkpoint.py [--size 124M] [--episodes 16] [--steps 2] [--repeats
    3] [--interval 50]

Steps without a checkpoint and as many after one, with all of its writing, in turn in the same run;
the difference is what a checkpoint costs. It is told of the clock, and of the processors' time,
which a busy machine disturbs less. The first checkpoint, which also takes the memory for the copy,
is told apart.

A checkpoint costs the same whatever a step takes, and a step as much as its episodes: so the share
is also told for the 512 episodes of the paper's experiments, of which those of `--episodes` are the
smaller, and harder, part.
"""

import argparse
import os
import statistics
import tempfile
import time

import torch
from ppo_update import Ours, hparams_of
from workload import QUERY_LENGTH, SIZES, VOCABULARY

from lm_human_preferences import plans
from lm_human_preferences.checkpointing.checkpointer import Checkpointer
from lm_human_preferences.distributed import comm
from lm_human_preferences.hparams import train_policy
from lm_human_preferences.training import precision

DEFAULT_INTERVAL = train_policy.HParams().run.save_interval
PAPER = 512  # episodes of a step


def clocks():
    return time.perf_counter(), time.process_time()


def timed(work):
    """(seconds, seconds of processors) that `work()` takes."""
    before = clocks()
    work()
    return tuple(after - start for after, start in zip(clocks(), before))


def measure(trainer, checkpointer, args):
    """Seconds of a step, of the call that saves, of a checkpoint in all; each of clock and
    processors."""

    def steps():
        for _ in range(args.steps):
            trainer.step()

    def steps_after_saving():
        calls.append(timed(lambda: checkpointer.save(trainer)))
        steps()
        checkpointer.wait()

    calls, plain, saving = [], [], []
    first = timed(steps_after_saving)
    for _ in range(args.repeats):
        plain.append(timed(steps))
        saving.append(timed(steps_after_saving))
    plain, saving, calls_after, first_call = (
        [statistics.median(kind) for kind in zip(*times)]
        for times in (plain, saving, calls[1:], calls[:1])
    )
    return (
        [seconds / args.steps for seconds in plain],
        first_call,
        calls_after,
        [a - b for a, b in zip(first, plain)],
        [a - b for a, b in zip(saving, plain)],
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--size', choices=SIZES, default='124M')
    parser.add_argument('--episodes', type=int, default=16)
    parser.add_argument('--steps', type=int, default=2)
    parser.add_argument('--repeats', type=int, default=3)
    parser.add_argument(
        '--interval', type=int, default=DEFAULT_INTERVAL, help='--run.save_interval'
    )
    args = parser.parse_args()
    precision.configure('fp32', torch.device('cpu'))
    world = comm.LocalComm()
    queries = torch.randint(VOCABULARY, (args.episodes, QUERY_LENGTH))
    trainer = Ours(args.size, hparams_of(args.episodes), queries, world).trainer
    trainer.query_sampler.position = (0, 0)  # these are no texts
    with (
        tempfile.TemporaryDirectory() as directory,
        Checkpointer(
            directory,
            world,
            resume=False,
            frozen_scopes=plans.policy_networks(trainer.hparams).frozen,
            max_to_keep=2,
        ) as checkpointer,
    ):
        step, first_call, call, first, cost = measure(trainer, checkpointer, args)
        size = max(os.path.getsize(os.path.join(directory, name)) for name in os.listdir(directory))
    print(
        f'{args.size}, {args.episodes} episodes a step, checkpoints of {size >> 20} MiB every'
        f' {args.interval} steps'
    )
    for name, (clock, processors) in {
        'a step': step,
        'copying, the first time': first_call,
        'copying': call,
        'the first checkpoint in all': first,
        'a checkpoint in all': cost,
    }.items():
        print(f'{name:30} {clock:8.3f} s   {processors:8.3f} processor seconds')
    print(
        f'share of training at a checkpoint every {args.interval} steps, which is '
        + (
            'the default'
            if args.interval == DEFAULT_INTERVAL
            else f'not the default of {DEFAULT_INTERVAL}'
        )
    )
    for episodes in (args.episodes, PAPER):
        clock, processors = (
            c / (args.interval * s * episodes / args.episodes) for c, s in zip(cost, step)
        )
        print(
            f'{f"with {episodes} episodes a step":30} {clock:8.3%}     {processors:8.3%} of its'
            ' processor seconds'
        )


if __name__ == '__main__':
    main()
