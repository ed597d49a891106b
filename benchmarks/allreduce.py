#!/usr/bin/env python3
"""The mean over ranks of all gradients of GPT-2 124M: each engine beside a plain Gloo all-reduce.

    pipenv run python benchmarks/allreduce.py [--ranks 2] [--rounds 5] [--only NAME,...]

A row for each engine under each launcher that this machine has, of those that
tests/helpers/real_launchers.py names; --only takes some. A cluster of Slurm is started for it.

The plain one is one `torch.distributed.all_reduce` of a single vector of 124 million float32 zeros,
and its division. The engines average the model's own parameters in their buckets, as after a
backward pass with which nothing overlapped. Each is measured in processes of its own, round after
round, so that other load on the machine affects all alike.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from on_ranks import end, measure

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / 'tests/helpers'))

import real_launchers
import slurm_cluster

from lm_human_preferences.distributed import comm
from lm_human_preferences.language import model

REPEATS = 7


def parameters_of_124m():
    """Zeros in the shapes of GPT-2 124M with its value head."""
    with torch.device('meta'):
        sizes = model.HParams(n_vocab=50257, n_ctx=1024, n_embd=768, n_head=12, n_layer=12)
        network = model.Model(sizes, ['value'])
    return [torch.nn.Parameter(torch.zeros(p.shape)) for p in network.parameters()]


def engine_mean(name):
    """Function that averages all gradients once."""
    return comm.init_comm(name).average_gradients(parameters_of_124m()).synchronize


def plain_mean():
    """The same with nothing of ours but the rendezvous."""
    import torch.distributed

    ranks = comm.init_comm('torch')
    flat = torch.zeros(sum(p.numel() for p in parameters_of_124m()))

    def mean():
        torch.distributed.all_reduce(flat)
        flat.div_(ranks.size)

    return mean


def seconds_under(launcher, engine, ranks):
    """Those that `measure_here` prints."""
    if not launcher.command:  # ours
        return measure(ranks, __file__, '--measure', engine)
    run = subprocess.run(
        [*launcher.command, sys.executable, __file__, '--measure', engine],
        env={**os.environ, 'OMP_NUM_THREADS': '1', **launcher.variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(run.stdout.splitlines()[-1])


def measure_here(name):
    """Print the seconds of each of REPEATS means as JSON.

    The first mean, which warms up, is left out.
    """
    mean = plain_mean() if name == 'plain' else engine_mean(name)
    ranks = comm.init_comm('torch' if name == 'plain' else name)
    seconds = []
    for _ in range(REPEATS + 1):
        ranks.barrier()
        started = time.perf_counter()
        mean()
        seconds.append(time.perf_counter() - started)
    if ranks.rank == 0:
        print(json.dumps(seconds[1:]))
    end(ranks)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--ranks', type=int, default=2)
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--only', default=','.join(real_launchers.LAUNCHERS))
    parser.add_argument('--measure', help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        return measure_here(args.measure)
    seconds = {}
    with slurm_cluster.on_demand() as cluster:
        measurements = {'plain': lambda: measure(args.ranks, __file__, '--measure', 'plain')}
        for name in args.only.split(','):
            try:
                launcher = real_launchers.LAUNCHERS[name](cluster, args.ranks)
            except real_launchers.Missing as missing:
                print(f'{name}: {missing}')
                continue
            for engine in real_launchers.available_engines(launcher.mpi):
                row = f'{engine} by {name}'
                measurements[row] = functools.partial(seconds_under, launcher, engine, args.ranks)
        for _ in range(args.rounds):
            for row, measurement in measurements.items():
                seconds.setdefault(row, []).extend(measurement())
    plain = statistics.median(seconds['plain']), min(seconds['plain'])
    width = max(map(len, seconds))
    for name, found in seconds.items():
        median, best = statistics.median(found), min(found)
        print(
            f'{name:{width}} median {median:.3f} s ({median / plain[0]:.2f} of plain), '
            f'best {best:.3f} s ({best / plain[1]:.2f} of plain)'
        )


if __name__ == '__main__':
    sys.exit(main())
