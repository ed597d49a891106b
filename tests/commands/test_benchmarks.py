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
from test_own_tokeniser import write_chat_model

import launch
import sample

FOLDER = Path(__file__).parents[2] / 'benchmarks'


@pytest.mark.slow
def test_an_evening(tmp_path, monkeypatch, capsys):
    """The person is judged by what it likes, not by the head that its answers taught.

    All commands are run, in this process.
    """
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


@pytest.fixture
def own_environment():
    with mock.patch.dict(os.environ):
        yield


# {name: (command, what it prints)}
BENCHMARKS = {
    'ppo_update': (
        'ppo_update --size test --batch 1 --repeats 1 --threads 1',
        r'\nours, bf16 .*epochs.*\nours, 4 members .*reward.*\nours, frozen head ',
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
    'reward_step transformers': (
        'reward_step --model transformers-gpt2 --size test --batch 1 --repeats 1 --threads 1',
        r' transformers-gpt2 test, batch 1.*\n(.*\n)*ours, bf16 ',
    ),
    'sampling': (
        'sampling --size test --batches 2 --repeats 1 --threads 1',
        r'\n +2( +\d+\.\d+){5}',
    ),
    'interval_coverage': (
        'interval_coverage labels agreement labellers deviations --quick',
        r'\| 200 \| ties \|( \d+\.\d \|){7}\n(.*\n)*\| by query \| 4 \|.*\n(.*\n)*\| 3.0 \| 300 \|',
    ),
    'interval_coverage head': (
        'interval_coverage head --trials 1',
        r'\| scalar_rating \| 40 \| -?\d\.\d+ \| \d',
    ),
    'interval_coverage evaluation': (
        'interval_coverage evaluation exact best --trials 1',
        r'\| half 0, even \| 512 \| 200 \|.*\n(.*\n)*\| 0/1 \| 512 \| 200 \|',
    ),
    'scaling': (
        'scaling --size test --batch 1 --skip batch,responses',
        r'\nbase .* 1\.00   1\.00 (.*\n)*2 ranks ',
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


def printed_by_quarter(tmp_path, program, **environ):
    """What quarter.sh prints with the smallest sizes, where a shell's `program` is Python."""
    python = tmp_path / 'python'
    python.write_text(f'#!/bin/sh\n{program}\n')
    python.chmod(0o700)
    return subprocess.run(
        [FOLDER / 'quarter.sh', tmp_path / 'out', '--tiny'],
        env={**os.environ, 'PYTHON': str(python), **environ},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout


def tiny_quarter(tmp_path):
    """The commands of quarter.sh with the smallest sizes, by the names of its parts."""
    printed_by_quarter(tmp_path, 'echo "$@"')
    (log,) = (tmp_path / 'out').iterdir()
    parts = re.findall(r'^== (\w+): .*\n(.*)\n== \1: status 0 after', log.read_text(), re.M)
    return {name: command.split() for name, command in parts}


def test_each_part_of_the_quarter_of_an_hour_is_written(tmp_path):
    commands = tiny_quarter(tmp_path)
    assert len(commands) == 8
    assert commands['tests'] == ['-m', 'pytest', '-n0', '-q', 'tests/gpu']


def test_the_quarter_of_an_hour_ends(tmp_path):
    """The limit of all parts cuts the first of them off, whose lines are in the table."""
    found = printed_by_quarter(tmp_path, 'echo begun; exec sleep 30', SECONDS_IN_ALL='1')
    assert found.count('begun') == 1
    before, table = found.split('==== what was found')
    assert before.count(': no time left') == table.count(': no time left') == 7
    assert '== million: status 124 after 1 s' in table


# The others are above, with the same options.
@pytest.mark.slow
@pytest.mark.parametrize(
    'part, printed',
    [
        ('million', r'\nfp32 .* epochs '),
        (
            'to_the_bit',
            r'^nondeterministic: none\n(weights .* at most 0.0e\+00, epochs took .* s\n){2}$',
        ),
        ('resume', r'^killed and resumed: .* at most 0.0e\+00\n$'),
        ('memory', r'^( +\d+\.\d+){2} +[-+]\d+%'),
        ('memory_large', r'billion parameters, bf16:\nprocess .* estimate=.*\n.* learn; '),
    ],
)
def test_a_part_of_the_quarter_of_an_hour(
    part, printed, tmp_path, monkeypatch, capsys, own_environment
):
    program, *options = tiny_quarter(tmp_path)[part]
    for module in ('workload', 'ppo_update'):
        monkeypatch.setattr(importlib.import_module(module), 'RESPONSE_LENGTH', 4)

    def run(*words):
        monkeypatch.setattr(sys, 'argv', [program, *options, *words])
        runpy.run_path(str(FOLDER.parent / program), run_name='__main__')

    def run_variant(variant, threads):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            run('--threads', str(threads), '--variant', variant)
        return json.loads(output.getvalue().splitlines()[-1])

    monkeypatch.setattr(importlib.import_module('measuring'), 'in_own_process', run_variant)
    run()
    found = capsys.readouterr().out
    assert re.search(printed, found), found
