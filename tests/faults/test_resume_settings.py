"""Settings given when a run is resumed: what those do that may change; others are refused."""

import copy
import json
import re
import shutil
import signal

import pytest
from command_line import error_of, invoke, last_error_of, succeed
from events import CLOCK, events_of
from experiments import another, resolved
from interrupted import REWARD_STEP, TRAIN_BATCH, assert_same, failing, result_anywhere, run
from label_folders import make_folder

from lm_human_preferences.errors import UserError
from lm_human_preferences.evaluation import evaluate
from lm_human_preferences.hparams import policy_options
from lm_human_preferences.labels.folder import LabelFolder
from lm_human_preferences.labels.labeller import Labeller
from lm_human_preferences.labels.simulated import simulate
from lm_human_preferences.labels.training_data import score_small_tokens
from lm_human_preferences.runs import run_record, run_settings
from lm_human_preferences.trainers.reward_trainer import RewardModelTrainer
from lm_human_preferences.training.optimizer import Adam
from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.hyperparams import members

NEW = 'rewards.train_new_model'
BEGUN, ALL = 128, 256  # episodes: two steps, then four
ONLINE = {'rewards.online': 'on', 'rewards.online.labels': 512}
SMALL = (
    f'--ppo.noptepochs 2 --ppo.nminibatches 2 --{NEW}.labels.num_train 64'
    f' --{NEW}.normalize_samples 16'
)
# These change where and how long a run works, and are tested where they are tested for a new one:
# several ranks in test_ranks.py and test_lost_ranks.py, an end in test_stop.py, patience in
# test_online_runs.py, a function in test_reward_function.py.
ELSEWHERE = {'rewards.function', 'rewards.online.patience', 'run.stop_timeout'}
ELSEWHERE |= {'run.allreduce', 'run.allreduce_timeout'}


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
    shutil.copytree(begun, tmp_path / 'save')
    return tmp_path / 'save/run'


def curves(run):
    return {tag: each for tag, each in events_of(run / 'tb/ppo').items() if tag not in CLOCK}


def numbers(events, tag):
    return [value for _, value in events[tag]]


def test_a_longer_run(copied, monkeypatch):
    rates, total = [], 192
    update = Adam.update

    def noted(optimizer, lr):
        rates.append(lr / 0.01)
        update(optimizer, lr)

    monkeypatch.setattr(Adam, 'update', noted)
    result = succeed(f'resume {copied} --ppo.total_episodes {total}')
    told = f'note: going on with --ppo.total_episodes {total} (before: {BEGUN})'
    assert told in result.stderr
    steps = total // 64
    assert rates[::4] == pytest.approx([1 - step / steps for step in range(2, steps)])
    events = curves(copied)
    assert numbers(events, 'elapsed/updates') == [*range(1, steps + 1)]
    assert numbers(events, 'elapsed/episodes') == [*range(64, total + 1, 64)]
    assert re.search(rf'^ *{steps}/{steps} +{total} ', result.stdout, re.MULTILINE)
    assert f'is finished, at step {steps}\n' in succeed(f'resume {copied}').stdout


def test_settings_of_how_a_run_works(copied, tmp_path, monkeypatch):
    evaluated = []
    monkeypatch.setattr(evaluate, 'evaluate', lambda run, **settings: evaluated.append(run))
    shutil.copytree(copied, tmp_path / 'usual')
    longer = f'--ppo.total_episodes {ALL} --run.log_interval 1'
    succeed(f'resume {tmp_path}/usual {longer}')
    settings = {
        'ppo.micro_batch_size': 16,
        f'{NEW}.micro_batch_size': 8,  # its reward model is finished, so this is without effect
        'run.gradient_checkpointing': 'on',
        f'{NEW}.run.gradient_checkpointing': 'on',
        'run.save_interval': 1,
        'run.keep_checkpoints': 2,
        'run.evaluate': 'on',
        'run.on_anomaly': 'stop',
    }
    words = ' '.join(f'--{key} {value}' for key, value in settings.items())
    result = succeed(f'resume {copied} {longer} {words}')
    for key, value in settings.items():
        assert re.search(rf'note: going on with --{re.escape(key)} ({value}|True) ', result.stderr)
    found, usual = curves(copied), curves(tmp_path / 'usual')
    for tag in ('elapsed/episodes', 'objective/kl_coef', 'objective/entropy'):
        assert numbers(found, tag) == pytest.approx(numbers(usual, tag), rel=0.02), tag
    saved = [path.stem for path in (copied / 'policy/checkpoints').glob('*.index')]
    assert sorted(saved) == ['model.ckpt-3', 'model.ckpt-4']
    assert evaluated == [str(copied)]
    stays = run_record.training(str(copied), 'train_policy')['settings']
    assert (stays['run.on_anomaly'], stays['ppo.micro_batch_size']) == ('stop', 16)
    tested = {*settings, 'ppo.total_episodes', 'run.log_interval', 'micro_batch_size'}
    assert tested | ELSEWHERE == run_settings.MAY_CHANGE


@pytest.mark.parametrize(
    'command, settings',
    [
        ('train_policy', {}),
        ('train_policy', {**ONLINE, 'run.serve': 'on', 'task.policy.lora': 'on'}),
        ('train_reward', {'lora': 'on', 'task.policy.lora': 'on'}),
    ],
)
def test_every_other_change_is_refused_by_name(command, settings, tmp_path):
    hparams = resolved(command, 'test', {'run.save_dir': str(tmp_path), **settings})
    run_settings.write(hparams, str(tmp_path), experiment='test', ranks=1)
    fields = hyperparams.fields(type(hparams))
    accepted = set()
    for key, value in policy_options.decided(hparams).items():
        field = fields[key]
        is_group = hyperparams.group_class(field.type)
        if key == 'rewards.function' or (is_group and type(None) not in members(field.type)):
            continue  # it has to be a file; it is always on
        other = another(field, value)
        if is_group:
            other = 'off' if value == 'on' else 'on'
        changed = copy.deepcopy(hparams)
        changed.override_from_dict({'run.resume': True, key: other})
        try:
            run_settings.check_settings(changed, {key})
            accepted.add(key)
        except UserError as e:
            assert str(e).startswith(f'--{key} '), key
    # A run that trains its reward model says itself where that is.
    expected = {*run_settings.MAY_CHANGE, 'rewards.trained_model'} - {'rewards.function'}
    if 'rewards.online' in settings:
        expected -= {'ppo.total_episodes'}  # by which labels are planned
    allowed = {key for key in accepted if not f'{key}.'.startswith('run.serve.')}
    assert allowed == expected & policy_options.decided(hparams).keys()
    assert ('run.serve.port' in accepted) == ('run.serve' in settings)


def test_the_command_of_a_run_without_one_of_its_options(copied):
    words = f'train_policy test run --mpi 1 --save_dir {copied.parent} --run.resume on {SMALL}'
    told = error_of(invoke(f'{words} --task.truncate_token 5'))
    assert told.startswith(f'--ppo.total_episodes 6400: the run in {copied} began with {BEGUN}')
    assert told.endswith('or give that option to change it')
    told = error_of(invoke(f'{words} --ppo.total_episodes {ALL}'))
    assert told.startswith('--task.truncate_token None')


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


def test_a_reward_model_goes_on_in_parts_of_other_sizes(begun_reward, tmp_path, monkeypatch):
    """Each label is learned once in an epoch, at the same rates."""
    shutil.copytree(begun_reward, tmp_path / 'save')
    directory = tmp_path / 'save/run'
    batches, rates = [], []
    train_batch = RewardModelTrainer.train_batch

    def noted(trainer, indices, lr):
        batches.append(len(indices))
        rates.append(lr / trainer.settings.lr)
        return train_batch(trainer, indices, lr)

    monkeypatch.setattr(RewardModelTrainer, 'train_batch', noted)
    succeed(f'resume {directory} --micro_batch_size 4 --run.gradient_checkpointing on')
    assert batches == [16] * 5
    assert rates == pytest.approx([1 - step / 6 for step in range(1, 6)])
    assert run_record.labels(run_record.read(str(directory)))['learned_from'] == 48


def test_a_finished_run_says_so_and_does_nothing(begun, copied):
    path = copied / 'train_policy_hparams.json'
    path.write_text(path.read_text().replace(str(begun), str(copied.parent)))
    before = times_in(copied.parent)
    again = f'train_policy test run --mpi 1 --save_dir {copied.parent} --run.resume on {SMALL}'
    for words in (
        f'resume {copied}',
        f'{again} --ppo.total_episodes {BEGUN} --task.truncate_token 5',
        f'resume {copied} --ppo.total_episodes 64',
    ):
        result = succeed(words)
        assert f'The policy in {copied} is finished, at step 2\n' in result.stdout
        assert 'settings:' not in result.stdout and '1/2' not in result.stdout
        assert times_in(copied.parent) == before


def times_in(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob('*') if path.is_file()}


def answered_folder(path):
    make_folder(path, 40)
    with Labeller(LabelFolder(str(path)), 'anna') as anna:
        simulate(anna, score_small_tokens)


def reward_words(directory, source):
    return (
        f'train_reward test run --mpi 1 --save_dir {directory} --labels.source {source}'
        ' --labels.num_train None --batch_size 8 --normalize_samples 16 --run.save_interval 1'
    ).split()


def test_a_folder_that_has_grown(tmp_path):
    folder = tmp_path / 'labels'
    answered_folder(folder)
    succeed(reward_words(tmp_path / 'alone', folder))
    words = reward_words(tmp_path / 'killed', folder)
    assert run(words, tmp_path / 'out', kill_at=4, moments=[TRAIN_BATCH]) == -signal.SIGKILL
    answers = folder / 'answers/anna.jsonl'
    lines = answers.read_text().splitlines(keepends=True)
    answers.write_text(''.join(lines[:-1]))
    told = f'--labels.source {folder}: these are not the labels with which the run began'
    assert last_error_of(invoke(f'resume {tmp_path}/killed/run')).startswith(told)
    answers.write_text(''.join(lines))
    make_folder(folder, 20, seed=1)
    for name in ('anna', 'ben'):
        with Labeller(LabelFolder(str(folder)), name) as labeller:
            if name == 'anna':
                labeller.undo()
            simulate(labeller, score_small_tokens)
    result = succeed(f'resume {tmp_path}/killed/run')
    assert 'Num labels found in source: 40' in result.output
    assert_same(result_anywhere(tmp_path / 'killed'), result_anywhere(tmp_path / 'alone'))


def test_what_a_run_learned_from_is_recorded(tmp_path):
    """A path to a folder that grows does not tell; the answers and a digest do."""
    folder = tmp_path / 'labels'
    answered_folder(folder)
    words = reward_words(tmp_path, folder)
    succeed(words)
    first = run_record.labels(run_record.read(str(tmp_path / 'run')))
    assert (first['source'], first['found'], first['learned_from']) == (str(folder), 40, 40)
    assert first['answers'] == first['labellers'] == {'anna': 40} and len(first['digest']) == 64
    assert first['simulated'] == 40 and first['held_out'] == first['held_out_queries'] == 0
    make_folder(folder, 8, seed=1)
    with Labeller(LabelFolder(str(folder)), 'anna') as anna:
        simulate(anna, score_small_tokens)
    succeed([*words, '--overwrite', '--labels.num_train', '40', '--labels.held_out', '0.2'])
    second = run_record.labels(run_record.read(str(tmp_path / 'run')))
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
    file = label_file(tmp_path / 'labels.json', best=1)
    words = reward_words(tmp_path, file)
    assert run(words, tmp_path / 'out', kill_at=3, moments=[TRAIN_BATCH]) == -signal.SIGKILL
    label_file(file, best=2)
    told = f'--labels.source {file}: these are not the labels with which the run began (32 of'
    assert last_error_of(invoke(f'resume {tmp_path}/run')).startswith(told)
    label_file(file, best=1)
    succeed(f'resume {tmp_path}/run')
