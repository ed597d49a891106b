"""kill -9 while a run fetches its model, encoding and labels: what is in the cache is whole, and
the run goes on.

LMHP_FAULTS and LMHP_TEST_SEED as in test_resume_kill.py.
"""

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from blobserver.server import redirect
from interrupted import assert_same, result_anywhere, run, start
from launched import FAULTS, REPOSITORY, eventually
from sample_files import tf_variables

from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.language import encodings, model

pytestmark = pytest.mark.slow
STORE = 'openaipublic/lm-human-preferences'
SIZES = dict(n_vocab=encodings.Main.n_vocab, n_ctx=8, n_embd=2, n_head=1, n_layer=1)
WORDS = [
    f'--task.policy.initial_model=az://{STORE}/model',
    '--task.query_dataset=books',
    '--ppo.total_episodes=48',
    '--ppo.batch_size=8',
    '--run.save_interval=2',
    '--rewards.train_new_model.run.save_interval=2',
    f'--rewards.train_new_model.labels.source=az://{STORE}/labels.json',
    '--rewards.train_new_model.labels.num_train=32',
    '--rewards.train_new_model.batch_size=8',
    '--rewards.train_new_model.normalize_samples=16',
    '--rewards.train_new_model.rollout_batch_size=16',
]


@pytest.fixture
def blobs(tmp_path):
    """A made-up encoding of GPT-2's size, in which every token is one or two bytes, a tiny model
    for it, and labels."""
    names, chance = [*encodings._byte_of()], random.Random(0)
    pairs = list(
        itertools.islice(itertools.product(names, repeat=2), SIZES['n_vocab'] - len(names) - 1)
    )
    vocab = {
        name: i for i, name in enumerate([*names, *map(''.join, pairs), encodings.END_OF_TEXT])
    }
    network = model.Model(model.HParams(**SIZES)).initialize()
    checkpoints.save(
        str(tmp_path / 'model'), 'model.ckpt', tf_variables(network.named_parameters())
    )
    labels = [
        {
            **{
                field: chance.choices(range(1000), k=4)
                for field in ('sample0', 'sample1', 'sample2', 'sample3')
            },
            'query': chance.choices(range(1000), k=3),
            'best': chance.randrange(4),
        }
        for _ in range(2000)
    ]
    return {
        'openaipublic/gpt-2': {
            'encodings/main/encoder.json': json.dumps(vocab).encode(),
            'encodings/main/vocab.bpe': '\n'.join(['#version', *map(' '.join, pairs), '']).encode(),
        },
        STORE: {
            'labels.json': json.dumps(labels).encode(),
            'model/hparams.json': json.dumps(SIZES).encode(),
            **{f'model/{path.name}': path.read_bytes() for path in (tmp_path / 'model').iterdir()},
        },
    }


@pytest.fixture
def slow_server(blobs, certificate, cache, tmp_path):
    """In a process of its own, whose threads do not wait for those of this one."""
    for container, files in blobs.items():
        for name, content in files.items():
            path = tmp_path / 'blobs' / container / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    command = [sys.executable, '-m', 'blobserver', tmp_path / 'blobs', certificate, '.05']
    with subprocess.Popen(
        command, cwd=REPOSITORY / 'tests/helpers', stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        port = int(process.stdout.readline())
        with redirect(argparse.Namespace(host='127.0.0.1', port=port, certificate=certificate)):
            yield


@pytest.fixture
def chance(monkeypatch):
    monkeypatch.delenv('LMHP_GPT2_ENCODINGS', raising=False)
    seed = os.environ.get('LMHP_TEST_SEED', str(random.randrange(10**6)))
    print(f'LMHP_TEST_SEED={seed}')
    return random.Random(seed)


def words(directory):
    return [
        'train_policy',
        'test',
        'run',
        '--mpi=1',
        f'--save_dir={directory}',
        *WORDS,
        '--run.resume=on',
    ]


def cached(blobs):
    """The files in the cache by their names, the halves left by kills apart; the others are
    whole."""
    root = Path(os.environ['LMHP_CACHE'])
    files = {str(path.relative_to(root)): path for path in root.rglob('*') if path.is_file()}
    halves = {name for name in files if name.endswith(('.part', '.lock'))}
    for name in files.keys() - halves:
        container, blob = '/'.join(name.split('/')[:2]), '/'.join(name.split('/')[2:])
        assert files[name].read_bytes() == blobs[container][blob], name
    return files.keys() - halves, halves


def test_killed_at_random_moments_of_downloads(tmp_path, chance, slow_server, blobs, monkeypatch):
    """Every other kill awaits that a file is half there; the others come at any time in the run."""

    def begin(name):
        (tmp_path / name).mkdir()
        monkeypatch.setenv('LMHP_CACHE', str(tmp_path / name / 'cache'))
        return tmp_path / name

    directory, began = begin('alone'), time.monotonic()
    assert run(words(directory), directory / 'out') == 0, (directory / 'out').read_text()[-2000:]
    duration, expected, (needed, _) = (
        time.monotonic() - began,
        result_anywhere(directory),
        cached(blobs),
    )
    kills, torn, runs = 0, 0, 0
    while kills < FAULTS:
        directory = begin(f'run{runs}')
        for attempt in range(min(4, FAULTS - kills)):
            before = cached(blobs)
            child = start(words(directory), directory / 'out')
            if attempt % 2 == 0 and before[0] != needed:
                eventually(lambda before=before: cached(blobs) != before)
            if torn:  # the first kill strikes as soon as something is there
                time.sleep(chance.uniform(0, 0.3 if attempt % 2 == 0 else 0.7 * duration))
            child.kill()
            if child.wait() == 0:
                break
            kills += 1
            torn += bool(cached(blobs)[1])
        assert run(words(directory), directory / 'out') == 0, (directory / 'out').read_text()[
            -2000:
        ]
        assert_same(result_anywhere(directory), expected)
        whole, left = cached(blobs)
        assert whole == needed and all(
            name.endswith('.lock') for name in left
        )  # empty, of files that are whole
        runs += 1
    print(f'{kills} kills in {runs} runs, {torn} of them in the midst of a download')
    assert torn
