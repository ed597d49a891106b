"""Measuring for the speed benchmarks: each variant in its own process, on a GPU if there is one."""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time

import torch
from workload import MODELS, QUERY_LENGTH, RESPONSE_LENGTH, SIZES, library_for

from lm_human_preferences.machine import hardware, precision
from lm_human_preferences.machine.hardware import default_device

PRECISIONS = 'fp32', 'tf32', 'bf16'
VARIANTS = {'plain': 'plain PyTorch, fp32', 'fp32': 'ours, fp32', 'bf16': 'ours, bf16'}


def now():
    """Seconds on a clock that is read once the GPU has finished all its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_memory():
    """Peak memory in GB, of tensors on the GPU, or of this process if there is none."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return memory_taken() / 2**30


def memory_taken():
    """The most bytes that this process has taken, of the GPU or, if there is none, of the host."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def machine(size, library=None):
    """The GPU; if there is none, the kind of processor and the library that multiplies on it."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f'{hardware.this_processor()}, fp32 by {library or library_for(size)}'


def matmul_rate(size, rows, dtype):
    """Operations per second of a transformer's largest product, in the fastest of twelve rounds."""
    d = SIZES[size][0]
    # Many products at a time on a GPU, so that waiting for it does not count.
    at_a_time = 20 if torch.cuda.is_available() else 1
    a = torch.randn(rows, d).to(default_device(), dtype)
    b = torch.randn(d, 4 * d).to(default_device(), dtype)
    times = []
    for _ in range(12):
        started = now()
        for _ in range(at_a_time):
            torch.mm(a, b)
        times.append(now() - started)
    return at_a_time * 2 * rows * d * 4 * d / min(times)


class Clock:
    """Seconds spent in each phase, summed over its calls."""

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


def set_up(variant, size, library=None):
    """Set the precision and the library of matrix products for a variant.

    Ours get `library`, or the one that a training of this size takes; plain gets PyTorch's default.
    What follows a dash in a variant's name is not a precision.
    """
    name = variant.partition('-')[0]
    if name in PRECISIONS:
        precision.configure(name, default_device(), library or library_for(size))
    else:
        precision.select_library('default')
        torch.backends.cuda.matmul.allow_tf32 = False


def repeat(step, clock, repeats, warm_up=1):
    """Time `repeats` calls of `step` after `warm_up` others.

    Returns medians, the seconds of each and peak memory, for JSON.
    """
    rounds = []
    seconds = []
    processor = []
    for _ in range(warm_up + repeats):
        clock.seconds = {}
        before = time.process_time()
        started = now()
        step()
        seconds.append(now() - started)
        processor.append(time.process_time() - before)
        rounds.append(clock.seconds)
    rounds = rounds[warm_up:]
    seconds = seconds[warm_up:]
    processor = processor[warm_up:]
    phases = {name: statistics.median(round_[name] for round_ in rounds) for name in rounds[0]}
    return {
        'seconds': statistics.median(seconds),
        'each': seconds,
        'processor': statistics.median(processor),
        'phases': phases,
        'gigabytes': peak_memory(),
    }


def arguments(doc, batch, variants=VARIANTS):
    """Parsed options: size, batch, repeats, threads, and `variant` in a child process."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model(parser)
    parser.add_argument('--batch', type=int, default=batch)
    parser.add_argument('--repeats', type=int, default=3)
    parser.add_argument('--threads', type=int, default=2)
    add_library(parser)
    add_no_bf16(parser)
    parser.add_argument('--variant', choices=variants)
    args = parser.parse_args()
    args.variants = chosen(variants, args)
    return args


def add_model(parser):
    """Add the options that say which network is measured."""
    parser.add_argument('--model', choices=MODELS, default='gpt2')
    parser.add_argument('--size', choices=SIZES, default='124M')


def add_library(parser):
    """Add the option that measures what another kind of processor would choose."""
    parser.add_argument(
        '--library',
        choices=precision.LIBRARIES,
        help='for our fp32, instead of the faster one here',
    )


def add_no_bf16(parser):
    """Add the option that leaves bf16 out."""
    parser.add_argument(
        '--no-bf16',
        action='store_true',
        help='where there are no instructions for it, an update may take half an hour',
    )


def chosen(variants, args):
    """The variants that are asked for."""
    return {name: text for name, text in variants.items() if name != 'bf16' or not args.no_bf16}


def in_own_process(variant, threads):
    """Run this program again for one variant; returns the JSON that it prints last."""
    command = [sys.executable, *sys.argv, '--threads', str(threads), '--variant', variant]
    environment = {**os.environ, 'OMP_NUM_THREADS': str(threads)}
    output = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    return json.loads(output.splitlines()[-1])


def by_phase(result, digits=2):
    """The seconds of each phase in a result of `repeat`, in one line."""
    return ', '.join(f'{phase} {seconds:.{digits}f}' for phase, seconds in result['phases'].items())


def table(args, unit):
    """Print each variant beside the plain one, and beside itself on one thread of a CPU."""
    several_threads = args.threads > 1 and not torch.cuda.is_available()
    print(
        f'{machine(args.size, args.library)}, torch {torch.__version__}, {args.model}'
        f' {args.size}, batch {args.batch}, {args.threads} threads'
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
    """Print as JSON what `measure(args)` finds, and the rate of products in this process."""
    torch.set_num_threads(args.threads)
    set_up(args.variant, args.size, args.library)
    dtype = torch.bfloat16 if args.variant == 'bf16' else torch.float32
    rate = matmul_rate(args.size, args.batch * (QUERY_LENGTH + RESPONSE_LENGTH), dtype)
    print(json.dumps({**measure(args), 'matmul_rate': rate}))


def main(args, measure, unit):
    """Measure one variant in this process, or all of them in processes of their own."""
    if args.variant is None:
        table(args, unit)
    else:
        measure_here(args, measure)
