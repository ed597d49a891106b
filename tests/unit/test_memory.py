"""Less memory for the same gradients, and what training is expected to take."""

import importlib
import os
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from command_line import invoke, last_error_of
from experiments import resolved
from tiny_causal_lms import tiny

import lm_human_preferences
from lm_human_preferences import train_policy
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams import reward_options
from lm_human_preferences.language import model
from lm_human_preferences.language.causal_lm.network import TransformersNetwork
from lm_human_preferences.language.causal_lm.sizes import sizes_of
from lm_human_preferences.language.networks import scopes
from lm_human_preferences.machine import hardware, precision
from lm_human_preferences.plan.phases import make_plan, policy_phase, reward_phase
from lm_human_preferences.trainers.additions import session
from lm_human_preferences.training import optimizer

POLICY = scopes.Networks(learning=('policy',), frozen=('ref_policy', 'reward_model'))
CPU, GPU = torch.device('cpu'), torch.device('cuda')


@pytest.fixture(params=['fp32', 'bf16'])
def computed_in(request):
    precision.configure(request.param, CPU, 'onednn')


def gradients_and_bytes(model, loss):
    """The gradients of `loss()`, and how much was kept for them."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        value = loss()
    value.backward()
    return [parameter.grad for parameter in model.parameters()], sum(kept.values())


SIZES = model.HParams(n_vocab=10, n_ctx=6, n_embd=4, n_head=2, n_layer=3)


def memory_of(sizes=SIZES, device=CPU, networks=POLICY, run=None, **work):
    """The memory of a step, by default of five rows of seven tokens."""
    settings = reward_options.RunHParams()
    settings.override_from_dict(run or {})
    work = {'rows': 5, 'tokens': 7, 'predicted': 2, 'micro_batch_size': None, **work}
    return networks.memory(sizes, settings, device, **work)


@pytest.mark.parametrize(
    'changes, device, expected',
    [
        ({}, CPU, 19_296 + 32_760 + 400),
        ({}, GPU, 19_296 + 26_880 + 400),
        ({'run': {'gradient_checkpointing': True}}, CPU, 19_296 + 1_680 + 10_920 + 400),
        ({'micro_batch_size': 2}, CPU, 19_296 + 1.8 * 0.4 * (32_760 + 400)),
        ({'micro_batch_size': 2}, GPU, 19_296 + 0.4 * (26_880 + 400)),
        ({'networks': scopes.REWARD_NETWORKS}, CPU, 16_080 + 32_760 + 400),
        ({'networks': replace(POLICY, learning=(), frozen=('a', 'b', 'c'))}, CPU, 20_968),
        ({'run': {'precision': 'bf16'}}, GPU, 24_120 + 13_440 + 400),
    ],
    ids=str,
)
def test_peaks_counted_by_hand(changes, device, expected):
    """Bytes that last, plus those of a step.

    804 parameters in floats are 3216 bytes: three networks, a gradient and two moments are 19,296.
    A token in a block keeps 16 * 4 numbers and, on a CPU, 2 * 7 probabilities, so that 35 tokens
    keep 8,960 or 10,920 bytes. Logits take 400. In bf16 each weight has a copy of two bytes.
    """
    assert sum(each.numel() for each in model.Model(SIZES).parameters()) == 804
    assert memory_of(device=device, **changes) == pytest.approx(expected)


def test_what_blocks_keep_is_what_pytorch_keeps(computed_in):
    """The estimate against the tensors that autograd holds between forward and backward pass."""
    sizes = model.HParams(n_vocab=50, n_ctx=64, n_embd=64, n_head=8, n_layer=6)
    network = model.Model(sizes).initialize()
    tokens = torch.randint(50, (8, 48))
    assert_kept(network, lambda: network.hidden(tokens).sum(), rel=0.25)


def assert_kept(network, loss, rel):
    """Compare an estimate with what autograd holds for `loss()`, and for it block by block."""
    reduced = precision.autocast_dtype(torch.float32) == torch.bfloat16
    device = GPU if precision.fuses_attention() else CPU
    run = {'precision': 'bf16' if reduced else 'fp32'}
    lasting, whole = (
        memory_of(network.sizes, device, run=run, rows=rows, tokens=48, predicted=0)
        for rows in (0, 8)
    )
    gradients, much = gradients_and_bytes(network, loss)
    weights = sum(parameter.nbytes for parameter in network.parameters())
    estimated = whole - lasting
    assert estimated == pytest.approx(much - weights / (2 if reduced else 1), rel=rel)
    network.gradient_checkpointing = True
    again, little = gradients_and_bytes(network, loss)
    for one, other in zip(gradients, again, strict=True):
        assert one is other is None or torch.equal(one, other)
    assert little < much / 3


FAMILIES = {'qwen3': {'head_dim': 32}, 'gemma3_text': {'num_key_value_heads': 1}}


@pytest.mark.parametrize('family', FAMILIES)
def test_what_blocks_of_transformers_keep_is_what_pytorch_keeps(family, computed_in, monkeypatch):
    """Roughly, as norms differ; computed again block by block they keep less."""
    # As a CPU is announced: attention is not fused, also where oneDNN rounds float32.
    monkeypatch.setattr(precision, '_kernels', replace(precision._kernels, fuses_attention=False))
    sizes = {'hidden_size': 64, 'intermediate_size': 176, 'num_hidden_layers': 6, 'head_dim': 16}
    causal_lm = tiny(family, **{**sizes, **FAMILIES[family]})
    network = TransformersNetwork(causal_lm, sizes_of(causal_lm, 60))
    tokens = torch.randint(60, (8, 48))
    assert_kept(network, lambda: network.hidden(tokens).sum(), rel=0.5)


def test_a_warning_is_given_where_a_training_surely_does_not_fit():
    plan = make_plan(resolved('train_policy', 'descriptiveness'))
    needed = plan.policy.memory(SIZES, 8, CPU)
    assert plan.rewards[0].memory(SIZES, 8, CPU) < needed
    assert plan.memory_line(SIZES, 8, round(needed / 1.24)).startswith('training takes about 0.')
    assert re.fullmatch(
        r'WARNING: training takes about \d.\d\d GB of memory for each rank, which has 0.0 GB: a'
        r' smaller micro_batch_size .* take less, for the same gradients',
        plan.memory_line(SIZES, 8, round(needed / 1.26)),
    )


@pytest.mark.parametrize(
    'groups, files, free',
    [
        ('0::/\n', {}, 500 << 10),
        ('0::/a/b\n', {'a/memory.max': '300000\n', 'a/b/memory.max': 'max\n'}, 300000),
        ('0::/a\n', {'memory.max': '900000\n'}, 500 << 10),
    ],
    ids=['no limit', 'limit', 'more than there is'],
)
def test_what_a_host_has_left(tmp_path, groups, files, free):
    proc, cgroups = tmp_path / 'proc', tmp_path / 'cgroup'
    (proc / 'self').mkdir(parents=True)
    (proc / 'meminfo').write_text('MemTotal:  900 kB\nMemAvailable:  500 kB\n')
    (proc / 'self/cgroup').write_text(groups)
    for name, text in files.items():
        (cgroups / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroups / name).write_text(text)
    assert hardware.available_memory(proc, cgroups) == free


def test_a_training_looks_before_it_begins(monkeypatch, capsys):
    # The episodes fit, training does not.
    monkeypatch.setattr(hardware, 'available_memory', lambda: 70_000)
    hparams = resolved('train_policy', 'test', {'rewards.train_new_model': None})
    hparams.override_from_dict({'rewards.trained_model': 'test', 'ppo.total_episodes': 64})
    train_policy.train(hparams)
    printed = capsys.readouterr().out
    assert 'GB: a smaller micro_batch_size' in printed
    assert printed.index('WARNING') < printed.index('1/1')


@pytest.mark.parametrize('command', ['train_policy test a', 'train_reward test a'])
def test_running_out_of_memory_is_one_line(command, tmp_path, monkeypatch):
    def update(self, lr):
        told = 'CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB left'
        raise torch.OutOfMemoryError(told)

    monkeypatch.setattr(optimizer.Adam, 'update', update)
    told = last_error_of(invoke(f'{command} --mpi 1 --save_dir {tmp_path}'))
    assert 'Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB left' in told
    assert 'a smaller micro_batch_size' in told


@pytest.mark.parametrize(
    'allocate', [lambda: torch.empty(1 << 60, dtype=torch.int8), lambda: np.empty(1 << 60, np.int8)]
)
def test_memory_of_a_host_runs_out_as_well(allocate):
    with pytest.raises(UserError, match='out of memory .*allocate'), session.oom_explained():
        allocate()
    with pytest.raises(RuntimeError, match='^a fault$'), session.oom_explained():
        raise RuntimeError('a fault')


def test_what_a_step_works_on():
    policy = resolved('train_policy', 'descriptiveness')
    reward = resolved('train_reward', 'descriptiveness')

    def expected(**work):
        return pytest.approx(memory_of(**work))

    work = {'rows': 64, 'tokens': 88, 'predicted': 24}
    assert policy_phase(policy).memory(SIZES, 8, CPU) == expected(**work)
    policy.ppo.samples_per_query, policy.ppo.nminibatches = 4, 2
    work.update(rows=32, tokens=64 / 4 + 24)
    assert policy_phase(policy).memory(SIZES, 8, CPU) == expected(**work)
    work.update(rows=4, tokens=160, predicted=0, networks=scopes.REWARD_NETWORKS)
    assert reward_phase(reward).memory(SIZES, 8, CPU) == expected(**work)


def test_products_of_many_shapes_are_not_all_kept(monkeypatch):
    """They grew to .78 of what 1024 shapes take with AMX, and to .45 elsewhere."""
    names = ('ONEDNN_PRIMITIVE_CACHE_CAPACITY', 'LRU_CACHE_CAPACITY')
    monkeypatch.delenv(names[0], raising=False)
    monkeypatch.setenv(names[1], '512')  # who has set it knows why
    importlib.reload(lm_human_preferences)
    assert [os.environ[name] for name in names] == ['256', '512']
