#!/usr/bin/env python3
"""Time of reading and saving a 124M checkpoint, compared with its bare bytes.

    pipenv run python benchmarks/loading.py [--repeats 7]

The checkpoint is in TensorFlow's format. Everything is measured in one run, in turn, on random
weights in a temporary directory; what counts are the ratios of the medians. The files are in the
page cache; "save" ends when they are on the disk.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lm_human_preferences import storage
from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.checkpointing.tf_bundle import Bundle
from lm_human_preferences.language.trained_models import TrainedModel

N_VOCAB, N_CTX, N_EMBD, N_HEAD, N_LAYER = 50257, 1024, 768, 12, 12
# {matrix: its shape in multiples of N_EMBD}
MATRICES = {
    'attn/c_attn': (1, 3),
    'attn/c_proj': (1, 1),
    'mlp/c_fc': (1, 4),
    'mlp/c_proj': (4, 1),
}


def random_weights():
    """The variables of GPT-2 124M, {name: float32 array}."""
    shapes = {
        'wte': (N_VOCAB, N_EMBD),
        'wpe': (N_CTX, N_EMBD),
        'ln_f/g': (N_EMBD,),
        'ln_f/b': (N_EMBD,),
    }
    for layer in range(N_LAYER):
        for name, (n_in, n_out) in MATRICES.items():
            shapes[f'h{layer}/{name}/w'] = (1, n_in * N_EMBD, n_out * N_EMBD)
            shapes[f'h{layer}/{name}/b'] = (n_out * N_EMBD,)
        shapes.update(
            {f'h{layer}/{norm}/{part}': (N_EMBD,) for norm in ('ln_1', 'ln_2') for part in 'gb'}
        )
    rng = np.random.default_rng(0)
    return {
        f'model/{name}': rng.standard_normal(shape, np.float32) for name, shape in shapes.items()
    }


def read_bytes(prefix):
    for suffix in ('.index', '.data-00000-of-00001'):
        with open(prefix + suffix, 'rb') as f:
            f.read()


def read_bundle(prefix):
    """Map every tensor, every checksum verified."""
    bundle = Bundle(prefix)
    for name in bundle:
        bundle[name]


def write_bytes(path, weights):
    """Write only the values, and sync them to the disk."""
    with open(path, 'wb') as f:
        for array in weights.values():
            f.write(array)
        f.flush()
        os.fsync(f.fileno())


def seconds(jobs, repeats):
    """{job: median seconds}, the jobs taken in turn."""
    times = {name: [] for name in jobs}
    for _ in range(repeats):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--repeats', type=int, default=7)
    repeats = parser.parse_args().repeats
    weights = random_weights()
    with tempfile.TemporaryDirectory() as directory:
        prefix = checkpoints.save(directory, 'model.ckpt', weights)
        storage.write_json(
            os.path.join(directory, 'hparams.json'),
            dict(n_vocab=N_VOCAB, n_ctx=N_CTX, n_embd=N_EMBD, n_head=N_HEAD, n_layer=N_LAYER),
        )
        read = seconds(
            {
                'its bytes': lambda: read_bytes(prefix),
                'tensors, checksums verified': lambda: read_bundle(prefix),
                'model': lambda: TrainedModel(directory).build(scope='policy'),
            },
            repeats,
        )
        write = seconds(
            {
                'its bytes': lambda: write_bytes(os.path.join(directory, 'bytes'), weights),
                'checkpoint': lambda: checkpoints.save(directory, 'model.ckpt', weights),
            },
            repeats,
        )
    print(f'{sum(array.nbytes for array in weights.values()) >> 20} MiB in {len(weights)} tensors')
    for verb, times in (('read', read), ('save', write)):
        for name, duration in times.items():
            print(f'{verb} {name:28} {duration:7.3f} s   {duration / times["its bytes"]:5.2f} x')


if __name__ == '__main__':
    main()
