"""PPO on fixed rollouts against ppo/ and ppo_2ranks/: losses, gradients, updates."""

import numpy as np
import pytest
from compare import array, assert_close, assert_norm_close, assert_stats
from golden_data import json_if_there, load_npz, npz_keys, under
from ranks import give_each_thread_its_own_numpy_random, on_ranks, rank_prefix
from sample_files import tf_variables
from trainers import assert_parameters, loss_of, ppo_trainer, rollouts_of, snapshot

from lm_human_preferences import ppo
from lm_human_preferences.distributed import comm as comms

RECORDED = {
    folder: json_if_there(folder, 'configs.json', default={'configs': ()})
    for folder in ('ppo', 'ppo_2ranks')
}
CONFIGS = {
    (folder, config['id']): config
    for folder, recorded in RECORDED.items()
    for config in recorded['configs']
}
SHUFFLED = [
    (folder, name)
    for folder, name in CONFIGS
    if any('train/np_seed' in key for key in npz_keys(folder, f'{name}.npz'))
]
SMALL_LR = 1e-4  # a run that hardly moves is held to what it moves


@pytest.fixture(params=CONFIGS, ids='/'.join)
def case(request):
    """(folder, complete configuration, ranks, recorded arrays)."""
    folder, name = request.param
    arrays = load_npz(folder, f'{name}.npz')
    return folder, CONFIGS[request.param], RECORDED[folder]['ranks'], arrays


def elements_of(config):
    return config['minibatch_rows'] * config['hparams']['task']['response_length']


def minibatch(rollouts, i, config):
    return rollouts[i * config['minibatch_rows'] : (i + 1) * config['minibatch_rows']]


def variables_of(trainer):
    return tf_variables(trainer.policy.parameters_by_name(), 'policy')


def check_parameters(trainer, recorded, start, config):
    is_small = config['hparams']['ppo']['lr'] < SMALL_LR
    tolerances = dict(atol=2e-6, change_rtol=0.02) if is_small else dict(change_rtol=0.002)
    assert_parameters(variables_of(trainer), recorded, start=start, **tolerances)


def test_loss_targets_and_gradients(case):
    folder, config, size, arrays = case
    for rank in range(size):
        recorded = under(arrays, f'{rank_prefix(rank, size)}initial/')
        rollouts = rollouts_of(folder, config['id'], rank, size)
        trainer = ppo_trainer(config['hparams'], comms.Comm())
        for prefix in sorted({key.split('/')[0] for key in recorded}):
            rows = minibatch(rollouts, int(prefix.removeprefix('minibatch')), config)
            check_minibatch(trainer, rows, under(recorded, f'{prefix}/'), config)


def check_minibatch(trainer, rollouts, recorded, config):
    minibatch = ppo.add_advantages(rollouts, trainer.ppo)
    assert_close(minibatch.advantages, recorded['advantages'], atol=1e-5, name='advantages')
    assert_close(minibatch.returns, recorded['returns'], atol=1e-5, name='returns')
    trainer.policy.model.zero_grad()
    loss, stats = loss_of(trainer, minibatch)
    loss.backward()
    stats |= ppo.return_stats(minibatch)
    assert_stats(stats, under(recorded, 'stats/'), elements=elements_of(config))
    assert_close(loss, recorded['stats/loss/total'], atol=2e-7)
    check_gradients(trainer.policy, recorded, config['params_without_gradient'])


def check_gradients(policy, recorded, without):
    parameters = policy.parameters_by_name().items()
    computed = {name: p.grad for name, p in parameters if p.grad is not None}
    variables = tf_variables(computed, 'policy').items()
    gradients = {name: array(gradient) for name, gradient in variables if name not in without}
    norms = under(recorded, 'grad_norm/')
    assert set(gradients) == set(norms)
    for name, norm in norms.items():
        # Gradients that cancel, such as that of the keys' bias, are rounding errors: measured
        # beside the whole.
        atol = 1e-6 * recorded['grad_norm_global']
        assert_close(np.linalg.norm(gradients[name]), norm, atol=atol, name=name)
    squares = sum(np.square(gradient).sum() for gradient in gradients.values())
    assert_close(np.sqrt(squares), recorded['grad_norm_global'])
    for name, gradient in under(recorded, 'grad/').items():
        assert_norm_close(gradients[name], gradient, name=name)


def test_updates_without_shuffling(case):
    """Statistics and learning rate of every call, parameters after some of them."""
    folder, config, size, arrays = case
    initial = snapshot(variables_of(ppo_trainer(config['hparams'], comms.Comm())))

    def work(comm):
        recorded = under(arrays, f'{rank_prefix(comm.rank, size)}per_call/')
        rollouts = rollouts_of(folder, config['id'], comm.rank, size)
        trainer, stats, rates = ppo_trainer(config['hparams'], comm), [], []
        update = trainer.optimizer.update
        trainer.optimizer.update = lambda lr: (rates.append(lr), update(lr))
        for call, (step, lr, i) in enumerate(
            zip(recorded['global_step'], recorded['lr'], recorded['minibatch'], strict=True),
            start=1,
        ):
            trainer.steps_done = int(step)
            stats.append(trainer.train_minibatch(minibatch(rollouts, int(i), config)))
            assert_close(rates[-1], lr, rtol=1e-12)
            after = under(arrays, f'after{call}/')
            if after:
                check_parameters(trainer, after, initial, config)
        found = {name: [s[name].item() for s in stats] for name in stats[0]}
        assert_stats(found, under(recorded, 'stats/'), elements=elements_of(config))

    on_ranks(size, work)


@pytest.mark.parametrize('case', SHUFFLED, ids='/'.join, indirect=True)
def test_train_shuffles_as_the_original(case, monkeypatch):
    """PPOTrainer.train with numpy seeded: the same permutations, statistics and parameters."""
    folder, config, size, arrays = case
    if size > 1:
        give_each_thread_its_own_numpy_random(monkeypatch)
    initial = snapshot(variables_of(ppo_trainer(config['hparams'], comms.Comm())))

    def work(comm):
        recorded = under(arrays, f'{rank_prefix(comm.rank, size)}train/')
        np.random.seed(int(recorded['np_seed']))
        trainer = ppo_trainer(config['hparams'], comm)
        trainer.steps_done = RECORDED[folder]['global_step_start']
        stats = trainer.train(rollouts_of(folder, config['id'], comm.rank, size))
        found = {name: [value.item() for value in values] for name, values in stats.items()}
        assert_stats(found, under(recorded, 'stats/'), elements=elements_of(config))
        check_parameters(trainer, under(arrays, 'train/after/'), initial, config)

    on_ranks(size, work)
