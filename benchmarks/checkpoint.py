#!/usr/bin/env python3
"""Time that saving a checkpoint adds to the training of a policy.

    pipenv run python benchmarks/checkpoint.py [--size 124M] [--episodes 16] [--steps 2]
        [--repeats 3] [--interval 50]

Steps without a checkpoint alternate with as many steps after one, including all of its writing; the
difference is what a checkpoint costs. Both wall-clock and processor seconds are printed; a busy
machine disturbs the latter less. The first checkpoint, which also allocates the buffers of the
copy, is printed separately.

The cost of a checkpoint does not depend on the number of episodes, and that of a step is
proportional to it. So its share of the steps between two checkpoints is also printed for the 512
episodes of the paper's experiments; the fewer of `--episodes` are the harder case.
"""

import argparse
import os
import statistics
import tempfile
import time

import torch
from ppo_update import Ours, hparams_of
from workload import QUERY_LENGTH, SIZES, VOCABULARY, library_for

from lm_human_preferences.checkpointing.checkpointer import Checkpointer
from lm_human_preferences.distributed import comm
from lm_human_preferences.hparams import policy_options
from lm_human_preferences.training import precision

DEFAULT_INTERVAL = policy_options.HParams().run.save_interval
PAPER = 512  # episodes of a step


def clocks():
    return time.perf_counter(), time.process_time()


def timed(work):
    """(wall-clock seconds, processor seconds) that `work()` takes."""
    before = clocks()
    work()
    return tuple(after - start for after, start in zip(clocks(), before))


def measure(trainer, checkpointer, args):
    """Return the costs of steps and checkpoints, each as [wall-clock seconds, processor seconds].

    Returns those of a step, of the first call that saves and of later ones, of the first checkpoint
    in all and of later ones.
    """

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
    steps_alone = medians(plain)
    return (
        [seconds / args.steps for seconds in steps_alone],
        calls[0],
        medians(calls[1:]),
        [a - b for a, b in zip(first, steps_alone)],
        [a - b for a, b in zip(medians(saving), steps_alone)],
    )


def medians(times):
    """The medians of wall-clock and of processor seconds among `times`, see `timed`."""
    return [statistics.median(kind) for kind in zip(*times)]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--size', choices=SIZES, default='124M')
    parser.add_argument('--episodes', type=int, default=16)
    parser.add_argument('--steps', type=int, default=2)
    parser.add_argument('--repeats', type=int, default=3)
    parser.add_argument(
        '--interval', type=int, default=DEFAULT_INTERVAL, help='--run.save_interval'
    )
    args = parser.parse_args()
    precision.configure('fp32', torch.device('cpu'), library_for(args.size))
    world = comm.LocalComm()
    queries = torch.randint(VOCABULARY, (args.episodes, QUERY_LENGTH))
    trainer = Ours(args.size, hparams_of(args.episodes), queries, world).trainer
    with (
        tempfile.TemporaryDirectory() as directory,
        Checkpointer(
            directory,
            world,
            resume=False,
            frozen_scopes=trainer.roles.frozen,
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
    which = 'the default'
    if args.interval != DEFAULT_INTERVAL:
        which = f'not the default of {DEFAULT_INTERVAL}'
    print(f'share of training at a checkpoint every {args.interval} steps, which is {which}')
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
