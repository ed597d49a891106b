#!/usr/bin/env python3
"""Work alone, and two processes at once on the same cores, by how OpenMP's threads wait.

    pipenv run python benchmarks/together.py [WORK ...] [--size 124M] [--spins 300000,ours]
        [--rounds 5] [--seconds 10] [--threads 2]

    update, reward   a PPO update of 4 episodes, a step of reward training on 4 labels
    16, 1            sampling 24 tokens, so many at a time
    ranks            an update of two ranks with --threads each
    page             twenty labellers of a page beside updates

spins: values of GOMP_SPINCOUNT; `ours`: that which a training sets. libgomp by itself spins
300,000 times, about 3 ms. Alone, a process of each setting is there, and they take turns; ratios
are those to the first setting. Two at once have the same setting.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import labelling
import measuring
import on_ranks
import ppo_update
import reward_step
import sampling
import torch
import workload

from lm_human_preferences.distributed import comm
from lm_human_preferences.distributed.launch_methods import SPIN_COUNT
from lm_human_preferences.policy import Policy

EPISODES = 4
WORKS = 'update', 'reward', '16', '1', 'ranks', 'page'


# ---------------------------------------------------------------- in a process of its own


def step_of(work, size):
    """A function that does `work` once."""
    world = comm.init_comm()
    measuring.set_up('fp32', size)
    if work in ('update', 'ranks'):
        hparams = ppo_update.hparams_of(EPISODES * world.size)
        return ppo_update.Ours(size, hparams, workload.queries(EPISODES), world).update
    if work == 'reward':
        args = argparse.Namespace(size=size, model='gpt2', batch=EPISODES)
        return reward_step.ours(args, reward_step.labels(EPISODES))
    policy = Policy(workload.random_model(size, 'gpt2'), temperature=0.7, only_samples=True)
    contexts = torch.randint(workload.VOCABULARY, (int(work), workload.QUERY_LENGTH))
    return lambda: sampling.sampled(policy, contexts)


def timed(step):
    """The seconds of one step."""
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def work_on_ranks(size, rounds):
    """Print the median seconds of an update of all ranks, as JSON."""
    step = step_of('ranks', size)
    seconds = [timed(step) for _ in range(rounds + 1)][1:]
    if comm.init_comm().rank == 0:
        print(json.dumps(statistics.median(seconds)))


def work_when_told(work, size):
    """For each line of standard input work for so many seconds, and print the median of a step."""
    step = step_of(work, size)
    timed(step)
    print('ready', flush=True)
    for line in sys.stdin:
        end = time.perf_counter() + float(line)
        seconds = [timed(step)]
        while time.perf_counter() < end:
            seconds.append(timed(step))
        print(statistics.median(seconds), flush=True)


# ---------------------------------------------------------------- around it


def variables(spin, args):
    """The environment of a setting."""
    threads = {'OMP_NUM_THREADS': str(args.threads)}
    return {**threads, 'GOMP_SPINCOUNT': SPIN_COUNT if spin == 'ours' else spin}


def here(work, args):
    """The words by which this program does `work` in a process of its own."""
    return [__file__, '--size', args.size, '--rounds', str(args.rounds), '--here', work]


class Worker:
    """A process that works when it is told to."""

    def __init__(self, work, spin, args):
        self.process = subprocess.Popen(
            [sys.executable, *here(work, args)],
            env={**os.environ, **variables(spin, args)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.answer() == 'ready'

    def answer(self):
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def begin(self, seconds):
        print(seconds, file=self.process.stdin, flush=True)

    def end(self):
        self.process.communicate()


def alone(work, args):
    """{setting: seconds of each round}: the processes take turns."""
    workers = {spin: Worker(work, spin, args) for spin in args.spins}
    seconds = {spin: [] for spin in workers}
    for _ in range(args.rounds):
        for spin, worker in workers.items():
            worker.begin(0)
            seconds[spin].append(float(worker.answer()))
    for worker in workers.values():
        worker.end()
    return seconds


def at_once(work, spin, args):
    """Seconds of the slower of two processes."""
    workers = [Worker(work, spin, args) for _ in range(2)]
    for worker in workers:
        worker.begin(args.seconds)
    seconds = [float(worker.answer()) for worker in workers]
    for worker in workers:
        worker.end()
    return max(seconds)


def ratio(seconds, first):
    """The mean ratio of each round to the first setting's, and its standard error."""
    ratios = [one / base for one, base in zip(seconds, first, strict=True)]
    error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0
    return f'{statistics.mean(ratios):.3f} ± {error:.3f}'


def print_processes(work, args):
    seconds = alone(work, args)
    for spin, own in seconds.items():
        print(
            f'{work:7} {spin:>7} {statistics.median(own):7.3f}'
            f' {ratio(own, seconds[args.spins[0]])} {at_once(work, spin, args):7.3f}',
            flush=True,
        )


def print_ranks(args):
    for spin in args.spins:
        seconds = on_ranks.measure(2, *here('ranks', args), **variables(spin, args))
        print(f'ranks   {spin:>7} {seconds:7.3f}', flush=True)


@contextlib.contextmanager
def updates(spin, args):
    """Within the block updates run, for --seconds at least; their seconds are printed."""
    worker = Worker('update', spin, args)
    worker.begin(args.seconds)
    yield
    print(f'page    {spin:>7} {float(worker.answer()):7.3f}', flush=True)
    worker.end()


def print_page(args):
    for spin in args.spins:
        with tempfile.TemporaryDirectory() as name:
            labelling.many(Path(name), args.answers, args.pause, updates(spin, args))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('works', nargs='*', metavar='WORK', choices=[*WORKS, []])
    parser.add_argument('--size', choices=workload.SIZES, default='124M')
    parser.add_argument('--spins', default='300000,ours')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--seconds', type=float, default=10)
    parser.add_argument('--threads', type=int, default=2)
    parser.add_argument('--answers', type=int, default=400)
    parser.add_argument('--pause', type=float, default=0.25, help='mean seconds of thought')
    parser.add_argument('--here', help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here == 'ranks':
        return work_on_ranks(args.size, args.rounds)
    if args.here:
        return work_when_told(args.here, args.size)
    args.spins = args.spins.split(',')
    print(f'{measuring.machine(args.size)}, torch {torch.__version__}, {args.threads} threads')
    print(f'{"work":7} {"spins":>7} {"alone":>7} {"ratio":13} {"two":>7}')
    for work in args.works or WORKS:
        if work == 'ranks':
            print_ranks(args)
        elif work == 'page':
            print_page(args)
        else:
            print_processes(work, args)


if __name__ == '__main__':
    main()
