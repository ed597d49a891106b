"""Choice of the library that multiplies, and of its number of threads."""

import pytest
import torch

from lm_human_preferences import session
from lm_human_preferences.checkpointing.checkpointer import Checkpointer
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.hparams import reward_options
from lm_human_preferences.language.gpt2.sizes import HParams as Sizes
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.machine import process, processors
from lm_human_preferences.plan.phases import reward_phase
from lm_human_preferences.training import precision
from lm_human_preferences.utils.core import default_device

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
    """Their library, and the rows for which they take prepacked weights."""
    text, library, rows = KINDS[kind]
    machine(kind)
    processor = processors.this_processor()
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
    assert str(processors.parse_cpuinfo(text)) == processor


@pytest.fixture
def machine(monkeypatch):
    def pretend(kind):
        processor = processors.parse_cpuinfo(KINDS[kind][0])
        monkeypatch.setattr(processors, 'this_processor', lambda: processor)

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
    monkeypatch.setattr(processors, 'cpu_quota', lambda: 3)
    monkeypatch.setattr(processors, 'core_of_each', lambda affinity: {})
    monkeypatch.setattr(process.os, 'sched_getaffinity', lambda process: set(range(16)))
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
