"""Choice of the library that multiplies, and of its number of threads."""

import re

import pytest
import torch
from command_line import invoke

import sample
from lm_human_preferences import session
from lm_human_preferences.checkpointing.checkpointer import Checkpointer
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.hparams import reward_options
from lm_human_preferences.language.adapters import shared
from lm_human_preferences.language.gpt2.sizes import HParams as Sizes
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.machine import processors, products, threads
from lm_human_preferences.machine.products import Rates
from lm_human_preferences.plan.making import reward_phase
from lm_human_preferences.training import precision
from lm_human_preferences.utils.core import default_device

X86 = (
    'processor\t: 0\nvendor_id\t: {}\nmodel name\t: {}\nflags\t\t: fpu sse2 {}\n\nprocessor\t: 1\n'
)
ARM = 'processor\t: 0\nFeatures\t: fp asimd {}\nCPU implementer\t: 0x41\nCPU part\t: {}\n'
AVX512 = 'avx2 avx512f avx512bw avx512vl avx512dq avx512_vnni'
# /proc/cpuinfo of kinds of machines, what their products reach, and which library that makes.
# Measured are the EPYC, the Cascade Lake, the Sapphire Rapids whose AMX its host hides, and the
# EPYC with oneDNN restricted to AVX2, which PyTorch then leaves out. Of the others the features are
# real, the rates such as make the point.
KINDS = {
    'AMD with bf16': (
        X86.format('AuthenticAMD', 'AMD EPYC', AVX512 + ' avx512_bf16'),
        Rates(default=83, onednn=180, bf16=400, error=3.7e-7),
        'onednn',
    ),
    'Intel without bf16': (
        X86.format('GenuineIntel', 'Intel(R) Xeon(R) CPU @ 2.80GHz', AVX512),
        Rates(default=118, onednn=57, bf16=30, error=3.7e-7),
        'default',
    ),
    'Intel with AMX': (
        X86.format('GenuineIntel', 'Intel(R) Xeon(R) 8480C', AVX512 + ' avx512_bf16 amx_bf16'),
        Rates(default=120, onednn=900, bf16=1500, error=2.3e-3),
        'default',
    ),
    'Intel with bf16, no AMX': (
        X86.format('GenuineIntel', 'Intel(R) Xeon(R) Processor', AVX512 + ' avx512_bf16'),
        Rates(default=130, onednn=68, bf16=76, error=4.1e-7),
        'default',
    ),
    'AVX2 only': (
        X86.format('AuthenticAMD', 'AMD EPYC 7551', 'avx2'),
        Rates(default=40, onednn=49, bf16=0.5, error=2.5e-7),
        'default',
    ),
    'another with AVX-512': (
        X86.format('HygonGenuine', 'Hygon C86 7490', AVX512),
        Rates(default=90, onednn=100, bf16=20, error=3.7e-7),
        'default',
    ),
    'ARM that rounds': (
        ARM.format('sve bf16', '0xd40'),
        Rates(default=40, onednn=120, bf16=130, error=1.7e-3),
        'default',
    ),
    'ARM': (ARM.format('', '0xd0c'), Rates(default=30, onednn=30, bf16=3, error=2.5e-7), 'default'),
}


@pytest.mark.parametrize('text, rates, library', KINDS.values(), ids=KINDS)
def test_the_library_of_kinds_of_processors(text, rates, library):
    assert products.faster_library(processors.parse_cpuinfo(text)) == library


def test_few_rows_go_to_weights_laid_out_on_processors_where_that_is_faster():
    rows = {}
    for name, (text, _, library) in KINDS.items():
        rows[name] = products.prepacked_rows(processors.parse_cpuinfo(text), library)
    many, few, none = range(1, 65), range(2, 33), range(0)
    assert rows == {
        'AMD with bf16': many,
        'Intel without bf16': few,
        'Intel with AMX': few,
        'Intel with bf16, no AMX': few,
        'AVX2 only': few,
        'another with AVX-512': none,
        'ARM that rounds': none,
        'ARM': none,
    }
    arm = processors.parse_cpuinfo(KINDS['ARM'][0])
    assert products.prepacked_rows(arm, 'onednn') == none


@pytest.mark.parametrize(
    'text, processor, has_bf16',
    [
        (KINDS['AMD with bf16'][0], 'AMD EPYC (avx2 avx512f avx512_vnni avx512_bf16)', True),
        (KINDS['Intel without bf16'][0].replace('avx512_vnni', ''), None, False),
        (ARM.format('sve bf16', '0xd40'), '0x41 0xd40 (asimd sve bf16)', True),
        (ARM.format('', '0xd0c'), '0x41 0xd0c (asimd)', False),
        ('', 'unknown processor ()', False),
    ],
)
def test_processors_are_read(text, processor, has_bf16):
    found = processors.parse_cpuinfo(text)
    assert processor is None or str(found) == processor
    assert found.has_bf16 == has_bf16


@pytest.fixture
def machine(monkeypatch):
    def pretend(kind):
        text, rates, _ = KINDS[kind]
        processor = processors.parse_cpuinfo(text)
        monkeypatch.setattr(processors, 'this_processor', lambda: processor)
        monkeypatch.setattr(products, 'measure', lambda: rates)

    return pretend


def test_tiny_networks_take_the_default(machine):
    machine('AMD with bf16')
    assert products.choose(32) == products.choose(128) == 'default'
    assert products.choose(768) == 'onednn'


def test_measuring_leaves_all_as_it_was():
    products.select('default')
    torch.manual_seed(3)
    before = torch.get_rng_state()
    found = products.measure.__wrapped__()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.backends.mkldnn.matmul.fp32_precision == 'none'
    assert all(value > 0 for value in found)


def test_each_library_is_measured_by_itself(monkeypatch):
    """The fastest round of each counts, and the error is oneDNN's."""
    selected, rounds = [], []

    def seconds(shapes, dtype):
        rounds.append((selected[-1], dtype))
        slow = 4 if len(rounds) < 5 else 1
        of_a_product = {'default': 2, 'onednn': 1}[selected[-1]] if dtype == torch.float32 else 0.5
        return [slow * of_a_product] * len(shapes)

    monkeypatch.setattr(products, 'select', selected.append)
    monkeypatch.setattr(products, '_seconds_of_products', seconds)
    monkeypatch.setattr(products, 'error_of_a_product', lambda: selected[-1])
    monkeypatch.setattr(
        processors, 'this_processor', lambda: processors.parse_cpuinfo(KINDS['ARM that rounds'][0])
    )
    found = products.measure.__wrapped__()
    assert rounds[:4] == 2 * [('default', torch.float32), ('onednn', torch.float32)]
    assert len(rounds) == 3 * products.ROUNDS and found.error == 'onednn'
    work = sum(2 * rows * inputs * outputs for rows, inputs, outputs in products.SHAPES) / 1e9
    speeds = [work / len(products.SHAPES) / seconds for seconds in (2, 1, 0.5)]
    assert [found.default, found.onednn, found.bf16] == pytest.approx(speeds)


@pytest.mark.parametrize(
    'kind, note',
    [
        ('Intel without bf16', 'has no instructions for bf16: .* take 3.9 times .*30 GFLOP/s ins'),
        ('Intel with bf16, no AMX', 'slow instructions for bf16: .* 1.7 times .*76 GFLOP/s inst'),
        ('AMD with bf16', '^None$'),
        ('Intel with AMX', '^None$'),
    ],
)
def test_slow_bf16_is_noted(machine, kind, note):
    machine(kind)
    assert re.search(note, str(products.note_on_bf16('bf16')))
    assert products.note_on_bf16('fp32') is None


POLICY = 'train_policy test bf16 --ppo.batch_size 8 --ppo.total_episodes 8'
BF16 = '--run.precision bf16'


@pytest.mark.parametrize(
    'command',
    [
        f'{POLICY} {BF16} --rewards.train_new_model.labels.num_train 32',
        f'{POLICY} --rewards.train_new_model.run.precision bf16',
        f'train_reward test bf16 {BF16}',
    ],
)
def test_slow_bf16_is_noted_once_by_a_dry_run(machine, command):
    machine('Intel without bf16')
    lines = invoke(f'{command} --save_dir None --dry_run').output.splitlines()
    assert lines.count(products.note_on_bf16('bf16')) == 1


def test_slow_bf16_is_noted_by_training_and_sampling(machine, tmp_path):
    machine('Intel without bf16')
    note = products.note_on_bf16('bf16')
    trained = f'{POLICY} {BF16} --mpi 1 --save_dir {tmp_path} --rewards.trained_model test'
    lines = invoke(f'{trained} --rewards.train_new_model off').output.splitlines()
    assert lines[0] == note and lines.count(note) == 1
    words = f'sample --save_dir {tmp_path}/bf16 --nsamples 1 --mpi 1 --precision bf16'
    assert note in invoke(words, sample.cli).output


def kept(**products):
    checkpointer = Checkpointer(None, Comm(), resume=False)
    checkpointer.products = products
    return checkpointer


AMD = {'library': 'onednn', 'processor': 'AMD EPYC (avx2 avx512f avx512_vnni avx512_bf16)'}


def test_a_run_goes_on_with_the_library_it_began_with(machine, capsys):
    machine('AMD with bf16')
    new = kept(library='abacus')  # of another version
    assert session.agree_on_library(768, new, Comm()) == 'onednn'
    assert new.products == AMD
    assert session.agree_on_library(768, kept(**new.products), Comm()) == 'onednn'
    assert capsys.readouterr().out == ''
    machine('Intel without bf16')
    elsewhere = kept(**new.products)
    assert session.agree_on_library(768, elsewhere, Comm()) == 'onednn'
    assert elsewhere.products == new.products
    on_another, slower = capsys.readouterr().out.splitlines()
    assert 'this run began on AMD EPYC (avx2 ' in on_another and 'digits may differ' in on_another
    assert 'multiplies at 57 GFLOP/s by oneDNN' in slower and 'reaches 118 there' in slower


ROUNDED = (
    'note: this run began with oneDNN, which rounds on'
    ' Intel(R) Xeon(R) 8480C (avx2 avx512f avx512_vnni avx512_bf16 amx_bf16): '
)


class TwoRanks(Comm):
    size = 2

    def __init__(self, rank, other_says):
        self.rank = rank
        self.other_says = list(other_says)
        self.said = []

    def all_gather_object(self, value):
        self.said.append(value)
        other = self.other_says.pop(0)
        return [value, other] if self.rank == 0 else [other, value]


@pytest.mark.parametrize(
    'kind, told',
    [('Intel without bf16', 'multiplies at 57 GFLOP/s by oneDNN'), ('Intel with AMX', ROUNDED)],
)
def test_rank_0_decides_and_the_others_say_where_that_does_not_suit(machine, capsys, kind, told):
    machine(kind)
    rank_1 = TwoRanks(1, [AMD, None])
    assert session.agree_on_library(768, kept(), rank_1) == 'onednn'
    assert capsys.readouterr().out == ''
    machine('AMD with bf16')
    assert session.agree_on_library(768, kept(), TwoRanks(0, rank_1.said)) == 'onednn'
    (line,) = capsys.readouterr().out.splitlines()
    assert line == rank_1.said[1] and told in line


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
    monkeypatch.setattr(threads.os, 'sched_getaffinity', lambda process: set(range(16)))
    counts = [before]
    monkeypatch.setattr(torch, 'get_num_threads', lambda: counts[-1])
    monkeypatch.setattr(torch, 'set_num_threads', counts.append)
    precision.configure_for(n_embd, 'fp32', 'default')
    assert counts[-1] == taken


@pytest.mark.parametrize('given, taken', [(None, 'onednn'), ('default', 'default')])
def test_a_network_takes_the_library_of_this_machine_or_the_one_that_is_given(
    machine, monkeypatch, given, taken
):
    machine('AMD with bf16')
    calls = []
    monkeypatch.setattr(precision, 'configure', lambda *call, **more: calls.append((*call, more)))
    precision.configure_for(768, 'bf16', given, deterministic=False)
    assert calls == [('bf16', default_device(), taken, {'deterministic': False})]


def test_a_training_computes_as_suits_its_network(machine, monkeypatch):
    machine('AMD with bf16')
    monkeypatch.setattr(TrainedModel, 'sizes', lambda self: Sizes(n_embd=768))
    calls = []
    monkeypatch.setattr(
        precision, 'configure_for', lambda *call, **more: calls.append((*call, more))
    )
    hparams = reward_options.HParams()
    hparams.task.policy.initial_model = 'test'
    hparams.run.precision = 'bf16'
    hparams.run.deterministic = False
    session.prepare(reward_phase(hparams), kept(), shared.Bases(), Comm())
    assert calls == [(768, 'bf16', 'onednn', {'deterministic': False})]


def test_seconds_are_those_of_each_product(monkeypatch):
    seconds = iter([10.0, 10.5, 20.0, 20.25])
    monkeypatch.setattr(products.time, 'perf_counter', lambda: next(seconds))
    found = products._seconds_of_products([(1, 2, 3), (4, 5, 6)], torch.float32)
    assert found == [0.5, 0.25]
