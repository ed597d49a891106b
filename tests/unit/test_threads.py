"""Threads of a process on CPUs: those of its cores, or of its share of them."""

import pytest
import torch

from lm_human_preferences.machine import process, processors

HYPERTHREADS = {processor: f'{processor % 4},{processor % 4 + 4}' for processor in range(8)}


@pytest.mark.parametrize(
    'affinities, core_of, quota, threads',
    [
        pytest.param([range(8)], {}, None, 8, id='alone'),
        pytest.param([range(8)], HYPERTHREADS, None, 4, id='hyperthreads'),
        pytest.param([{0}, {4}], HYPERTHREADS, None, 1, id='bound to hyperthreads'),
        pytest.param([{0}] * 9, {}, None, 1, id='more ranks than processors'),
        pytest.param([range(2)], {}, 4, 2, id='container with more than there is'),
        pytest.param([range(64)] * 2, {}, 4, 2, id='ranks share their container'),
    ],
)
def test_threads_are_the_cores_of_a_share(affinities, core_of, quota, threads):
    assert processors.thread_count(affinities, 0, core_of, quota) == threads


@pytest.mark.parametrize(
    'memberships, files, quota',
    [
        ('0::/a/b', {'a/b/cpu.max': 'max 100000', 'a/cpu.max': '400000 100000'}, 4),
        ('0::/a', {'a/cpu.max': '400000 100000', 'cpu.max': '200000 100000'}, 2),
        ('0::/docker/1f', {'cpu.max': '300000 100000'}, 3),  # its name is the host's
        ('0::/', {}, None),
    ],
)
def test_quota_of_a_container(tmp_path, memberships, files, quota):
    for name, text in files.items():
        path = tmp_path / 'cgroup' / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + '\n')
    listed = tmp_path / 'memberships'
    listed.write_text(memberships + '\n')
    assert processors.cpu_quota(tmp_path / 'cgroup', listed) == quota


def test_hyperthreads_are_of_one_core(monkeypatch, tmp_path):
    monkeypatch.setattr(processors, 'SIBLINGS', f'{tmp_path}/{{}}')
    for processor, siblings in {0: '0,4', 4: '0,4', 1: '1,5', 5: '1,5'}.items():
        (tmp_path / str(processor)).write_text(f'{siblings}\n')
    cores = processors.core_of_each([0, 1, 4, 7])
    assert cores == {0: '0,4', 1: '1,5', 4: '0,4'}
    assert processors.thread_count([{0, 1, 4, 7}], 0, cores, None) == 3
    counts = []
    monkeypatch.delenv('OMP_NUM_THREADS')
    monkeypatch.setattr(torch, 'get_num_threads', lambda: 2)
    monkeypatch.setattr(torch, 'set_num_threads', counts.append)
    monkeypatch.setattr(processors, 'cpu_quota', lambda: None)
    process.limit_threads([[0, 1], [4, 5]], 0)
    assert counts == [1]  # two ranks share both cores
