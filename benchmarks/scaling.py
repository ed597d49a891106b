#!/usr/bin/env python3
"""Cost of a PPO update, by its batch, the length of responses, the model and the number of ranks.

    pipenv run python benchmarks/scaling.py [--size 124M] [--batch 8] [--ranks 2] [--repeats 1]

One thing at a time is changed against the same base: a model of --size, --batch episodes, responses
of 24 tokens, one rank. Each line is measured in a process of its own, with one thread. `work` is
the least number of operations and `time` the processor seconds, both as multiples of the base. Each
rank has --batch episodes; the seconds are rank 0's.
"""

import argparse
import json
import platform
import statistics
import time

import ppo_update
import torch
import workload
from on_ranks import end, measure

from lm_human_preferences.distributed import comm
from lm_human_preferences.machine import precision

LARGER = {'124M': '355M', '355M': '774M', '774M': '1558M'}


def measure_here(size, batch, response_length, updates):
    """Print the median seconds and processor seconds of an update as JSON.

    batch: episodes of each rank.
    """
    world = comm.init_comm()
    precision.configure('fp32', torch.device('cpu'), workload.library_for(size))
    hparams = ppo_update.hparams_of(batch * world.size)
    hparams.task.response_length = response_length
    run = ppo_update.Ours(size, hparams, workload.queries(batch), world)
    times = []
    for _ in range(updates + 1):
        world.barrier()
        started, before = time.perf_counter(), time.process_time()
        run.update()
        times.append((time.perf_counter() - started, time.process_time() - before))
    if world.rank == 0:
        print(json.dumps([statistics.median(column) for column in zip(*times[1:])]))
    if world.size > 1:
        end(world)


def variations(args):
    """{what is changed: (size, episodes of a rank, response length, ranks)}, the base first."""
    size, batch, length = args.size, args.batch, workload.RESPONSE_LENGTH
    found = {
        'base': (size, batch, length, 1),
        'batch x 2': (size, 2 * batch, length, 1),
        'batch x 4': (size, 4 * batch, length, 1),
        'responses x 2': (size, batch, 2 * length, 1),
    }
    if size in LARGER:
        found[f'model {LARGER[size]}'] = LARGER[size], batch, length, 1
    found[f'{args.ranks} ranks'] = size, batch, length, args.ranks
    skipped = args.skip.split(',') if args.skip else []
    return {
        what: sizes for what, sizes in found.items() if not any(word in what for word in skipped)
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--size', choices=workload.SIZES, default='124M')
    parser.add_argument('--batch', type=int, default=8)
    parser.add_argument('--ranks', type=int, default=2)
    parser.add_argument('--repeats', type=int, default=1)
    parser.add_argument(
        '--skip', default='', metavar='WORD,...', help='leave out lines that name one of these'
    )
    parser.add_argument('--measure', type=int, metavar='RESPONSE_LENGTH', help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        return measure_here(args.size, args.batch, args.measure, args.repeats)
    print(f'{platform.machine()}, torch {torch.__version__}, {args.size}, batch {args.batch}')
    print(f'{"":16} {"seconds":>8} {"processor":>10} {"work":>6} {"time":>6} {"time / work":>12}')
    base = None
    for what, (size, batch, length, ranks) in variations(args).items():
        words = ['--size', size, '--batch', batch, '--repeats', args.repeats, '--measure', length]
        seconds, processor = measure(ranks, __file__, *words)
        flops = ppo_update.flops(size, workload.queries(batch), 4, length)
        base = base or (processor, flops)
        time_ratio, work = processor / base[0], flops / base[1]
        print(
            f'{what:16} {seconds:8.2f} {processor:10.2f} {work:6.2f} {time_ratio:6.2f}'
            f' {time_ratio / work:12.2f}',
            flush=True,
        )


if __name__ == '__main__':
    main()
