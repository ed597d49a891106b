"""Settings given when a run is resumed hold from there, each seen by its effect, or are refused."""

import itertools
import json
import re
import shutil
import signal

import pytest
import run_folders
from command_line import error_of, invoke, last_error_of, succeed
from events import CLOCK, events_of
from experiments import resolved
from interrupted import REWARD_STEP, TRAIN_BATCH, assert_same, failing, result_anywhere, run
from label_folders import make_folder

from lm_human_preferences.hparams import policy_options, reward_options
from lm_human_preferences.labels.folder import LabelFolder
from lm_human_preferences.labels.labeller import Labeller
from lm_human_preferences.labels.simulated import simulate, small_tokens
from lm_human_preferences.runs import fixed_settings, run_record
from lm_human_preferences.trainers.reward_trainer import RewardModelTrainer
from lm_human_preferences.training.optimizer import Adam
from lm_human_preferences.utils import hyperparams

NEW = 'rewards.train_new_model'
BEGUN, ALL = 128, 256  # episodes: two steps, then four
LENGTH = 4  # tokens of a response
ONLINE = {'rewards.online': 'on', 'rewards.online.labels': 512}
SMALL = (
    f'--ppo.noptepochs 2 --ppo.nminibatches 2 --{NEW}.labels.num_train 64'
    f' --{NEW}.normalize_samples 16'
)
# Another value of each option that a trainer, a sampler or a checkpoint might hold, and what it
# changes in the steps after it, to the eye of TensorBoard.
EFFECTS = {
    'run.seed': (7, 'objective/score'),
    'task.policy.temperature': (1.5, 'objective/entropy'),
    'task.truncate_token': (3, 'objective/score'),
    'task.stop': ('on', 'objective/entropy'),
    'task.query_length': (2, 'objective/score'),
    'task.query_prefix': ('a', 'objective/entropy'),
    'task.response_length': (3, 'objective/score'),
    'rewards.kl_coef': (3.0, 'objective/kl_coef'),
    'rewards.adaptive_kl.target': (0.01, 'objective/kl_coef'),
    'rewards.adaptive_kl.horizon': (300, 'objective/kl_coef'),
    'rewards.adaptive_kl': ('off', 'objective/kl_coef'),
    'ppo.total_episodes': (192, 'objective/score'),
    'ppo.batch_size': (32, 'objective/score'),
    'ppo.nminibatches': (1, 'ppo/loss/total'),
    'ppo.lr': (0.1, 'ppo/loss/total'),
    'ppo.samples_per_query': (4, 'ppo/returns/var'),
}
# These are read at each step.
OF_STEPS = (
    'run.precision task.truncate_text task.penalty_reward_value task.truncate_after'
    ' task.query_suffix ppo.noptepochs ppo.vf_coef ppo.cliprange ppo.cliprange_value ppo.gamma'
    ' ppo.lam ppo.whiten_rewards'
).split()
REFUSED = {
    'task.policy.initial_model': '/somewhere',
    'rewards.trained_model': 'mock',
    'rewards.relative_kl_coef': 'on',
    'rewards.ensemble': 2,
    NEW: 'off',
    'rewards.online': 'on --rewards.online.labels 960 --rewards.online.retrainings 0',
    f'{NEW}.lr': 1e-4,
    f'{NEW}.labels.num_train': 96,
}
# These change how the run is done, shown or kept, not its numbers; or are tested elsewhere.
OF_HOW = (
    'run.log_interval run.save_interval run.save_dir run.resume run.evaluate run.console'
    ' run.allreduce run.allreduce_timeout run.stop_timeout run.on_anomaly'
    ' run.gradient_checkpointing run.keep_base run.keep_checkpoints run.sample_queries'
    ' run.sample_interval run.deterministic ppo.micro_batch_size'
)
WITHOUT_NUMBERS = set(OF_HOW.split())
# Of the reward itself: tests/unit/test_reward_function.py, test_classifier_reward.py,
# test_frozen_head.py
OF_OTHER_REWARDS = {'rewards.function', 'rewards.class_name', 'rewards.pessimism', 'features'}
OF_TEXTS = {
    'task.query_dataset',
    'task.query_seed',
    'task.chat',
    'task.special_tokens',
    'task.start_text',
    'task.end_text',
}  # the run's data set has no texts


@pytest.fixture(scope='module')
def begun(tmp_path_factory):
    """Return the directory of a run of two steps, with a truncate token as `test` has none."""
    directory = tmp_path_factory.mktemp('begun')
    succeed(
        f'train_policy test run --mpi 1 --save_dir {directory} {SMALL} --ppo.total_episodes {BEGUN}'
        ' --task.truncate_token 5'
    )
    return directory


@pytest.fixture
def copied(begun, tmp_path):
    """Return the directory of a copy of that run."""
    shutil.copytree(begun, tmp_path / 'save')
    return tmp_path / 'save/run'


def resumed(begun, folder, words=''):
    """Resume with the options `words`: {tag: [(step, value), ...]} of TensorBoard."""
    shutil.copytree(begun, folder)
    total = '' if 'total_episodes' in words else f'--ppo.total_episodes {ALL}'
    succeed(f'resume {folder}/run {total} {words}')
    return {
        tag: events for tag, events in events_of(folder / 'run/tb/ppo').items() if tag not in CLOCK
    }


@pytest.fixture(scope='module')
def unchanged(begun, tmp_path_factory):
    return resumed(begun, tmp_path_factory.mktemp('unchanged') / 'save')


@pytest.mark.parametrize('option', EFFECTS)
def test_named_settings_hold(option, begun, unchanged, tmp_path):
    value, tag = EFFECTS[option]
    events = resumed(begun, tmp_path / 'save', f'--{option} {value}')
    assert events[tag][:2] == unchanged[tag][:2]
    assert events[tag][2:] != unchanged[tag][2:]
    assert_counted(events, **{option.removeprefix('ppo.'): value})


def assert_counted(events, total_episodes=ALL, batch_size=64, **settings):
    """Assert that what was done before is counted as it was done, to the end that was asked for."""
    length = settings.get('task.response_length', LENGTH)
    steps = (total_episodes - BEGUN) // batch_size
    batches = [64] * 2 + [batch_size] * steps
    tokens = [64 * LENGTH] * 2 + [batch_size * length] * steps
    assert numbers(events, 'elapsed/updates') == [*range(1, steps + 3)]
    assert numbers(events, 'elapsed/episodes') == [*itertools.accumulate(batches)]
    assert numbers(events, 'elapsed/steps/total') == [*itertools.accumulate(tokens)]
    serial = [LENGTH] * 2 + [length] * steps
    assert numbers(events, 'elapsed/steps/serial') == [*itertools.accumulate(serial)]


def numbers(events, tag):
    return [value for _, value in events[tag]]


@pytest.mark.parametrize(
    'batch_size, total',
    [(16, 192), (128, 256), (64, 320)],
)
def test_steps_of_another_size(batch_size, total, copied, monkeypatch):
    """The rate falls with the episodes to the end."""
    rates = []
    update = Adam.update

    def noted(optimizer, lr):
        rates.append(lr / 0.01)
        update(optimizer, lr)

    monkeypatch.setattr(Adam, 'update', noted)
    words = f'--ppo.total_episodes {total} --ppo.batch_size {batch_size}'
    result = succeed(f'resume {copied} {words}')
    assert_counted(events_of(copied / 'tb/ppo'), total, batch_size)
    by_steps = [1 - episodes / total for episodes in range(BEGUN, total, batch_size)]
    assert rates[::4] == pytest.approx(by_steps)
    steps = len(by_steps) + 2
    assert re.search(rf'^ *{steps}/{steps} +{total} ', result.stdout, re.MULTILINE)
    assert f'is finished: {steps} of {steps} steps.' in succeed(f'resume {copied}').stdout
    summary = run_folders.summary_of(copied)
    assert f'learned in {total} episodes of PPO' in summary and 'early end' not in summary


def test_a_relative_coefficient_that_was_zero_has_its_scale(tmp_path):
    words = (
        f'train_policy test run --mpi 1 --save_dir {tmp_path} {SMALL} --ppo.total_episodes 64'
        ' --rewards.adaptive_kl off --rewards.relative_kl_coef on --rewards.kl_coef'
    )
    succeed(f'{words} 0')
    succeed(f'resume {tmp_path}/run --ppo.total_episodes 128 --rewards.kl_coef 1')
    succeed(f'{words.replace("run", "other", 1)} 1')
    of_zero, of_one = (
        numbers(events_of(tmp_path / name / 'tb/ppo'), 'objective/kl_coef')
        for name in ('run', 'other')
    )
    assert of_zero[0] == 0 and of_zero[1] == of_one[0] != 1


# Of the training of a reward model: other values that hold for the rest of the labels; those that
# are refused, by what is known when the training starts, or always.
OF_REWARD = {'run.seed': 7, 'batch_size': 24, 'lr': 0.5}
REFUSED_OF_REWARD = {
    'labels.num_train': 96,
    'labels.source': '/somewhere',
    'epochs': 3,
    'normalize_before': 'false',
}
FIXED = (
    'task.query_length task.response_length task.policy.initial_model task.policy.lora lora'
    ' ensemble labels.type labels.held_out labels.error normalize_before'
)
FIXED_OF_REWARD = set(FIXED.split())
OF_LATER = (
    'run.precision rollout_batch_size debug_normalize micro_batch_size task.policy.temperature'
    ' normalize_samples normalize_after'
)
OF_STEPS_OF_REWARD = set(OF_LATER.split())


@pytest.fixture(scope='module')
def begun_reward(tmp_path_factory):
    """Return the directory of a reward model's run that ended after 16 of its 2 x 48 labels."""
    directory = tmp_path_factory.mktemp('begun_reward')
    words = (
        f'train_reward test run --mpi 1 --save_dir {directory} --labels.num_train 48 --batch_size'
        ' 16 --epochs 2 --run.save_interval 1 --normalize_samples 16 --run.seed 1'
    )
    with failing(REWARD_STEP, 2):
        assert 'interrupted' in invoke(words).stderr
    return directory


@pytest.mark.parametrize('option', REFUSED_OF_REWARD)
def test_what_a_reward_model_has_begun_with_is_refused(option, begun_reward):
    words = f'resume {begun_reward}/run --{option} {REFUSED_OF_REWARD[option]}'
    told = f'{option.rpartition(".")[2]}|{REFUSED_OF_REWARD[option]}'
    assert re.search(told, last_error_of(invoke(words)))


@pytest.mark.parametrize('option', OF_REWARD)
def test_each_label_is_learned_once_in_an_epoch(option, begun_reward, tmp_path, monkeypatch):
    shutil.copytree(begun_reward, tmp_path / 'save')
    directory = tmp_path / 'save/run'
    batches, rates = [], []
    train_batch = RewardModelTrainer.train_batch

    def noted(trainer, indices, lr):
        batches.append(len(indices))
        rates.append(lr / trainer.settings.lr)
        return train_batch(trainer, indices, lr)

    monkeypatch.setattr(RewardModelTrainer, 'train_batch', noted)
    result = succeed(f'resume {directory} --{option} {OF_REWARD[option]}')
    if option == 'batch_size':
        assert batches == [24, 8, 24, 24]
        assert rates == pytest.approx([1 - 2 / 3 / 4, 1 - 5 / 3 / 4, 1 - 2 / 4, 1 - 3 / 4])
        assert (' 5/5 ' in result.stdout) and (' 96 ' in result.stdout)
    else:
        assert batches == [16] * 5
        assert rates == pytest.approx([1 - step / 6 for step in range(1, 6)])
    assert run_record.labels(str(directory))['learned_from'] == 48


def test_every_option_of_a_reward_model_is_looked_at():
    options = {
        key
        for key, field in hyperparams.fields(reward_options.HParams).items()
        if not key.startswith(('task.policy.lora.', 'lora.'))
        and (not hyperparams.group_class(field.type) or field.default is None)
    }
    of_texts = OF_TEXTS | {key for key in (*EFFECTS, *OF_STEPS) if key.startswith('task.')}
    of_folders = {'labels.without', 'labels.too_long'}  # see test_label_files.py
    looked_at = OF_REWARD.keys() | REFUSED_OF_REWARD.keys() | FIXED_OF_REWARD | OF_STEPS_OF_REWARD
    elsewhere = of_texts | WITHOUT_NUMBERS | of_folders | OF_OTHER_REWARDS
    assert options == looked_at | elsewhere & options
    hparams = resolved('train_reward', 'test')
    for key in looked_at:
        is_fixed = fixed_settings.is_fixed(hparams, key, has_reward_model=False)
        assert is_fixed == (key in FIXED_OF_REWARD), key


def test_the_batches_of_labels_that_are_planned_by_steps_stay():
    for command, options, key in (
        ('train_policy', ONLINE, 'ppo.batch_size'),
        ('train_policy', {f'{NEW}.labels.source': 'mock'}, f'{NEW}.run.seed'),
        ('train_policy', {}, f'{NEW}.lora.alpha'),
        ('train_reward', {'labels.source': 'mock'}, 'run.seed'),
        ('train_reward', {'labels.source': 'mock'}, 'task.policy.temperature'),
        ('train_policy', {}, f'{NEW}.task.response_length'),
    ):
        hparams = resolved(command, 'test', options)
        assert fixed_settings.is_fixed(hparams, key, has_reward_model=False)
        hparams = resolved(command, 'test')
        assert not fixed_settings.is_fixed(hparams, key, has_reward_model=True)


@pytest.mark.parametrize('option', REFUSED)
def test_settings_without_effect_are_refused(option, copied):
    words = f'resume {copied} --{option} {REFUSED[option]}'
    assert f'--{option}' in error_of(invoke(words))


def test_every_option_is_looked_at():
    options = {
        key
        for key, field in hyperparams.fields(policy_options.HParams).items()
        # Labels while the policy trains: tests/commands/test_online_runs.py; adapters:
        # tests/unit/test_adapters.py
        if not key.startswith((f'{NEW}.', 'rewards.online.', 'run.serve', 'task.policy.lora'))
        and (not hyperparams.group_class(field.type) or field.default is None)
    }
    refused = {key for key in REFUSED if not key.startswith(f'{NEW}.')}
    hold = {*EFFECTS, *OF_STEPS}
    of_others = OF_OTHER_REWARDS & options
    assert options == hold | WITHOUT_NUMBERS | OF_TEXTS | of_others | refused
    hparams = resolved('train_policy', 'test')
    for key in hold:
        assert not fixed_settings.is_fixed(hparams, key, has_reward_model=True), key


def test_a_named_coefficient_is_the_one_in_force_and_stays(copied):
    """Also where it does not adapt, and when the run goes on once more."""
    words = '--rewards.adaptive_kl off --rewards.kl_coef 0.875'
    succeed(f'resume {copied} --ppo.total_episodes 192 {words}')
    succeed(f'resume {copied} --ppo.total_episodes 256')
    coefficients = [value for _, value in events_of(copied / 'tb/ppo')['objective/kl_coef']]
    assert coefficients[2:] == [0.875, 0.875] and coefficients[0] != 0.875
    recorded = json.loads((copied / 'train_policy_hparams.json').read_text())
    assert recorded['rewards']['kl_coef'] == 0.875


def test_an_adapting_coefficient_goes_on_from_a_named_one(copied):
    succeed(f'resume {copied} --ppo.total_episodes 256 --rewards.kl_coef 0.875')
    coefficients = [value for _, value in events_of(copied / 'tb/ppo')['objective/kl_coef']]
    assert coefficients[2] == 0.875 and coefficients[3] not in (0.875, coefficients[2])


@pytest.mark.parametrize(
    'words',
    [
        'resume {}/run',
        (
            'train_policy test run --mpi 1 --save_dir {} --run.resume on '
            f'{SMALL} --ppo.total_episodes {BEGUN} --task.truncate_token 5'
        ),
    ],
)
def test_a_finished_run_says_so_and_does_nothing(words, begun, copied):
    path = copied / 'train_policy_hparams.json'
    path.write_text(path.read_text().replace(str(begun), str(copied.parent)))
    before = times_in(copied.parent)
    result = succeed(words.format(copied.parent))
    assert 'The policy in ' in result.stdout and ' is finished: 2 of 2 steps.' in result.stdout
    assert 'settings:' not in result.stdout and '1/2' not in result.stdout
    assert times_in(copied.parent) == before


def times_in(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob('*') if path.is_file()}


def test_a_finished_run_of_which_fewer_episodes_are_asked_says_what_it_has(copied):
    result = invoke(f'resume {copied} --ppo.total_episodes 64')
    assert ' is finished: 2 steps, more than the 1 that are asked for.' in result.stdout


def test_a_finished_reward_model_says_so(tmp_path):
    words = (
        f'train_reward test run --mpi 1 --save_dir {tmp_path} --labels.num_train 64'
        ' --normalize_samples 16'
    )
    succeed(words)
    result = succeed(f'resume {tmp_path}/run')
    assert f'The reward model in {tmp_path}/run/reward_model is finished' in result.stdout
    assert 'settings:' not in result.stdout


def answered_folder(path):
    make_folder(path, 40)
    with Labeller(LabelFolder(str(path)), 'anna') as anna:
        simulate(anna, small_tokens)


def reward_words(directory, source):
    return (
        f'train_reward test run --mpi 1 --save_dir {directory} --labels.source {source}'
        ' --labels.num_train None --batch_size 8 --normalize_samples 16 --run.save_interval 1'
    ).split()


def test_a_folder_that_has_grown(tmp_path):
    """The run goes on with the labels that it began with, as if nobody had answered since."""
    folder = tmp_path / 'labels'
    answered_folder(folder)
    succeed(reward_words(tmp_path / 'alone', folder))
    words = reward_words(tmp_path / 'killed', folder)
    assert run(words, tmp_path / 'out', kill_at=4, moments=[TRAIN_BATCH]) == -signal.SIGKILL
    make_folder(folder, 20, seed=1)
    for name in ('anna', 'ben'):
        with Labeller(LabelFolder(str(folder)), name) as labeller:
            if name == 'anna':
                labeller.undo()
            simulate(labeller, small_tokens, answers=12)
    result = succeed(f'resume {tmp_path}/killed/run')
    assert 'Num labels found in source: 40' in result.output
    assert_same(result_anywhere(tmp_path / 'killed'), result_anywhere(tmp_path / 'alone'))


def test_what_a_run_learned_from_is_recorded(tmp_path):
    """A path to a folder that grows does not tell; the answers and a digest do."""
    folder = tmp_path / 'labels'
    answered_folder(folder)
    words = reward_words(tmp_path, folder)
    succeed(words)
    first = run_record.labels(str(tmp_path / 'run'))
    assert (first['source'], first['found'], first['learned_from']) == (str(folder), 40, 40)
    assert first['answers'] == first['labellers'] == {'anna': 40} and len(first['digest']) == 64
    assert first['simulated'] == 40 and first['held_out'] == first['held_out_queries'] == 0
    make_folder(folder, 8, seed=1)
    with Labeller(LabelFolder(str(folder)), 'anna') as anna:
        simulate(anna, small_tokens)
    succeed([*words, '--overwrite', '--labels.num_train', '40', '--labels.held_out', '0.2'])
    second = run_record.labels(str(tmp_path / 'run'))
    assert (second['found'], second['answers']) == (48, {'anna': 48})
    assert second['labellers'] == {'anna': 40}
    assert second['held_out'] == second['held_out_queries'] > 0 and second['queries'] == 40
    assert second['learned_from'] + second['held_out'] == 40
    assert second['digest'] == first['digest']


def label_file(path, best):
    label = {'query': [1, 2, 3], **{f'sample{i}': [i] * 4 for i in range(4)}, 'best': best}
    path.write_text(json.dumps([label] * 32))
    return path


def test_a_file_whose_labels_were_replaced(tmp_path):
    """As many as before: only the digest tells."""
    file = label_file(tmp_path / 'labels.json', best=1)
    words = reward_words(tmp_path, file)
    assert run(words, tmp_path / 'out', kill_at=3, moments=[TRAIN_BATCH]) == -signal.SIGKILL
    label_file(file, best=2)
    told = f'--labels.source {file}: these are not the labels that the run was begun with, 32 of'
    assert last_error_of(invoke(f'resume {tmp_path}/run')).startswith(told)
    label_file(file, best=1)
    succeed(f'resume {tmp_path}/run')


def test_labels_that_change_before_a_step_is_saved_are_told(tmp_path):
    file = label_file(tmp_path / 'labels.json', best=1)
    words = reward_words(tmp_path, file)
    assert run(words, tmp_path / 'out', kill_at=1, moments=[TRAIN_BATCH]) == -signal.SIGKILL
    label_file(file, best=2)
    result = succeed(f'resume {tmp_path}/run')
    assert f'the labels have changed since this run was started: 32 of {file}' in result.output


def test_a_folder_is_read_once_when_a_training_starts(tmp_path, monkeypatch):
    answered_folder(tmp_path / 'labels')
    opened = []
    begin = LabelFolder.__init__

    def noted(folder, *args):
        opened.append(args)
        begin(folder, *args)

    monkeypatch.setattr(LabelFolder, '__init__', noted)
    succeed(reward_words(tmp_path, tmp_path / 'labels'))
    assert len(opened) == 1


def test_labels_that_are_not_as_they_were(tmp_path):
    """Answers that are gone; a file that has grown: tests/unit/test_label_files.py."""
    folder = tmp_path / 'labels'
    answered_folder(folder)
    words = reward_words(tmp_path, folder)
    assert run(words, tmp_path / 'out', kill_at=3, moments=[TRAIN_BATCH]) == -signal.SIGKILL
    answers = folder / 'answers/anna.jsonl'
    lines = answers.read_text().splitlines(keepends=True)
    answers.write_text(''.join(lines[:-1]))
    told = f'--labels.source {folder} has fewer answers of anna than when the run was begun'
    assert last_error_of(invoke(f'resume {tmp_path}/run')).startswith(told)
