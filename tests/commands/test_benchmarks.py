"""Benchmarks of speed run to their end on a tiny model; no time is judged."""

import argparse
import contextlib
import csv
import importlib
import io
import json
import math
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pretend_gpu
import pytest
import torch
from experiments import resolved
from figures import jobs

from lm_human_preferences.evaluation import optimum

FOLDER = Path(__file__).parents[2] / 'benchmarks'


@pytest.mark.slow
def test_labelling():
    options = ['many', 'large', '--answers=60', '--pause=0', '--alone', '--questions=300']
    done = subprocess.run(
        [sys.executable, FOLDER / 'labelling.py', *options],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    printed = (
        r'60 answers in .*\n.* 99 %: .*\n300 questions of .*\n(.*\n)*the report on 300 answers'
    )
    assert re.search(printed, done.stdout), done.stdout


@pytest.fixture
def own_environment():
    with mock.patch.dict(os.environ):
        yield


# {name: (command, what it prints)}
BENCHMARKS = {
    'ppo_update': (
        'ppo_update --size test --batch 1 --repeats 1 --threads 1',
        r'plain PyTorch, fp32 .*\n(.*\n)*ours, bf16 .*epochs.*\nours, 4 members .*reward',
    ),
    'million_episodes': (
        'million_episodes --size test --batch 1 --updates 1 --warm-up 0 --profiled 1'
        ' --threads 1 --precision bf16',
        r'\nbf16 .* epochs .*\n( +\d+% .* in .*\n){5}',
    ),
    'reward_step': (
        'reward_step --size test --batch 1 --repeats 1 --threads 1',
        r'plain PyTorch, fp32 .*\n(.*\n)*ours, bf16 ',
    ),
    'ppo_update llama': (
        'ppo_update --model llama --size test --batch 1 --repeats 1 --threads 1 --no-bf16',
        r' llama test, batch 1.*\n(.*\n)*ours, fp32 .*epochs',
    ),
    'reward_step transformers': (
        'reward_step --model transformers-gpt2 --size test --batch 1 --repeats 1 --threads 1',
        r' transformers-gpt2 test, batch 1.*\n(.*\n)*ours, bf16 ',
    ),
    'sampling': (
        'sampling --size test --batches 2 --repeats 1 --threads 1',
        r'\n +2( +\d+\.\d+){5}',
    ),
    'lengths': (
        'lengths --size test --batch 2 --limit 20 --repeats 1 --threads 1',
        r'\nupdate( +\d+\.\d+){5} +-?\d+\.\d+',
    ),
    'sampling llama': (
        'sampling --model llama --size test --batches 2 --repeats 1 --threads 1',
        r' llama test, .*\n.*\n +2( +\d+\.\d+){5}',
    ),
    'together': (
        'together update --size test --rounds 1 --seconds 0 --threads 1 --spins ours',
        r'\nupdate +ours +\d+\.\d+ 1\.000 .*\d\n',
    ),
    'tokenise': (
        'tokenise --size test --repeats 1',
        r'(transformers, all at once|encoding: left out).*\n(.*\n)*500 labels',
    ),
    'interval_coverage': (
        'interval_coverage labels --trials 3',
        r'\| 200 \| 1 or 5 \|( \d+\.\d \|){7}\n',
    ),
    'interval_coverage evaluation': (
        'interval_coverage evaluation trust --trials 1',
        r'\| half 0, even \| 200 \|.*\n(.*\n)*\| 30 \|( \d+\.\d \|){3}\n',
    ),
    'checkpoint': (
        'checkpoint --size test --episodes 1 --steps 1 --repeats 1',
        r'\nshare of training ',
    ),
    'scaling': (
        'scaling --size test --batch 1 --skip batch,responses',
        r'\nbase .* 1\.00   1\.00 (.*\n)*2 ranks ',
    ),
    'startup': (
        'startup --size test --repeats 1 --threads 1'
        ' --skip torch,transformers,model,reward,help,value',
        r'an unknown option .*\ntrain_policy, first step .*\ntrain_policy: .*networks \d',
    ),
    'online_step': (
        'online_step --size test --batch 1 --steps 1 --threads 1',
        r'a look that finds nothing .*\n5,000 labels in .*\n60,000 labels in .*% of a step',
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize('name', BENCHMARKS)
def test_benchmark(name, monkeypatch, capsys, own_environment):
    """In this process, without seconds of start-up, and so are its variants.

    Only startup has processes of its own, which it measures, and scaling its ranks.
    """
    command, printed = BENCHMARKS[name]
    program, *options = command.split()
    # A sixth of what is measured otherwise: also for a tiny model each token takes its time.
    for module in ('workload', 'ppo_update'):
        monkeypatch.setattr(importlib.import_module(module), 'RESPONSE_LENGTH', 4)
    on_ranks = importlib.import_module('on_ranks')
    measure_on_ranks = on_ranks.measure

    def run(*words):
        monkeypatch.setattr(sys, 'argv', [f'{program}.py', *options, *words])
        runpy.run_path(str(FOLDER / f'{program}.py'), run_name='__main__')

    def result_of(*words):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            run(*words)
        return json.loads(output.getvalue().splitlines()[-1])

    def run_variant(variant, threads):
        return result_of('--threads', str(threads), '--variant', variant)

    def measure(size, program, *words):
        if size == 1:
            return result_of(*map(str, words))
        return measure_on_ranks(size, program, *words)

    monkeypatch.setattr(importlib.import_module('measuring'), 'in_own_process', run_variant)
    monkeypatch.setattr(on_ranks, 'measure', measure)
    run()
    found = capsys.readouterr().out
    assert re.search(printed, found), found


@pytest.fixture
def waits(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    with (
        pretend_gpu.pretended(),
        mock.patch.multiple(
            torch.cuda, synchronize=mock.DEFAULT, max_memory_allocated=lambda: 3 << 30
        ) as patched,
    ):
        yield patched['synchronize']


def test_a_phase_takes_until_the_gpu_is_done(waits):
    order = mock.Mock()
    order.attach_mock(waits, 'wait')
    importlib.import_module('measuring').Clock().timed('phase', order.phase)()
    assert order.mock_calls == [mock.call.wait(), mock.call.phase(), mock.call.wait()]


@pytest.mark.slow
def test_a_million_episodes_on_a_gpu(waits, capsys, monkeypatch):
    benchmark = importlib.import_module('million_episodes')
    # Every operation on a pretended GPU is a call of Python, and profiled.
    monkeypatch.setattr(importlib.import_module('ppo_update'), 'RESPONSE_LENGTH', 4)
    importlib.import_module('measuring').measure_here(
        argparse.Namespace(
            model='gpt2',
            size='test',
            batch=1,
            micro_batch_size=None,
            updates=1,
            repeats=1,
            warm_up=0,
            profiled=1,
            threads=1,
            variant='bf16',
            library=None,
        ),
        benchmark.measure,
    )
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found['gigabytes'] == 3 and found['flops'] > 0 < found['matmul_rate']
    # A pretended GPU takes no time of its own.
    assert len(found['operators']) == 5
    assert not any(seconds for _, seconds, _ in found['operators'])


def test_shares_of_reward_models_from_few_labels_by_hand(monkeypatch):
    """Two responses, as likely as each other; at this KL the best policy chooses one in .9."""
    few_labels = importlib.import_module('few_labels')
    kl = 0.9 * math.log(1.8) + 0.1 * math.log(0.2)
    monkeypatch.setattr(few_labels, 'KLS', (kl,))
    scores = torch.tensor([[0.0, 1.0], [2.0, 4.0]]).double()
    known = jobs.Known(torch.arange(2)[:, None], torch.full_like(scores, math.log(0.5)), scores)
    # Right about the first query, wrong about the second.
    (row,) = few_labels.shares(torch.tensor([[1.0, 2.0], [1.0, 0.0]]), known)
    best = optimum.frontier_reward_at(kl, known.ref_logprobs, known.scores)
    assert row['known_reward'] == pytest.approx((0.9 + 2.2) / 2, rel=1e-4)
    assert row['share'] == pytest.approx((1.55 - 1.75) / (best - 1.75), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    'name, scale',
    [
        (
            'few_labels',
            {'labels': ((40, 0.1),), 'epochs': (1,), 'members': (1, 2), 'most_learned': 99},
        ),
        (
            'online_labels',
            {'labels': 64, 'initial': 16, 'episodes': 256, 'retrainings': (0, 1), 'errors': (0.3,)},
        ),
    ],
)
def test_tables_of_labels(name, scale, tmp_path, monkeypatch):
    def finish(processes, todo):
        for path, (job, *arguments) in todo.items():
            os.makedirs(os.path.dirname(path), exist_ok=True)
            job(path, *arguments)

    monkeypatch.setattr(jobs, 'finish', finish)
    benchmark = importlib.import_module(name)
    tiny = benchmark.Scale(**scale, seeds=1)
    monkeypatch.setattr(benchmark, 'QUICK', tiny)
    short = resolved('train_policy', 'mock_sentiment')
    for task in (short.task, short.rewards.train_new_model.task):
        task.response_length = 2
    benchmark.figures(short, str(tmp_path), quick=True)
    rows = list(csv.DictReader((tmp_path / benchmark.TABLE).open()))
    assert len(rows) == (2 * len(benchmark.KLS) if name == 'few_labels' else 2)
    assert all(-1 < float(row['share']) < 1 for row in rows)
    assert (tmp_path / benchmark.PICTURE).read_bytes().startswith(b'\x89PNG')
