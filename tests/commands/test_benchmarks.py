"""Each benchmark of speed comes to its end on a tiny model, and prints what it is for. No time is
judged here."""

import argparse
import contextlib
import importlib
import io
import json
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

from lm_human_preferences.training import precision

BENCHMARKS = Path(__file__).parents[2] / 'benchmarks'


@pytest.mark.slow
def test_labelling():
    options = ['many', 'large', '--answers=60', '--pause=0', '--alone', '--questions=300']
    done = subprocess.run(
        [sys.executable, BENCHMARKS / 'labelling.py', *options],
        capture_output=True,
        text=True,
        env={**os.environ, 'OMP_NUM_THREADS': '1'},
    )
    assert done.returncode == 0, done.stderr
    printed = (
        r'60 answers in .*\n.* 99 %: .*\n300 questions of .*\n(.*\n)*the report on 300 answers'
    )
    assert re.search(printed, done.stdout), done.stdout


@pytest.fixture
def ordinary_products():
    """Afterwards, products are what they are for other tests, and so is the environment."""
    with mock.patch.dict(os.environ):
        yield
    precision.configure('fp32', torch.device('cpu'), 'default')
    torch.set_num_threads(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    'command, printed',
    [
        (
            'ppo_update --size test --batch 1 --repeats 1 --threads 1',
            r'plain PyTorch, fp32 .*\n(.*\n)*ours, bf16 .*epochs.*\nours, 4 members .*reward',
        ),
        (
            'million_episodes --size test --batch 1 --updates 1 --warm-up 0 --profiled 1'
            ' --threads 1 --precision bf16',
            r'\nbf16 .* epochs .*\n( +\d+% .* in .*\n){5}',
        ),
        (
            'reward_step --size test --batch 1 --repeats 1 --threads 1',
            r'plain PyTorch, fp32 .*\n(.*\n)*ours, bf16 ',
        ),
        (
            'ppo_update --model llama --size test --batch 1 --repeats 1 --threads 1 --no-bf16',
            r' llama test, batch 1.*\n(.*\n)*ours, fp32 .*epochs',
        ),
        (
            'reward_step --model transformers-gpt2 --size test --batch 1 --repeats 1 --threads 1',
            r' transformers-gpt2 test, batch 1.*\n(.*\n)*ours, bf16 ',
        ),
        ('sampling --size test --batches 2 --repeats 1 --threads 1', r'\n +2( +\d+\.\d+){5}'),
        (
            'sampling --model llama --size test --batches 2 --repeats 1 --threads 1',
            r' llama test, .*\n.*\n +2( +\d+\.\d+){5}',
        ),
        (
            'tokenise --size test --repeats 1',
            r'(transformers, all at once|encoding: left out).*\n(.*\n)*500 labels',
        ),
        ('interval_coverage --trials 3', r'\| 200 \| 1 or 5 \|( \d+\.\d \|){7}\n'),
        ('checkpoint --size test --episodes 1 --steps 1 --repeats 1', r'\nshare of training '),
        (
            'scaling --size test --batch 1 --skip batch,responses',
            r'\nbase .* 1\.00   1\.00 (.*\n)*2 ranks ',
        ),
        (
            'startup --size test --repeats 1 --threads 1'
            ' --skip torch,transformers,model,reward,help,value',
            r'an unknown option .*\ntrain_policy, first step .*\ntrain_policy: .*networks \d',
        ),
        (
            'online_step --size test --batch 1 --steps 1 --threads 1',
            r'a look that finds nothing .*\n5,000 labels in .*\n60,000 labels in .*% of a step',
        ),
    ],
    ids=[
        'ppo_update',
        'million_episodes',
        'reward_step',
        'ppo_update llama',
        'reward_step transformers',
        'sampling',
        'sampling llama',
        'tokenise',
        'interval_coverage',
        'checkpoint',
        'scaling',
        'startup',
        'online_step',
    ],
)
def test_benchmark(command, printed, monkeypatch, capsys, ordinary_products):
    """In this process, without seconds of start-up, and so are its variants.

    Only startup has processes of its own, which it measures, and scaling its ranks.
    """
    name, *options = command.split()
    # A sixth of what is measured otherwise: also for a tiny model each token takes its time.
    for module in ('workload', 'ppo_update'):
        monkeypatch.setattr(importlib.import_module(module), 'RESPONSE_LENGTH', 4)
    on_ranks = importlib.import_module('on_ranks')
    measure_on_ranks = on_ranks.measure

    def run(*words):
        monkeypatch.setattr(sys, 'argv', [f'{name}.py', *options, *words])
        runpy.run_path(str(BENCHMARKS / f'{name}.py'), run_name='__main__')

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
    """The mock that stands for waiting for a pretended GPU, which has held 3 GB. Within, benchmarks
    can be imported."""
    monkeypatch.syspath_prepend(BENCHMARKS)
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
