"""Choice of the library that multiplies, and of the number of threads of a process."""

import pytest
import torch

from lm_human_preferences.checkpointing.checkpointer import Checkpointer
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.hparams import reward_options
from lm_human_preferences.language.networks.gpt2_files import HParams as Sizes
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.machine import hardware, precision
from lm_human_preferences.machine.hardware import default_device
from lm_human_preferences.plan.phases import reward_phase
from lm_human_preferences.trainers.additions import session

X86 = 'vendor_id\t: {0}\nmodel name\t: A {0}\nflags\t\t: fpu sse2 {1}\n\nvendor_id\t: other\n'
ARM = 'processor\t: 0\nFeatures\t: fp asimd {}\nCPU implementer\t: 0x41\nCPU part\t: {}\n'
AVX512 = 'avx2 avx512f avx512bw avx512vl avx512dq avx512_vnni'
AMD, INTEL = 'AuthenticAMD', 'GenuineIntel'
MANY, FEW, NONE = range(1, 65), range(2, 33), range(0)
# {kind: /proc/cpuinfo, its library, rows for prepacked weights}
KINDS = {
    'AMD with bf16': (X86.format(AMD, f'{AVX512} avx512_bf16'), 'onednn', MANY),
    'Intel without bf16': (X86.format(INTEL, AVX512), 'default', FEW),
    'AMX': (X86.format(INTEL, f'{AVX512} avx512_bf16 amx_bf16'), 'default', FEW),
    'Intel with bf16': (X86.format(INTEL, f'{AVX512} avx512_bf16'), 'default', FEW),
    'AVX2 only': (X86.format(AMD, 'avx2'), 'default', FEW),
    'another with AVX-512': (X86.format('HygonGenuine', AVX512), 'default', NONE),
    'ARM with bf16': (ARM.format('sve bf16', '0xd40'), 'default', NONE),
}


@pytest.mark.parametrize('kind', KINDS)
def test_kinds_of_processors(machine, kind):
    text, library, rows = KINDS[kind]
    machine(kind)
    processor = hardware.this_processor()
    assert precision.fastest_library(768) == library
    assert precision.fastest_library(128) == 'default'
    assert ('avx512f' in text) == bool(precision.prepacked_rows(processor, 'onednn'))
    assert precision.prepacked_rows(processor, library) == rows


@pytest.mark.parametrize(
    'text, processor',
    [
        (KINDS['AMD with bf16'][0], 'A AuthenticAMD (avx2 avx512f avx512_vnni avx512_bf16)'),
        (ARM.format('sve bf16', '0xd40'), '0x41 0xd40 (asimd sve bf16)'),
        ('', 'unknown processor ()'),
    ],
)
def test_processors_are_read(text, processor):
    assert str(hardware.parse_cpuinfo(text)) == processor


@pytest.fixture
def machine(monkeypatch):
    def pretend(kind):
        processor = hardware.parse_cpuinfo(KINDS[kind][0])
        monkeypatch.setattr(hardware, 'this_processor', lambda: processor)

    return pretend


def kept(library=None):
    checkpointer = Checkpointer(None, Comm(), resume=False)
    checkpointer.library = library
    return checkpointer


def test_a_run_goes_on_with_the_library_it_began_with(machine):
    machine('AMD with bf16')
    new = kept()
    assert session.agree_on_library(768, new, Comm()) == new.library == 'onednn'
    machine('Intel without bf16')
    assert session.agree_on_library(768, kept(), Comm()) == 'default'
    elsewhere = kept('onednn')
    assert session.agree_on_library(768, elsewhere, Comm()) == elsewhere.library == 'onednn'


def test_rank_0_decides_on_the_library(machine):
    """The other is on another machine."""
    machine('Intel without bf16')
    comm = Comm()
    comm.all_gather_object = lambda own: ['onednn', own]
    assert session.agree_on_library(768, kept(), comm) == 'onednn'


@pytest.mark.parametrize(
    'n_embd, given, before, taken',
    [(7, None, 8, 1), (7, '4', 8, 8), (129, None, 8, 3), (129, None, 2, 2)],
)
def test_a_network_takes_a_thread_or_what_this_host_allows(
    monkeypatch, n_embd, given, before, taken
):
    monkeypatch.delenv('OMP_NUM_THREADS', raising=False)
    if given is not None:
        monkeypatch.setenv('OMP_NUM_THREADS', given)
    monkeypatch.setattr(hardware, 'cpu_quota', lambda: 3)
    monkeypatch.setattr(hardware, 'core_of_each', lambda affinity: {})
    monkeypatch.setattr(hardware.os, 'sched_getaffinity', lambda process: set(range(16)))
    counts = [before]
    monkeypatch.setattr(torch, 'get_num_threads', lambda: counts[-1])
    monkeypatch.setattr(torch, 'set_num_threads', counts.append)
    precision.configure_for(n_embd, 'fp32', 'default')
    assert counts[-1] == taken


def test_a_training_computes_as_suits_its_network(machine, monkeypatch):
    machine('AMD with bf16')
    monkeypatch.setattr(TrainedModel, 'sizes', lambda self: Sizes(n_embd=768))
    calls = []
    monkeypatch.setattr(precision, 'configure', lambda *call, **more: calls.append((*call, more)))
    hparams = reward_options.CommandHParams()
    hparams.task.policy.initial_model = 'test'
    hparams.run.precision = 'bf16'
    hparams.run.deterministic = False
    session.Run(hparams, Comm(), None, '').prepare(reward_phase(hparams), kept())
    assert calls == [('bf16', default_device(), 'onednn', {'deterministic': False})]


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
    assert hardware.thread_count(affinities, 0, core_of, quota) == threads


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
    assert hardware.cpu_quota(tmp_path / 'cgroup', listed) == quota


def test_hyperthreads_are_of_one_core(monkeypatch, tmp_path):
    monkeypatch.setattr(hardware, 'SIBLINGS', f'{tmp_path}/{{}}')
    for processor, siblings in {0: '0,4', 4: '0,4', 1: '1,5', 5: '1,5'}.items():
        (tmp_path / str(processor)).write_text(f'{siblings}\n')
    cores = hardware.core_of_each([0, 1, 4, 7])
    assert cores == {0: '0,4', 1: '1,5', 4: '0,4'}
    assert hardware.thread_count([{0, 1, 4, 7}], 0, cores, None) == 3
    counts = []
    monkeypatch.delenv('OMP_NUM_THREADS')
    monkeypatch.setattr(torch, 'get_num_threads', lambda: 2)
    monkeypatch.setattr(torch, 'set_num_threads', counts.append)
    monkeypatch.setattr(hardware, 'cpu_quota', lambda: None)
    hardware.limit_threads([[0, 1], [4, 5]], 0)
    assert counts == [1]  # two ranks share both cores
