"""Benchmarks of speed run to their end on a tiny model; no time is judged."""

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

import pytest
from command_line import succeed
from tiny_causal_lms import write_chat_model

import launch
import sample

FOLDER = Path(__file__).parents[2] / 'benchmarks'


@pytest.mark.slow
def test_an_evening(tmp_path, monkeypatch, capsys):
    """The results are by what the person likes, not by the head that learned their answers."""
    model = write_chat_model(tmp_path / 'model', positions=256)
    for part in ('', '.test'):
        lines = [json.dumps(f'Who is {name}?') for name in ('late', 'quick', 'lazy', 'brown')]
        (tmp_path / f'queries{part}.jsonl').write_text('\n'.join(lines))
    (tmp_path / 'low.py').write_text(
        'def score(queries, texts): return [sum(map(str.islower, t)) / len(t) for t in texts]'
    )
    evening = importlib.import_module('real.evening')
    clis = {'launch.py': launch.cli, 'sample.py': sample.cli}
    printed = []

    def run(script, *words):
        printed.append(succeed([*map(str, words)], clis[script]).stdout)
        return printed[-1]

    monkeypatch.setattr(evening, 'run', run)
    words = [tmp_path / 'out', model, tmp_path / 'queries.jsonl', '--person']
    words += [f'{tmp_path}/low.py:score', '--answers=8', '--episodes=64', '--requests=4']
    monkeypatch.setattr(sys, 'argv', ['evening.py', *map(str, words)])
    evening.main()
    told = '\n'.join(printed)
    assert 'head on frozen hidden states learned 8 labels' in told
    assert len(re.findall(r'rank \S+ of 16, mean', told)) == 4
    table = capsys.readouterr().out.splitlines()
    rows = {line[:24].strip(): line[24:].split() for line in table if line}
    assert rows['initial model'][0] == '0.00' and len(rows['policy']) == 3
    kls = [float(rows[name][0]) for name in rows if name.startswith('best of')]
    assert 0 < kls[0] < kls[1] < 1.84 and kls[2] < float(rows['policy'][0]) + 2

    best_of_16 = importlib.import_module('real.best_of_16')
    words = [tmp_path / 'out/head', '--person', f'{tmp_path}/low.py:score']
    words += ['--sizes', 4, 8, '--draws=2', '--samples=32']
    monkeypatch.setattr(sys, 'argv', ['best_of_16.py', *map(str, words)])
    best_of_16.main()
    fewer, all_labels = (line.split() for line in capsys.readouterr().out.splitlines()[-2:])
    assert fewer[0] == '4' and all_labels[0] == '8' and all_labels[3] == '-'
    assert 0.5 < float(fewer[1]) < 1.84 and 0.9 < float(fewer[2]) < 1.1


@pytest.fixture
def own_environment():
    with mock.patch.dict(os.environ):
        yield


BENCHMARKS = {  # {command: what it prints}
    'ppo_update.py --size test --batch 1 --repeats 1 --threads 1': (
        r'\nours, bf16 .*epochs.*\nours, 4 members .*reward.*\nours, frozen head '
    ),
    'reward_step.py --model transformers-gpt2 --size test --batch 1 --repeats 1 --threads 1': (
        r' transformers-gpt2 test, batch 1.*\n(.*\n)*plain PyTorch, fp32 .*\n(.*\n)*ours, bf16 '
    ),
    'interval_coverage.py --quick': (
        r'\| 200 \| ties \|( \d+\.\d \|){7}\n'
        r'(.*\n)*\| scalar_rating \| 40 \|.*\n(.*\n)*\| 3.0 \| 300 \|.*\n'
        r'(.*\n)*\| half 0, even \| 64 \| 16 \|.*\n(.*\n)*\| 0/1 \| 64 \| 16 \|'
    ),
    'scaling.py --size test --batch 1 --skip batch,responses': (
        r'\nbase .* 1\.00   1\.00 (.*\n)*2 ranks '
    ),
}


def run_here(path, options, monkeypatch):
    """Run a benchmark and its variants, but not its ranks, in this process, on short responses."""
    for module in ('workload', 'ppo_update'):
        monkeypatch.setattr(importlib.import_module(module), 'RESPONSE_LENGTH', 4)
    coverage = importlib.import_module('evaluation_coverage')
    monkeypatch.setattr(coverage, 'QUERIES', (16,))
    monkeypatch.setattr(coverage, 'SAMPLES', (64,))
    on_ranks = importlib.import_module('on_ranks')
    measure_on_ranks = on_ranks.measure

    def run(*words):
        monkeypatch.setattr(sys, 'argv', [path, *options, *words])
        runpy.run_path(str(FOLDER.parent / path), run_name='__main__')

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


@pytest.mark.slow
@pytest.mark.parametrize('command', BENCHMARKS)
def test_benchmark(command, monkeypatch, capsys, own_environment):
    path, *options = command.split()
    run_here(f'benchmarks/{path}', options, monkeypatch)
    found = capsys.readouterr().out
    assert re.search(BENCHMARKS[command], found), found


# speed_large is the program of memory_large.
PARTS = {
    'million': r'\nfp32 .* epochs ',
    'to_the_bit': r'^nondeterministic: none\n(weights .* at most 0.0e\+00, epochs took .* s\n){2}$',
    'resume': r'^killed and resumed: .* at most 0.0e\+00\n$',
    'sampling': r'\n +2( +\d+\.\d+){5}',
    'memory': r'^( +\d+\.\d+){2} +[-+]\d+%',
    'memory_large': r'billion parameters, bf16:\nprocess .* estimate=.*\n.* learn; ',
}


@pytest.fixture(scope='module')
def quarter(tmp_path_factory):
    """The commands of quarter.sh with the smallest sizes, by the names of its parts."""
    folder = tmp_path_factory.mktemp('quarter')
    python = folder / 'python'
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o700)
    words = [FOLDER / 'quarter.sh', folder / 'out', '--tiny']
    subprocess.run(words, env={**os.environ, 'PYTHON': str(python)}, check=True)
    log = (folder / 'out/quarter.txt').read_text()
    parts = re.findall(r'^== (\w+): .*\n(.*)\n== \1: status 0 after', log, re.M)
    return {name: command.split() for name, command in parts}


def test_each_part_of_the_quarter_of_an_hour_is_written(quarter):
    assert {*quarter} == {*PARTS, 'tests', 'speed_large'}
    assert quarter['tests'] == ['-m', 'pytest', '-n0', '-q', 'tests/gpu']


@pytest.mark.slow
@pytest.mark.parametrize('part', PARTS)
def test_a_part_of_the_quarter_of_an_hour(part, quarter, monkeypatch, capsys, own_environment):
    path, *options = quarter[part]
    if part == 'sampling':
        options.append('--repeats=1')
    run_here(path, options, monkeypatch)
    found = capsys.readouterr().out
    assert re.search(PARTS[part], found), found
