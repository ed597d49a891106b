#!/usr/bin/env python3
"""One PPO update on 1 rank against N ranks that do as much each: what ranks cost one another.

    pipenv run python benchmarks/weak_scaling.py [--size 124M] [--episodes 16] [--ranks 2]
        [--rounds 3]

Efficiency is the seconds of 1 rank alone over those of N ranks. `apart` runs N independent
processes side by side: what they lose is lost to the machine, not to averaging.
"""

import argparse
import json
import statistics
import sys
import time

import torch
from on_ranks import measure, result_of, start
from ppo_update import Ours, hparams_of
from workload import QUERY_LENGTH, SIZES, VOCABULARY, library_for

from lm_human_preferences.distributed import comm
from lm_human_preferences.training import precision

ENGINES = ('horovod', 'torch')


def measure_here(engine, size, episodes, updates):
    """Print the seconds of each of so many updates on `episodes` episodes a rank, as JSON."""
    world = comm.init_comm(engine)
    precision.configure('fp32', torch.device('cpu'), library_for(size))
    torch.manual_seed(world.rank)
    run = Ours(
        size,
        hparams_of(episodes * world.size),
        torch.randint(VOCABULARY, (episodes, QUERY_LENGTH)),
        world,
    )
    seconds = []
    for _ in range(updates + 1):
        world.barrier()
        started = time.perf_counter()
        run.update()
        seconds.append(time.perf_counter() - started)
    if world.rank == 0:
        print(json.dumps(seconds[1:]))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--size', choices=SIZES, default='124M')
    parser.add_argument('--episodes', type=int, default=16, help='of each rank')
    parser.add_argument('--ranks', type=int, default=2)
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--updates', type=int, default=3, help='measured in each round')
    parser.add_argument('--engines', nargs='+', choices=ENGINES, default=ENGINES)
    parser.add_argument('--measure', help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        return measure_here(args.measure, args.size, args.episodes, args.updates)
    command = [
        __file__,
        '--size',
        args.size,
        '--episodes',
        args.episodes,
        '--updates',
        args.updates,
        '--measure',
    ]
    seconds = {name: [] for name in ('alone', 'apart', *args.engines)}
    for _ in range(args.rounds):
        seconds['alone'] += measure(1, *command, 'auto')
        for process in [start(1, *command, 'auto') for _ in range(args.ranks)]:
            seconds['apart'] += result_of(process)
        for engine in args.engines:
            seconds[engine] += measure(args.ranks, *command, engine)
    alone = statistics.median(seconds['alone']), min(seconds['alone'])
    for name, found in seconds.items():
        median, best = statistics.median(found), min(found)
        print(
            f'{name:8} median {median:.2f} s (efficiency {alone[0] / median:.2f}), '
            f'best {best:.2f} s (efficiency {alone[1] / best:.2f})'
        )


if __name__ == '__main__':
    sys.exit(main())
