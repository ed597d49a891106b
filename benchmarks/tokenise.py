#!/usr/bin/env python3
"""Speed of tokenising, beside transformers' GPT-2 tokeniser, and of reading labels.

    pipenv run python benchmarks/tokenise.py [--size full] [--repeats 3]

Both tokenise the same text, that of Python's own help. GPT-2's encoder.json and vocab.bpe have to
be in the cache, or in the folder that LMHP_GPT2_ENCODINGS names; they are not downloaded here. The
labels are made up: 46,000 of them, of 800 tokens each, are a file of `cnndm`. They are read as
training reads them, and by json.loads alone.
"""

import argparse
import functools
import json
import os
import pydoc_data.topics
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import workload
from transformers import GPT2Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lm_human_preferences import storage
from lm_human_preferences.hparams.reward_options import HParams
from lm_human_preferences.labels import label_files
from lm_human_preferences.language import encodings

SIZES = {'test': (1, 500), 'full': (10, 46_000)}  # times the text, labels
QUERY_LENGTH, RESPONSE_LENGTH, SAMPLES = 500, 75, 4
PADDING = 50259


def seconds(jobs, repeats):
    """{job: (seconds, processor seconds)}, medians, the jobs taken in turn."""
    times = {name: [] for name in jobs}
    for _ in range(repeats):
        for name, job in jobs.items():
            started, before = time.perf_counter(), time.process_time()
            job()
            times[name].append((time.perf_counter() - started, time.process_time() - before))
    return {name: tuple(map(statistics.median, zip(*values))) for name, values in times.items()}


def show(what, times, amount, unit):
    """A line for each job; the last of them is what the others are compared with."""
    *_, (_, reference) = times.values()
    print(f'{what:44} {"seconds":>8} {"processor":>10} {unit:>8} {"faster":>7}')
    for name, (clock, processor) in times.items():
        print(
            f'  {name:42} {clock:8.3f} {processor:10.3f} {amount / processor:8.2f}'
            f' {reference / processor:7.2f}'
        )


def encoding(copies, repeats):
    """Time both encoders on the same passages.

    Ours takes them one by one, as it does those of a data set.
    """
    os.environ['LMHP_OFFLINE'] = '1'
    try:
        vocab = storage.cached_path(encodings.Main.path('encoder.json'))
        merges = storage.cached_path(encodings.Main.path('vocab.bpe'))
    except storage.StorageError as e:
        return print(f"encoding: left out, as GPT-2's encoding is not at hand ({e})")
    passages = [
        passage for text in pydoc_data.topics.topics.values() for passage in text.split('\n\n')
    ] * copies
    ours, theirs = encodings.Main.get_encoder(), GPT2Tokenizer(vocab=vocab, merges=merges)
    assert [ours.encode(passage) for passage in passages[:2000]] == theirs(passages[:2000])[
        'input_ids'
    ]
    show(
        'encoding',
        seconds(
            {
                'ours, one by one': lambda: [ours.encode(passage) for passage in passages],
                'transformers, one by one': lambda: [
                    theirs.encode(passage) for passage in passages
                ],
                'transformers, all at once': lambda: theirs(passages),
            },
            repeats,
        ),
        sum(len(passage.encode()) for passage in passages) / 1e6,
        'MB/s',
    )


def made_up_labels(count):
    """Made-up labels with padded queries and samples, and tokens as unevenly frequent as words."""
    rng = np.random.default_rng(0)

    def row(length):
        real = int(rng.integers(length // 2, length + 1))
        return [
            *(rng.zipf(1.3, real) % encodings.Main.n_vocab).tolist(),
            *[PADDING] * (length - real),
        ]

    return [
        {
            'query': row(QUERY_LENGTH),
            **{f'sample{i}': row(RESPONSE_LENGTH) for i in range(SAMPLES)},
            'best': int(rng.integers(SAMPLES)),
        }
        for _ in range(count)
    ]


def labels(count, repeats):
    """Time what train_reward does with a label file, beside json.loads of the same file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, 'labels.json')
        path.write_text(json.dumps(made_up_labels(count)))
        hparams = HParams()
        hparams.override_from_dict(
            {
                'labels.source': str(path),
                'labels.type': f'best_of_{SAMPLES}',
                'labels.num_train': count,
                'task.query_length': QUERY_LENGTH,
                'task.response_length': RESPONSE_LENGTH,
            }
        )
        show(
            f'{count} labels of {QUERY_LENGTH + SAMPLES * RESPONSE_LENGTH} tokens',
            seconds(
                {
                    'as tensors, checked': functools.partial(
                        label_files.load_labels, hparams, workload.ENCODING
                    ),
                    'json.loads': lambda: json.loads(path.read_text()),
                },
                repeats,
            ),
            path.stat().st_size / 1e6,
            'MB/s',
        )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--size', choices=SIZES, default='full')
    parser.add_argument('--repeats', type=int, default=3)
    args = parser.parse_args()
    copies, count = SIZES[args.size]
    encoding(copies, args.repeats)
    labels(count, args.repeats)


if __name__ == '__main__':
    main()
