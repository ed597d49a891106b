"""Each benchmark of speed comes to its end on a tiny model, and prints what it is for. No time is judged here."""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / 'benchmarks'


@pytest.mark.slow
@pytest.mark.parametrize('command, printed', [
    ('ppo_update --size test --batch 8 --repeats 1 --threads 1', r'plain PyTorch, fp32 .*\n(.*\n)*ours, bf16 .*epochs'),
    ('reward_step --size test --batch 2 --repeats 1 --threads 1', r'plain PyTorch, fp32 .*\n(.*\n)*ours, bf16 '),
    ('sampling --size test --batches 2 --repeats 1 --threads 1', r'\n +2( +\d+\.\d+){5}'),
    ('million_episodes --size test --batch 4 --updates 2 --threads 1',
     r'\nfp32 .* epochs .*\n( +\d+% .* in .*\n){5}(.*\n)*bf16 .* epochs .*\n( +\d+% .* in .*\n){5}'),
    ('checkpoint --size test --episodes 4 --steps 1 --repeats 1', r'\nshare of training '),
    ('scaling --size test --batch 4', r'\nbase .* 1\.00   1\.00 (.*\n)*responses x 2 (.*\n)*2 ranks '),
    ('startup --size test --repeats 1 --threads 1', r'train_reward, first step .*\n(.*\n)*train_policy: .*networks \d'),
    ('tokenise --size test --repeats 1', r'(transformers, all at once|encoding: left out).*\n(.*\n)*500 labels'),
], ids=['ppo_update', 'reward_step', 'sampling', 'million_episodes', 'checkpoint', 'scaling', 'startup', 'tokenise'])
def test_benchmark(command, printed):
    name, *options = command.split()
    done = subprocess.run([sys.executable, BENCHMARKS / f'{name}.py', *options], capture_output=True, text=True,
                          env={**os.environ, 'OMP_NUM_THREADS': '1'})
    assert done.returncode == 0, done.stderr
    assert re.search(printed, done.stdout), done.stdout
