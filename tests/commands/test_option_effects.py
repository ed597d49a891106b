"""Each option that a training accepts is read by it; the settings note who reads them."""

import json
import sys

import pytest
from command_line import NEW, caught_jobs, error_of, hparams_of, invoke, succeed
from label_folders import make_folder

from lm_human_preferences.cli.user_settings import settable
from lm_human_preferences.distributed import worker
from lm_human_preferences.hparams import policy_options, reward_options
from lm_human_preferences.labels.folder import LabelFolder
from lm_human_preferences.labels.labeller import Labeller
from lm_human_preferences.labels.simulated import simulate, small_tokens
from lm_human_preferences.utils import hyperparams

OPTIONS = {
    'train_reward': settable(reward_options.HParams),
    'train_policy': settable(policy_options.HParams),
}
FEW = '--batch_size 8 --normalize_samples 8 --rollout_batch_size 8 --debug_normalize 8'
LABELS = f'{FEW} --labels.num_train 16'
SMALL = '--ppo.total_episodes 16 --ppo.batch_size 16 --task.truncate_token 5'
OF_NEW = f'{SMALL} {FEW.replace("--", f"--{NEW}.")}'
ONLINE = (
    '--rewards.online.labels 16 --rewards.online.initial 16 --rewards.online.retrainings 0'
    ' --rewards.online.source test --rewards.online.validation 0 --rewards.online.repeated 0.1'
)
# Trainings that between them read every option.
SITUATIONS = {
    'labels made up': f'train_reward test run {LABELS} --task.truncate_token 5',
    'labels of a folder': f'train_reward test run {LABELS} --labels.source {{}}/folder',
    'labels that are texts': f'train_reward test run {LABELS} --labels.source {{}}/texts.jsonl',
    'a new reward model': f'train_policy test run {OF_NEW} --{NEW}.labels.num_train 16',
    'a trained one': f'train_policy test run {SMALL} --{NEW} off --rewards.trained_model test',
    'labels while the policy trains': f'train_policy test run {OF_NEW} {ONLINE}',
}
# Read where people answer, and where labels are a known reward's; see tests/commands/
# test_online_runs.py and test_mock_sentiment.py.
ELSEWHERE = {
    'rewards.online.patience',
    'labels.error',
    f'{NEW}.labels.error',
    'task.truncate_after',
    'run.sample_queries',  # only of runs that are saved
    'run.sample_interval',
    # Only where labels are held out; see tests/unit/test_held_out.py.
    'labels.held_out_by',
    f'{NEW}.labels.held_out_by',
    *(name for name in OPTIONS['train_policy'] if name.startswith('run.serve.')),
    # Of adapters, which the model test cannot have; see tests/unit/test_adapters.py.
    'run.keep_base',
    *(name for name in OPTIONS['train_policy'] if 'lora' in name.split('.')),
    *(name for name in OPTIONS['train_reward'] if 'lora' in name.split('.')),
}
# The original took it for a reward model, too, where nothing reads it.
OF_THE_POLICY = {'task.penalty_reward_value'}
# What reads all fields alike, to write or to compare them, does not heed them.
ALIKE = {
    'dataclasses',
    'lm_human_preferences.utils.hyperparams',
    'lm_human_preferences.runs.run_settings',
}
ALIKE_FUNCTIONS = {'_leaves', '_check_same_task', '__eq__', '__repr__'}


def options_read(job, arguments):
    read = set()

    def noted(group, name):
        caller = sys._getframe(1)
        is_alike = caller.f_globals['__name__'] in ALIKE or caller.f_code.co_name in ALIKE_FUNCTIONS
        if not is_alike:
            read.add(object.__getattribute__(group, '_group') + name)
        return object.__getattribute__(group, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hyperparams.HParams, '__getattribute__', noted, raising=False)
        worker.import_job(job)(**arguments)
    return read


@pytest.fixture(scope='module')
def read(tmp_path_factory):
    folder = tmp_path_factory.mktemp('situations')
    make_folder(folder / 'folder', 16)
    with Labeller(LabelFolder(str(folder / 'folder')), 'anna') as anna:
        simulate(anna, small_tokens)
    record = {'query': 'abc', **{f'sample{i}': 'abcd' for i in range(4)}, 'best': 1}
    (folder / 'texts.jsonl').write_text(f'{json.dumps(record)}\n' * 16)
    found = {}
    for situation, words in SITUATIONS.items():
        with pytest.MonkeyPatch.context() as patch:
            started = caught_jobs(patch)
            result = invoke(f'{words.format(folder)} --mpi 1 --save_dir None')
        assert result.exit_code == 0, result.output
        ((job, arguments, _),) = started
        found[situation] = words.split()[0], options_read(job, arguments)
    return found


def read_by(read, command):
    return set().union(*(options for of, options in read.values() if of == command))


def test_every_option_is_read(read):
    of_reward, of_policy = read_by(read, 'train_reward'), read_by(read, 'train_policy')
    # Labels of a folder, and those that are texts, are read by the same code in both commands.
    of_policy |= {f'{NEW}.{name}' for name in of_reward if name.startswith('labels.')}
    of_policy |= ELSEWHERE
    # A policy and its reward model have one task: that they are the same is checked.
    of_policy |= {f'{NEW}.{name}' for name in of_policy if name.startswith('task.')}
    assert OPTIONS['train_reward'].keys() - of_reward - ELSEWHERE == OF_THE_POLICY
    assert OPTIONS['train_policy'].keys() - of_policy == set()


def another_value(field):
    if field.metadata.get('one_of'):
        return list(field.metadata['one_of'])[-1]
    types = hyperparams.members(field.type)
    for ty, word in ((bool, 'true'), (int, '1'), (float, '0.5')):
        if ty in types:
            return word
    return 'anything'


def test_what_nothing_reads_while_labels_are_collected_is_refused(read):
    _, used = read['labels while the policy trains']
    # The task is the policy's, so setting it here is setting it there.
    of_new = [name for name in OPTIONS['train_policy'] if name.startswith(f'{NEW}.')]
    unread = [name for name in of_new if name not in used | ELSEWHERE and '.task.' not in name]
    assert f'{NEW}.labels.num_train' in unread
    for name in unread:
        value = another_value(OPTIONS['train_policy'][name])
        words = f'train_policy test run {OF_NEW} {ONLINE} --dry_run --save_dir None'
        assert error_of(invoke(f'{words} --{name} {value}')).startswith(
            f'--{name} has no effect with --rewards.online; what counts is '
        )


def test_all_labels_may_be_asked_for_while_they_are_collected():
    """As the error says of a number from the experiment that batches do not divide."""
    words = f'train_policy mock_sentiment run --mpi 1 --dry_run --save_dir None {ONLINE}'
    words += f' --{NEW}.batch_size 5 --{NEW}.rollout_batch_size 5'
    assert error_of(invoke(words)).endswith('or None for all labels')
    succeed(f'{words} --{NEW}.labels.num_train None')


OF_THE_COMMAND = {
    'run.resume': 'true',
    'run.evaluate': 'true',
    'run.console': 'quiet',
    'run.allreduce': 'mpi',
    'run.rank_timeout': '60',
    'run.allreduce_timeout': '60',
    'run.stop_timeout': '60',
    'run.on_anomaly': 'stop',
}


@pytest.mark.parametrize('name', OF_THE_COMMAND)
def test_options_of_the_command_are_no_options_of_the_reward_model_in_it(name):
    words = f'train_policy test run --{NEW}.{name} {OF_THE_COMMAND[name]}'
    assert error_of(invoke(words)) == f'no such option: --{NEW}.{name} (did you mean --{name}?)'


@pytest.mark.parametrize(
    'words, message',
    [
        (
            'train_reward test run --run.evaluate on',
            'no such option: --run.evaluate, which is one of train_policy and resume',
        ),
        (
            'resume /somewhere --run.save_dir /q',
            'no such option: --run.save_dir, which is one of train_reward and train_policy',
        ),
        (
            'train_reward test run --labels.num_train 64 --labels.too_long cut',
            '--labels.too_long cut: --labels.source test holds no texts, but token ids',
        ),
    ],
)
def test_an_option_in_the_wrong_place_says_where_it_belongs(words, message):
    assert error_of(invoke(words)) == message


def test_the_directory_of_a_new_reward_model_is_not_its_own_and_the_command_says_so(monkeypatch):
    """The original took the option, and did not heed it either."""
    started = caught_jobs(monkeypatch)
    result = invoke(f'train_policy test run --{NEW}.run.save_dir /q')
    assert hparams_of(started).rewards.train_new_model.run.save_dir == '/q'
    assert result.stderr == (
        f'note: --{NEW}.run.save_dir has no effect: the reward model is kept with its policy\n'
    )
