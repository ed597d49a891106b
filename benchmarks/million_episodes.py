#!/usr/bin/env python3
"""Time of a million episodes of the descriptiveness setting, and of its parts.

    pipenv run python benchmarks/million_episodes.py [--size 124M] [--batch 512]
        [--micro-batch-size N] [--updates 30] [--precision fp32 tf32 bf16]

It runs on a GPU if there is one, else on the CPU, each precision in a process of its own.
`min/million` is what a million episodes take at the mean of the updates' seconds, without start and
checkpoints; `s/update` and the phases are medians. `GFLOP` is the least work that an update needs
in any implementation; `of rate` is the achieved share of this machine's rate of matrix products in
that precision, measured in the same process. Below each line are the operators with the most device
time of their own, from further updates under PyTorch's profiler.
"""

import argparse
import operator
import statistics

import measuring
import ppo_update
import torch
import workload
from torch.profiler import profile

from lm_human_preferences.distributed import comm

EPISODES = 1_000_000
OPERATORS = 5


def measure(args):
    """The updates of one precision, and what they cost."""
    hparams, queries = ppo_update.hparams_of(args.batch), workload.queries(args.batch)
    hparams.ppo.micro_batch_size = args.micro_batch_size
    run, clock = ppo_update.Ours(args.size, hparams, queries, comm.init_comm()), measuring.Clock()
    run.time_phases(clock)
    return {
        **measuring.repeat(run.update, clock, args.updates, warm_up=args.warm_up),
        'operators': costliest(run.update, args.profiled),
        'flops': ppo_update.flops(args.size, queries, hparams.ppo.noptepochs),
    }


def costliest(update, count):
    """The operators with the most device time of their own in `count` updates.

    Returns [(name, seconds an update, share)]; empty for no updates.
    """
    if not count:
        return []
    with profile() as profiler:
        for _ in range(count):
            update()
    own_time = operator.attrgetter(  # in microseconds
        'self_device_time_total' if torch.cuda.is_available() else 'self_cpu_time_total'
    )
    # On a GPU, kernels are listed too, as events of the GPU: their time is that of the operators
    # that start them.
    found = [event for event in profiler.key_averages() if event.device_type.name == 'CPU']
    total = sum(map(own_time, found)) or 1  # if the profiler has no access to the GPU
    return [
        (event.key, own_time(event) / 1e6 / count, own_time(event) / total)
        for event in sorted(found, key=own_time, reverse=True)[:OPERATORS]
    ]


def table(args):
    """Print what each precision takes, and below it its costliest operators."""
    print(
        f'{measuring.machine(args.size, args.library)}, torch {torch.__version__}, {args.size},'
        f' batch {args.batch}, in micro-batches of {args.micro_batch_size or args.batch},'
        f' {args.updates} updates after {args.warm_up}'
    )
    print(
        f'{"":4} {"s/update":>9} {"least":>7} {"most":>7} {"episodes/s":>11} {"min/million":>12}'
        f' {"GB":>5} {"GFLOP":>8} {"GFLOP/s":>8} {"of rate":>8}  phases'
    )
    for precision in args.precision:
        found = measuring.in_own_process(precision, args.threads)
        each, rate = found['each'], found['flops'] / found['seconds']
        minutes = statistics.mean(each) / args.batch * EPISODES / 60
        print(
            f'{precision:4} {found["seconds"]:9.3f} {min(each):7.3f} {max(each):7.3f} '
            f'{args.batch / found["seconds"]:11.1f} {minutes:12.1f} {found["gigabytes"]:5.1f} '
            f'{found["flops"] / 1e9:8.0f} {rate / 1e9:8.0f} {rate / found["matmul_rate"]:8.0%}  '
            f'{measuring.by_phase(found, digits=3)}'
        )
        for name, seconds, share in found['operators']:
            print(f'     {share:4.0%} {seconds:9.3f} s/update in {name}', flush=True)


def main():
    precisions = [
        name for name in measuring.PRECISIONS if name != 'tf32' or torch.cuda.is_available()
    ]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--size', choices=workload.SIZES, default='124M')
    parser.add_argument('--batch', type=int, default=512)
    parser.add_argument('--micro-batch-size', type=int)
    parser.add_argument('--updates', type=int, default=30)
    parser.add_argument('--warm-up', type=int, default=3, help='updates that do not count')
    parser.add_argument('--profiled', type=int, default=2, help='updates under the profiler')
    parser.add_argument('--precision', nargs='+', choices=precisions, default=precisions)
    parser.add_argument('--threads', type=int, default=2, help='of the CPU')
    parser.add_argument('--variant', help=argparse.SUPPRESS)
    measuring.add_library(parser)
    args = parser.parse_args()
    if args.variant is None:
        table(args)
    else:
        measuring.measure_here(args, measure)


if __name__ == '__main__':
    main()
