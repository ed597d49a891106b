"""Less memory for the same gradients, and what training is expected to take."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from command_line import NEW, caught_jobs, hparams_of, invoke
from experiments import resolved
from golden_data import load_json
from trainers import LARGE, ppo_trainer, rollouts_of

from lm_human_preferences import ppo, train_policy, train_reward
from lm_human_preferences.distributed import comm as comms
from lm_human_preferences.errors import UserError
from lm_human_preferences.language import model
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.rewards import RewardModel
from lm_human_preferences.training import memory, optimizer, precision

CPU = torch.device('cpu')


@pytest.fixture(params=['fp32', 'bf16'])
def computed_in(request):
    precision.configure(request.param, CPU)
    yield
    precision.configure('fp32', CPU)
    torch.backends.mkldnn.matmul.fp32_precision = 'none'


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


def assert_checkpointing_only_saves_memory(model, loss):
    model.gradient_checkpointing = False
    plain, much = gradients_and_bytes(model, loss)
    model.gradient_checkpointing = True
    again, little = gradients_and_bytes(model, loss)
    assert all(map(torch.equal, plain, again)) and any(gradient.any() for gradient in plain)
    assert little < much / 2


def test_gradient_checkpointing_of_a_policy(computed_in):
    config = load_json('ppo', 'configs.json')['configs'][0]
    trainer = ppo_trainer(config['hparams'], comms.LocalComm())
    rollout = rollouts_of('ppo', config['id'], 0, 1)
    minibatch = ppo.add_advantages(rollout, trainer.hparams.ppo)
    assert_checkpointing_only_saves_memory(trainer.policy.model, lambda: trainer.loss(minibatch)[0])


def test_gradient_checkpointing_of_a_reward_model(computed_in):
    torch.manual_seed(0)
    reward_model = RewardModel(TrainedModel('test'))
    queries, responses = torch.randint(28, (8, 3)).clamp_(max=27), torch.randint(27, (8, 2, 2))
    queries[:, 0] = 5
    assert_checkpointing_only_saves_memory(
        reward_model.model, lambda: reward_model.get_rewards_op(queries, responses).square().sum()
    )


SIZES = model.HParams(n_vocab=10, n_ctx=6, n_embd=4, n_head=2, n_layer=3)
PARAMETERS = 3 * (12 * 4 * 4 + 13 * 4) + (10 + 6) * 4 + 2 * 4  # 804
WORK = memory.MemoryEstimate(
    SIZES, networks=3, rows=5, tokens=7, predicted=2, sampled_rows=1, sampled_tokens=7
)


def test_parameters_are_counted():
    assert (
        sum(p.numel() for p in model.Model(SIZES).parameters())
        == PARAMETERS
        == WORK.lasting() / 4 / 6
    )


def test_an_estimate_by_hand():
    """Of each token in a block: 16 numbers for each of the width's four, and what two heads make of
    seven tokens."""
    block, logits, of_embeddings = 5 * 7 * (16 * 4 + 2 * 7) * 4, 5 * 2 * 10 * 4, 2 * 10 * 4 * 4
    assert WORK.peak() == 6 * 4 * PARAMETERS + (3 + 1) * block + logits + of_embeddings
    inputs = 5 * 7 * 4 * 4
    again = 3 * inputs + 2 * block + logits + of_embeddings
    assert replace(WORK, gradient_checkpointing=True).peak() == 6 * 4 * PARAMETERS + again
    assert (
        replace(WORK, micro_batch_size=1).learning(1)
        == WORK.learning(5) / 5 + of_embeddings * 4 / 5
    )
    few = replace(WORK, micro_batch_size=2)
    assert few.peak() == few.lasting() + 2 * few.learning(2)
    assert replace(few, fused=True).peak() == few.lasting() + replace(few, fused=True).learning(2)
    assert replace(WORK, ranks=2).peak() - WORK.peak() == 4 * PARAMETERS
    assert replace(WORK, networks=2).peak() - WORK.peak() == -4 * PARAMETERS
    cache, drawn = 2 * 3 * 50 * (7 + 64) * 4 * 4, 50 * 10 * (4 + 24)
    assert (
        replace(WORK, rows=1, sampled_rows=50).peak()
        == 6 * 4 * PARAMETERS + cache + 10 * block + drawn
    )


def test_bf16_and_gpus_by_hand():
    half = replace(WORK, reduced=True)
    blocks, on_gpu = 3 * (12 * 4 * 4 + 13 * 4), replace(half, fused=True)
    assert (
        half.lasting() - WORK.lasting() == 3 * 2 * blocks
        and on_gpu.lasting() - WORK.lasting() == 2 * blocks
    )
    assert half.sampling(1) - on_gpu.sampling(1) == 4 * 10 * 4 + half.inside(1, 7) - on_gpu.inside(
        1, 7
    )
    assert (
        half.inside(1, 1) == 2 * 4 * 4 + 14 * 4 * 2 + 2 * 2
        and replace(WORK, fused=True).inside(1, 1) == 16 * 4 * 4
    )


GB = 10**9


def test_a_warning_names_what_fits():
    needed = LARGE.peak()
    assert memory.warning(LARGE, needed) is None
    told = memory.warning(LARGE, 12 * GB)
    assert (
        told == 'WARNING: training takes about 37.0 GB of memory for each rank, which has 12.0 GB: '
        '--ppo.micro_batch_size 32 takes 7.8 GB, for the same gradients'
    )
    assert (
        replace(LARGE, micro_batch_size=32).peak()
        < 12 * GB
        < replace(LARGE, micro_batch_size=64).peak()
    )
    least = replace(LARGE, micro_batch_size=1, gradient_checkpointing=True).peak()
    assert memory.warning(LARGE, least).endswith(
        'GB: --ppo.micro_batch_size 1 --run.gradient_checkpointing true takes 3.6 GB, for the same'
        ' gradients'
    )
    assert memory.warning(LARGE, least - 1).endswith(
        'even --ppo.micro_batch_size 1 --run.gradient_checkpointing true takes 3.6 GB, for the same'
        ' gradients'
    )
    assert memory.warning(replace(LARGE, gradient_checkpointing=True), least).endswith(
        'GB: --ppo.micro_batch_size 1 takes 3.6 GB, for the same gradients'
    )


def meminfo_and_groups(folder, groups, files):
    """A /proc and a /sys/fs/cgroup."""
    proc, cgroups = folder / 'proc', folder / 'cgroup'
    (proc / 'self').mkdir(parents=True)
    (proc / 'meminfo').write_text('MemTotal:  900 kB\nMemAvailable:  500 kB\n')
    (proc / 'self/cgroup').write_text(groups)
    for name, text in files.items():
        (cgroups / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroups / name).write_text(text)
    return proc, cgroups


@pytest.mark.parametrize(
    'groups, files, free',
    [
        ('0::/\n', {}, 500 << 10),
        ('0::/a/b\n', {'a/memory.max': '300000\n', 'a/b/memory.max': 'max\n'}, 300000),
        ('0::/a\n', {'memory.max': '900000\n'}, 500 << 10),
        (
            '5:cpu,cpuacct:/c\n4:memory:/m/outside\n0::/\n',
            {'memory/memory.limit_in_bytes': '400000\n'},
            400000,
        ),
    ],
    ids=['no limit', 'version 2', 'more than there is', 'version 1'],
)
def test_what_a_host_has_left(tmp_path, groups, files, free):
    assert memory.on_host(*meminfo_and_groups(tmp_path, groups, files)) == free


def test_ranks_share_their_host_and_the_poorest_counts(monkeypatch, capsys):
    class Ranks(comms.LocalComm):
        size = local_size = 2

        def all_gather_object(self, value):
            return [value, value - 1]

    monkeypatch.setattr(memory, 'on_host', lambda: 2 * replace(LARGE, ranks=2).peak() + 2)
    memory.check(LARGE, Ranks(), CPU)
    assert capsys.readouterr().out == ''
    monkeypatch.setattr(memory, 'on_host', lambda: 2 * replace(LARGE, ranks=2).peak())
    memory.check(LARGE, Ranks(), CPU)
    assert capsys.readouterr().out.startswith('WARNING: training takes about 37.5 GB')


@pytest.mark.parametrize(
    'train, overrides, told',
    [
        (
            train_policy,
            {'rewards.trained_model': 'test', 'ppo.batch_size': 8, 'ppo.total_episodes': 8},
            '--ppo.',
        ),
        (
            train_reward,
            {
                'labels.source': 'test',
                'labels.type': 'best_of_4',
                'labels.num_train': 8,
                'batch_size': 8,
            },
            '--',
        ),
    ],
)
def test_both_trainings_look_before_they_begin(train, overrides, told, monkeypatch, capsys):
    monkeypatch.setattr(memory, 'on_host', lambda: 50_000)  # the episodes fit, training does not
    hparams = train.HParams()
    hparams.override_from_dict(
        {
            'task.query_length': 3,
            'task.response_length': 4,
            'task.query_dataset': 'test',
            'task.policy.initial_model': 'test',
            **overrides,
        }
    )
    train.train(hparams)
    printed = capsys.readouterr().out
    assert (
        f': even {told}micro_batch_size 1 --run.gradient_checkpointing true takes 0.0 GB, for'
        in printed
    )
    assert printed.index('WARNING') < printed.index('1/1')


@pytest.mark.parametrize(
    'command, option',
    [
        (
            'train_policy test a --rewards.train_new_model off --rewards.trained_model test',
            'ppo.micro_batch_size',
        ),
        ('train_reward test a', 'micro_batch_size'),
        ('train_policy test a', f'{NEW}.micro_batch_size'),
    ],
)
def test_running_out_of_memory_is_one_line(command, option, tmp_path, monkeypatch):
    def update(self, lr):
        raise torch.OutOfMemoryError(
            'CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB left'
        )

    monkeypatch.setattr(optimizer.Adam, 'update', update)
    result = invoke(f'{command} --mpi 1 --save_dir {tmp_path}')
    assert (
        result.exit_code == 2
        and result.stderr.splitlines()[-1]
        == 'error: no memory is left (CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has'
        f' 1.00 GiB left): less is taken, for the same gradients, by a smaller --{option} and by'
        ' --run.gradient_checkpointing true'
    )


@pytest.mark.parametrize(
    'allocate', [lambda: torch.empty(1 << 60, dtype=torch.int8), lambda: np.empty(1 << 60, np.int8)]
)
def test_memory_of_a_host_runs_out_as_well(allocate):
    with (
        pytest.raises(UserError, match='no memory is left .*allocate'),
        memory.explain_oom('--batch_size'),
    ):
        allocate()
    with pytest.raises(RuntimeError, match='^a fault$'), memory.explain_oom('--batch_size'):
        raise RuntimeError('a fault')


def test_what_a_step_works_on():
    policy, reward = (
        resolved(command, 'descriptiveness') for command in ('train_policy', 'train_reward')
    )
    assert train_policy.memory_plan(policy, SIZES, ranks=8) == memory.MemoryEstimate(
        SIZES,
        networks=3,
        rows=64,
        tokens=88,
        predicted=24,
        sampled_rows=64,
        sampled_tokens=88,
        option='--ppo.micro_batch_size',
        batch_options=('--ppo.batch_size', '--ppo.batch_size'),
    )
    assert train_reward.memory_plan(reward, SIZES, 8) == memory.MemoryEstimate(
        SIZES, networks=2, rows=4, tokens=160, sampled_rows=64, sampled_tokens=88
    )


def test_what_both_trainings_of_a_run_share(monkeypatch):
    started = caught_jobs(monkeypatch)
    invoke('train_policy test a --run.precision bf16 --run.gradient_checkpointing true')
    run, new = hparams_of(started).run, hparams_of(started).rewards.train_new_model.run
    assert (
        run.precision == new.precision == 'bf16'
        and run.gradient_checkpointing
        and new.gradient_checkpointing
    )
    started.clear()
    invoke(f'train_policy test b --run.precision bf16 --{NEW}.run.precision fp32')
    assert hparams_of(started).rewards.train_new_model.run.precision == 'fp32'
