"""How the speed benchmarks measure: on a GPU where there is one, each variant in a process of its
own."""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time

import torch
from workload import QUERY_LENGTH, RESPONSE_LENGTH, SIZES

from lm_human_preferences.training import precision
from lm_human_preferences.utils.core import default_device

PRECISIONS = 'fp32', 'tf32', 'bf16'
VARIANTS = {'plain': 'plain PyTorch, fp32', 'fp32': 'ours, fp32', 'bf16': 'ours, bf16'}


def now():
    """Seconds of a clock that is read when a GPU has done all that it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_memory():
    """GB: the most that tensors on a GPU took at a time, or that this process did where there is
    none."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def machine():
    """The name of the GPU, or the kind of processor where there is none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()


def matmul_rate(size, rows, dtype):
    """Operations per second of the product that a transformer spends most time in, the best of
    ten."""
    d, at_a_time = (
        SIZES[size][0],
        20 if torch.cuda.is_available() else 1,
    )  # so that waiting for a GPU does not count
    a, b = (torch.randn(shape).to(default_device(), dtype) for shape in ((rows, d), (d, 4 * d)))
    times = []
    for _ in range(12):
        started = now()
        for _ in range(at_a_time):
            a @ b
        times.append(now() - started)
    return at_a_time * 2 * rows * d * 4 * d / min(times)


class Clock:
    """Seconds by phase, of which there may be several calls."""

    def __init__(self):
        self.seconds = {}

    def timed(self, phase, function):
        """`function`, whose time counts as that of `phase`."""

        def wrapped(*args, **kwargs):
            started = now()
            result = function(*args, **kwargs)
            self.seconds[phase] = self.seconds.get(phase, 0) + now() - started
            return result

        return wrapped


def set_up(variant):
    """The library and the types of products that a variant uses; for what is not ours, as PyTorch
    is by itself."""
    if variant in PRECISIONS:
        precision.configure(variant, default_device())
    else:
        torch.backends.mkldnn.matmul.fp32_precision = 'none'
        torch.backends.cuda.matmul.allow_tf32 = False


def repeat(step, clock, repeats, warm_up=1):
    """What `repeats` calls of `step` after `warm_up` took: medians, each one's seconds, peak of
    memory; for JSON."""
    rounds, seconds, processor = [], [], []
    for _ in range(warm_up + repeats):
        clock.seconds = {}
        before, started = time.process_time(), now()
        step()
        seconds.append(now() - started)
        processor.append(time.process_time() - before)
        rounds.append(clock.seconds)
    rounds, seconds, processor = (values[warm_up:] for values in (rounds, seconds, processor))
    phases = {name: statistics.median(round_[name] for round_ in rounds) for name in rounds[0]}
    return {
        'seconds': statistics.median(seconds),
        'each': seconds,
        'processor': statistics.median(processor),
        'phases': phases,
        'gigabytes': peak_memory(),
    }


def arguments(doc, batch, variants=VARIANTS):
    """Parsed options: size, batch, repeats, threads, and `variant`, which a child process
    measures."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--size', choices=SIZES, default='124M')
    parser.add_argument('--batch', type=int, default=batch)
    parser.add_argument('--repeats', type=int, default=3)
    parser.add_argument('--threads', type=int, default=2)
    parser.add_argument('--variant', choices=variants)
    parser.set_defaults(variants=variants)
    return parser.parse_args()


def in_own_process(variant, threads):
    """What this program, started again for one variant, prints last."""
    command = [sys.executable, *sys.argv, '--threads', str(threads), '--variant', variant]
    environment = {**os.environ, 'OMP_NUM_THREADS': str(threads)}
    output = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    return json.loads(output.splitlines()[-1])


def by_phase(found, digits=2):
    """The seconds of the phases of what `repeat` found, in a row."""
    return ', '.join(f'{phase} {seconds:.{digits}f}' for phase, seconds in found['phases'].items())


def table(args, unit):
    """Print each variant beside the plain one, and beside itself on one thread of a CPU."""
    several_threads = args.threads > 1 and not torch.cuda.is_available()
    print(
        f'{machine()}, torch {torch.__version__}, {args.size}, batch {args.batch}, {args.threads}'
        ' threads'
    )
    print(
        f'{"":20} {"s/" + unit:>9} {"faster":>7} {"cpu s":>7} {"1 thread":>9} {"gain":>5} {"GB":>5}'
        f' {"GFLOP":>7} {"GFLOP/s":>8} {"of rate":>8}  phases'
    )
    plain = None
    for variant, name in args.variants.items():
        ours = in_own_process(variant, args.threads)
        alone = in_own_process(variant, 1) if variant in PRECISIONS and several_threads else None
        plain = plain or ours
        rate = ours['flops'] / ours['seconds']
        one = (
            f'{alone["seconds"]:9.2f} {alone["seconds"] / ours["seconds"]:5.2f}'
            if alone
            else ' ' * 15
        )
        print(
            f'{name:20} {ours["seconds"]:9.2f} {plain["seconds"] / ours["seconds"]:7.2f}'
            f' {ours["processor"]:7.2f} {one} {ours["gigabytes"]:5.1f} {ours["flops"] / 1e9:7.0f}'
            f' {rate / 1e9:8.0f} {rate / ours["matmul_rate"]:8.0%}  {by_phase(ours)}',
            flush=True,
        )


def measure_here(args, measure):
    """Print as JSON what `measure(args)` finds of `args.variant`, and the rate of products, both in
    this process."""
    torch.set_num_threads(args.threads)
    set_up(args.variant)
    dtype = torch.bfloat16 if args.variant == 'bf16' else torch.float32
    rate = matmul_rate(args.size, args.batch * (QUERY_LENGTH + RESPONSE_LENGTH), dtype)
    print(json.dumps({**measure(args), 'matmul_rate': rate}))


def main(args, measure, unit):
    """Measure one variant in this process, or all of them in processes of their own."""
    table(args, unit) if args.variant is None else measure_here(args, measure)
