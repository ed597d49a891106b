"""Ensembles: several reward models that learn the same labels with other seeds, as one reward."""

import json
import shutil

import numpy as np
import online_runs
import pytest
import torch
from command_line import NEW, error_of, invoke, last_error_of, succeed
from events import events_of
from experiments import resolved
from interrupted import STEP, assert_same, failing, result_of
from ranks import give_each_thread_its_own_numpy_random, on_ranks

from lm_human_preferences import lm_tasks, rewards, train_policy, train_reward
from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.checkpointing.tf_bundle import Bundle
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import UserError
from lm_human_preferences.evaluation import reward_on_labels
from lm_human_preferences.hparams import reward_options
from lm_human_preferences.hparams.task_options import TaskHParams
from lm_human_preferences.labels import training_data
from lm_human_preferences.labels.held_out import predict
from lm_human_preferences.language import encodings
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.plan.phases import make_plan, reward_phase
from lm_human_preferences.reward_sources import loading
from lm_human_preferences.rewards import EnsembleReward
from lm_human_preferences.runs import run_dir, run_record, run_settings
from lm_human_preferences.utils.core import set_seed

TRAINING = (
    'train_reward test run --mpi 1 --labels.num_train 96 --normalize_samples 64'
    ' --run.save_interval 1'
)
MEMBERS = ('reward_model', 'reward_model_1', 'reward_model_2')
ONLINE = {'rewards__ensemble': 2, 'ppo__total_episodes': 256, 'rewards__online__retrainings': 1}
POLICY = 'train_policy test policy --mpi 1 --ppo.total_episodes 128 --ppo.noptepochs 1'


class Fixed:
    encoder = encodings.Test.get_encoder()
    padding_token = encoder.padding_token

    def __init__(self, *rewards):
        self.rewards = torch.tensor(rewards)

    def get_rewards(self, queries, responses):
        return self.rewards.expand(responses.shape[:-1])


def run_of(directory, words):
    succeed(f'{words} --save_dir {directory}')
    return directory / words.split()[2]


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    return run_of(tmp_path_factory.mktemp('ensemble'), f'{TRAINING} --ensemble 3')


def variables_of(directory):
    bundle = Bundle(checkpoints.latest(str(directory / 'checkpoints')))
    return {name: np.array(bundle[name]) for name in bundle}


def without_settings(result):
    return {key: value for key, value in result.items() if not str(key).endswith('_hparams.json')}


def test_the_score_is_the_mean_of_the_members():
    task = TaskHParams(query_length=1, response_length=1, penalty_reward_value=-7)
    task.truncate_token = 1  # the second response has none
    reward = EnsembleReward([Fixed(0.0, 2.0), Fixed(3.0, 2.0), Fixed(6.0, 5.0)])
    responses = torch.tensor([[1], [2]])
    assert reward.score(responses, responses).tolist() == [3, 3]
    scores, _, stats = rewards.make_score_fn(task, reward)(responses, responses)
    assert scores.tolist() == stats['score'].tolist() == [3, -7]


def test_the_first_member_is_what_one_model_would_be(trained, tmp_path):
    one = run_of(tmp_path, TRAINING)
    alone, ensemble = result_of(one), result_of(trained)
    for settings in (alone, ensemble):
        for name in ('run.json', 'train_reward_hparams.json'):
            settings[name] = json.loads(settings[name])
        del settings['run.json']['train_reward']['settings']['ensemble']
        del settings['train_reward_hparams.json']['run']['save_dir']
    of_both = [key for key in alone if key in ensemble and 'checkpoints/' not in str(key)]
    assert len(of_both) > 4
    assert_same({key: ensemble[key] for key in of_both}, {key: alone[key] for key in of_both})
    first_alone, first = variables_of(one / 'reward_model'), variables_of(trained / 'reward_model')
    np.testing.assert_equal(first, first_alone)
    first, *others = (variables_of(trained / name) for name in MEMBERS)
    heads = [each['reward_model/model/heads/reward/w'] for each in (first, *others)]
    assert len({head.tobytes() for head in heads}) == 3
    assert len({each['reward_model/reward_norm/gain'].item() for each in (first, *others)}) == 3
    assert all(list(each) == list(first) for each in others)


def test_the_mean_is_measured_by_the_labels_held_out(tmp_path):
    result = succeed(f'{TRAINING} --ensemble 3 --labels.held_out 0.3 --save_dir {tmp_path}')
    hparams = reward_options.CommandHParams()
    run_settings.read_settings(hparams, f'{tmp_path}/run')
    initial = lm_tasks.initial_model('test')
    set_seed(hparams.run.seed, 0)
    phase, comm = reward_phase(hparams), Comm()
    trainer, _ = train_reward.build_trainer(phase, initial, comm)
    model = loading.load_learned(f'{tmp_path}/run', encodings.Test)
    score = reward_on_labels.rewards_by(model)
    expected = predict(score, trainer.held_out, trainer.label_type, 32, Comm())
    ((step, value),) = events_of(tmp_path / 'run/tb/reward_model')[
        'train_reward/held_out_of_mean/accuracy'
    ]
    assert (step, value) == (trainer.total_steps - 1, pytest.approx(expected.accuracy))
    assert result.stdout.splitlines()[-1] == f'Held-out labels: {expected}'


def test_members_learn_the_same_labels(monkeypatch):
    """Though labels may be drawn from the random numbers of the run's seed, which is drawn once."""
    trainers = []
    prepare = train_reward.RewardModelTrainer.prepare

    def noted(trainer):
        prepare(trainer)
        trainers.append(trainer)

    def draw(hparams, policy, comm):
        tokens = torch.randint(9, (64, 3))
        return {'query': tokens, 'sample0': tokens, 'sample1': tokens, 'best': tokens[:, 0] % 2}

    monkeypatch.setattr(train_reward.RewardModelTrainer, 'prepare', noted)
    monkeypatch.setattr(training_data, 'simulated_labels', draw)
    settings = {'ensemble': 2, 'run.seed': None, 'task.response_length': 3}
    settings |= {'labels.source': 'mock', 'labels.type': 'best_of_2'}
    settings |= {'normalize_before': False, 'normalize_after': False}
    hparams = resolved('train_reward', 'test', settings)
    train_reward.train(hparams, Comm())
    first, second = trainers
    assert torch.equal(first.labels['query'], second.labels['query'])
    assert (first.order != second.order).any()


def test_interrupted_between_and_inside_members_it_ends_alike(trained, tmp_path, monkeypatch):
    step, prepare = train_reward.RewardModelTrainer.step, train_reward.RewardModelTrainer.prepare
    prepared = []

    def fail_in_the_second(trainer):
        if len(prepared) == 2 and trainer.steps_done == 2:
            raise UserError('inside')
        return step(trainer)

    def fail_before_the_third(trainer):
        prepared.append(trainer)
        if trainer.logger.directory.endswith('reward_model_2'):
            raise UserError('between')
        prepare(trainer)

    words = f'{TRAINING} --ensemble 3 --save_dir {tmp_path}'
    hparams = resolved('train_reward', 'test')
    hparams.ensemble, hparams.run.save_dir = 3, str(tmp_path / 'run')
    with monkeypatch.context() as patched:
        patched.setattr(train_reward.RewardModelTrainer, 'step', fail_in_the_second)
        patched.setattr(train_reward.RewardModelTrainer, 'prepare', fail_before_the_third)
        assert 'inside' in invoke(words).stderr
        assert 'Step 2 of the reward model 1 is saved' in run_dir.resume_hint(hparams)
        assert 'between' in invoke(f'resume {tmp_path}/run').stderr
    result = succeed(f'resume {tmp_path}/run')
    assert result.stdout.count('is finished') == 2
    other = error_of(invoke(f'{words} --ensemble 2 --run.resume on'))
    assert other.startswith('--ensemble 2: the run in ')
    ours, reference = result_of(tmp_path / 'run'), result_of(trained)
    assert_same(without_settings(ours), without_settings(reference))


def test_all_ranks_begin_with_the_same_networks():
    phases = make_plan(resolved('train_reward', 'test', {'ensemble': 2})).rewards
    given = {NEW: 'off', 'rewards.trained_model': 'test'}
    policy = make_plan(resolved('train_policy', 'test', given)).policy

    def work(comm):
        start = TrainedModel('test')
        trainers = [train_reward.build_trainer(phase, start, comm)[0] for phase in phases]
        trainers.append(train_policy.build_trainer(policy, start, comm))
        networks = [each for trainer in trainers for each in trainer.networks.values()]
        return [list(network.parameters_by_name().values()) for network in networks]

    first, second = on_ranks(2, work)
    assert len(first) > 5
    for one, two in zip(first, second, strict=True):
        assert all(map(torch.equal, one, two))


@pytest.fixture(scope='module')
def policy(trained, tmp_path_factory):
    words = f'{POLICY} --rewards.train_new_model off --rewards.trained_model {trained}'
    directory = tmp_path_factory.mktemp('policy')
    result = succeed(f'{words} --save_dir {directory}')
    return directory / 'policy', result.stdout


def test_a_policy_learns_from_the_members_of_a_run(trained, policy):
    run, _ = policy
    record = run_record.training(str(run), 'train_policy')
    assert record['settings']['rewards.ensemble'] == 3

    queries, responses = torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5, 6, 7]])
    members = [rewards.TrainedRewardModel(str(trained / name), encodings.Test) for name in MEMBERS]
    expected = torch.stack([member.score(queries, responses) for member in members])
    for place, count in ((trained, None), (trained / 'reward_model', 3), (run / 'policy', None)):
        reward = loading.load_reward_model(str(place), encodings.Test, members=count)
        torch.testing.assert_close(reward.score(queries, responses), expected.mean(0))
    first = loading.load_reward_model(str(trained / 'reward_model'), encodings.Test)
    assert torch.equal(first.score(queries, responses), expected[0])


def test_each_member_is_exported_by_itself(trained, tmp_path):
    refused = error_of(invoke(f'export {trained} {tmp_path}/all'))
    assert 'is the mean of 3 reward models: export each of them, such as' in refused
    for name in MEMBERS:
        assert '%' not in succeed(f'export {trained}/{name} {tmp_path}/{name}').stderr  # no bar
    weights = [(tmp_path / name / 'model.safetensors').read_bytes() for name in MEMBERS]
    assert len(set(weights)) == 3


def test_a_policy_trains_its_members_first(trained, tmp_path):
    new = TRAINING.split(' ', 5)[5].replace('--labels', f'--{NEW}.labels')
    new = new.replace('--normalize', f'--{NEW}.normalize')
    words = f'{POLICY} --rewards.ensemble 2 {new}'
    run = run_of(tmp_path / 'whole', words)
    for name in MEMBERS[:2]:
        ours, theirs = variables_of(run / name), variables_of(trained / name)
        np.testing.assert_equal(ours, theirs)
    again = loading.load_reward_model(str(run), encodings.Test)
    assert isinstance(again, EnsembleReward) and len(again.members) == 2


def test_ranks_have_the_same_members(tmp_path, monkeypatch):
    give_each_thread_its_own_numpy_random(monkeypatch)
    seen = {}
    step = train_policy.PPOTrainer.step

    def noted(trainer):
        members = [trainer.networks[scope] for scope in MEMBERS[:2]]
        seen[trainer.comm.rank] = [
            [parameter.detach().clone() for parameter in member.get_params()] for member in members
        ]
        return step(trainer)

    monkeypatch.setattr(train_policy.PPOTrainer, 'step', noted)
    on_ranks(2, lambda comm: online_runs.train(tmp_path / 'run', comm, **ONLINE))
    for ours, theirs in zip(*seen.values(), strict=True):
        assert len(ours) > 10
        assert all(torch.equal(*both) for both in zip(ours, theirs, strict=True))
    first, second = seen[0]
    assert not all(torch.equal(*both) for both in zip(first, second, strict=True))


def test_each_member_is_retrained(tmp_path):
    whole = tmp_path / 'whole'
    online_runs.train(whole, **ONLINE)
    with failing(STEP, 4), pytest.raises(UserError, match='interrupted'):
        online_runs.train(tmp_path / 'parts', **ONLINE)
    online_runs.train(tmp_path / 'parts', **ONLINE, run__resume=True)
    assert_same(online_runs.online_result(tmp_path / 'parts'), online_runs.online_result(whole))
    assert len(online_runs.models_of(whole)) == 2
    reward = loading.load_reward_model(str(whole / 'policy'), encodings.Test)
    assert isinstance(reward, EnsembleReward) and len(reward.members) == 2


@pytest.mark.parametrize(
    'settings, text',
    [
        ('--rewards.trained_model {} --rewards.ensemble 4', '{}/reward_model_3 is missing'),
        ('--rewards.trained_model test --rewards.ensemble 2', '2: this option is only for network'),
        ('--rewards.trained_model {} --rewards.pessimism 1', '1: this option is only for head'),
        ('--rewards.trained_model {} --rewards.ensemble 101', 'must be at most 100, got 101'),
    ],
)
def test_members_that_are_not_there(trained, tmp_path, settings, text):
    words = f'{POLICY} --rewards.train_new_model off {settings.format(trained)}'
    told = last_error_of(invoke(f'{words} --dry_run --save_dir {tmp_path}'))
    assert text.format(trained) in told


def test_a_run_whose_members_are_damaged(trained, tmp_path):
    run, texts = tmp_path / 'run', tmp_path / 'texts.jsonl'
    texts.write_text('{"query": "abc", "response": "defg"}')
    shutil.copytree(trained, run)
    data = run / 'reward_model_2/checkpoints/model.ckpt.data-00000-of-00001'
    data.write_bytes(data.read_bytes()[:100])
    assert error_of(invoke(f'score {run} {texts}')).startswith(f'{data} is truncated')
    record = run / 'run.json'
    record.write_text(record.read_text().replace('"ensemble": 3', '"ensemble": 1000000000'))
    error = error_of(invoke(f'score {run} {texts}'))
    assert error.startswith(str(record)) and '--ensemble must be at most 100' in error


def test_seeds_of_members_are_far_apart():
    settings = reward_options.CommandHParams(ensemble=3)
    settings.run.seed = 7
    seeds = [phase.seed for phase in make_plan(settings).rewards]
    assert seeds == [7, 1_000_010, 2_000_013]
