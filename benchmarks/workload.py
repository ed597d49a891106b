"""What the speed benchmarks share: models of random weights, queries, measuring in processes of their own, FLOPs."""
import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lm_human_preferences.language import encodings, model  # noqa: E402
from lm_human_preferences.utils import precision  # noqa: E402

SIZES = {'test': (64, 2, 2), '124M': (768, 12, 12), '355M': (1024, 16, 24), '774M': (1280, 20, 36),
         '1558M': (1600, 25, 48)}
QUERY_LENGTH, RESPONSE_LENGTH, VOCABULARY, PADDING = 64, 24, encodings.Main.n_vocab, 50259
VARIANTS = {'plain': 'plain PyTorch, fp32', 'fp32': 'ours, fp32', 'bf16': 'ours, bf16'}


class RandomModel:
    """Stands in for TrainedModel: random weights of a size, without the files of the encoding."""
    is_random = True

    class encoding:
        name, n_vocab = 'main', VOCABULARY

        @staticmethod
        def get_encoder():
            return argparse.Namespace(padding_token=PADDING)

    def __init__(self, size):
        n_embd, n_head, n_layer = SIZES[size]
        self.sizes = model.HParams(n_vocab=VOCABULARY, n_ctx=1024, n_embd=n_embd, n_head=n_head, n_layer=n_layer)

    def hparams(self):
        return self.sizes

    def build(self, *, scope, scalar_heads=()):
        torch.manual_seed(0)
        return model.Model(self.sizes, scalar_heads).initialize()


def plain_model(size):
    """GPT-2 as `transformers` makes it, of random weights and without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel  # takes seconds, which the others need not wait
    n_embd, n_head, n_layer = SIZES[size]
    return GPT2LMHeadModel(GPT2Config(n_embd=n_embd, n_head=n_head, n_layer=n_layer, embd_pdrop=0, attn_pdrop=0,
                                      resid_pdrop=0))


def queries(batch):
    """`(batch, QUERY_LENGTH)` random tokens; of them 48 to 64 are real, as of passages of a book cut at a full stop."""
    tokens = torch.randint(VOCABULARY, (batch, QUERY_LENGTH), generator=torch.Generator().manual_seed(1))
    lengths = torch.randint(3 * QUERY_LENGTH // 4, QUERY_LENGTH + 1, (batch, 1),
                            generator=torch.Generator().manual_seed(2))
    return tokens.masked_fill(torch.arange(QUERY_LENGTH) >= lengths, PADDING)


def padded_left(tokens):
    """Queries as other programs pad them: `(tokens with 0 for padding, mask of the real ones)`."""
    real = tokens != PADDING
    order = real.long().argsort(dim=1, stable=True)
    return (tokens * real).gather(1, order), real.gather(1, order)


def positions(mask):
    """Position of each token of `mask (batch, length)`, 0 at padding on the left."""
    return (mask.long().cumsum(1) - 1).clamp_(min=0)


def linear_flops(size, *, tokens, read, logits=0):
    """Floating-point operations of the linear layers on so many tokens; the last block counts where it is `read`.

    logits: positions whose logits are needed.
    """
    d, _, n_layer = SIZES[size]
    return tokens * 24 * d * d * (n_layer - 1) + tokens * 4 * d * d + read * 20 * d * d + logits * 2 * d * VOCABULARY


def attention_flops(size, tokens):
    """Of causal attention over so many tokens; in the last block, where few are read, it is not worth counting."""
    d, _, n_layer = SIZES[size]
    return 2 * tokens * tokens * d * (n_layer - 1)


def matmul_rate(size, rows, dtype):
    """Operations per second of the product that a transformer spends most time in, the best of ten."""
    d = SIZES[size][0]
    a, b, times = torch.randn(rows, d).to(dtype), torch.randn(d, 4 * d).to(dtype), []
    for _ in range(12):
        started = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - started)
    return 2 * rows * d * 4 * d / min(times)


class Clock:
    """Seconds by phase, of which there may be several calls."""

    def __init__(self):
        self.seconds = {}

    def timed(self, phase, function):
        """`function`, whose time counts as that of `phase`."""
        def wrapped(*args, **kwargs):
            started = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds[phase] = self.seconds.get(phase, 0) + time.perf_counter() - started
            return result
        return wrapped


def set_up(variant):
    """The library and the types of products that a variant uses; for what is not ours, as PyTorch is by itself."""
    if variant not in ('fp32', 'bf16'):
        torch.backends.mkldnn.matmul.fp32_precision = 'none'
    else:
        precision.prepare(variant, torch.device('cpu'))


def repeat(step, clock, repeats):
    """Medians over `repeats` calls of `step` after one to warm up, and the peak of memory: a dict for JSON."""
    rounds, seconds, processor = [], [], []
    for _ in range(repeats + 1):
        clock.seconds = {}
        before, started = time.process_time(), time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
        processor.append(time.process_time() - before)
        rounds.append(clock.seconds)
    phases = {name: statistics.median(round_[name] for round_ in rounds[1:]) for name in rounds[0]}
    return {'seconds': statistics.median(seconds[1:]), 'processor': statistics.median(processor[1:]), 'phases': phases,
            'gigabytes': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** 20}


def arguments(doc, batch, variants=VARIANTS):
    """Parsed options: size, batch, repeats, threads, and `variant`, which a child process measures."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--size', choices=SIZES, default='124M')
    parser.add_argument('--batch', type=int, default=batch)
    parser.add_argument('--repeats', type=int, default=3)
    parser.add_argument('--threads', type=int, default=2)
    parser.add_argument('--variant', choices=variants)
    parser.set_defaults(variants=variants)
    return parser.parse_args()


def in_own_process(args, variant, threads):
    """What this program, started again for one variant, prints last."""
    command = [sys.executable, sys.argv[0], '--size', args.size, '--batch', str(args.batch), '--repeats',
               str(args.repeats), '--threads', str(threads), '--variant', variant]
    environment = {**os.environ, 'OMP_NUM_THREADS': str(threads)}
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(output.splitlines()[-1])


def table(args, unit):
    """Print each variant beside the plain one, and beside itself on one thread."""
    print(f'{platform.machine()}, torch {torch.__version__}, {args.size}, batch {args.batch}, {args.threads} threads')
    print(f'{"":20} {"s/" + unit:>9} {"faster":>7} {"cpu s":>7} {"1 thread":>9} {"gain":>5} {"GB":>5} {"GFLOP":>7} '
          f'{"GFLOP/s":>8} {"of rate":>8}  phases')
    plain = None
    for variant, name in args.variants.items():
        ours = in_own_process(args, variant, args.threads)
        alone = in_own_process(args, variant, 1) if variant in ('fp32', 'bf16') and args.threads > 1 else None
        plain = plain or ours
        rate = ours['flops'] / ours['seconds']
        phases = ', '.join(f'{phase} {seconds:.2f}' for phase, seconds in ours['phases'].items())
        one = (f'{alone["seconds"]:9.2f} {alone["seconds"] / ours["seconds"]:5.2f}' if alone else ' ' * 15)
        print(f'{name:20} {ours["seconds"]:9.2f} {plain["seconds"] / ours["seconds"]:7.2f} {ours["processor"]:7.2f} '
              f'{one} {ours["gigabytes"]:5.1f} {ours["flops"] / 1e9:7.0f} {rate / 1e9:8.0f} '
              f'{rate / ours["matmul_rate"]:8.0%}  {phases}', flush=True)


def main(args, measure, unit):
    """Measure one variant in this process, or all of them in processes of their own."""
    if args.variant is None:
        return table(args, unit)
    torch.set_num_threads(args.threads)
    set_up(args.variant)
    dtype = torch.bfloat16 if args.variant == 'bf16' else torch.float32
    rate = matmul_rate(args.size, args.batch * (QUERY_LENGTH + RESPONSE_LENGTH), dtype)
    print(json.dumps({**measure(args), 'matmul_rate': rate}))
