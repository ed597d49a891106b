"""SAVE_DIR/train_*_commands.jsonl: which commands have worked on a run, and how they ended."""

import sys

import pytest
from command_line import invoke

import lm_human_preferences
from lm_human_preferences import train_policy
from lm_human_preferences.runs import command_record
from lm_human_preferences.runs.run_files import REWARD

TRAIN = 'train_policy test run --mpi 1 --ppo.total_episodes 128 --ppo.batch_size 64'
TRAIN += ' --rewards.train_new_model off --rewards.trained_model test --run.evaluate off'


@pytest.fixture
def train(monkeypatch, tmp_path):
    def run(words, script='launch.py'):
        number = len(command_record.read(str(tmp_path / 'run')))
        monkeypatch.setattr(command_record, '_THIS_PROCESS', f'process {number}')
        monkeypatch.setattr(sys, 'argv', [f'/somewhere/{script}', *words.split()])
        return invoke(words)

    return run


def test_a_run_is_trained_evaluated_and_resumed(train, tmp_path, monkeypatch):
    trained = f'{TRAIN} --save_dir {tmp_path}'
    assert train(trained).exit_code == 0
    assert train(f'evaluate {tmp_path}/run --queries 2 --samples 64').exit_code == 0

    def interrupted(trainer):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(train_policy.PPOTrainer, 'step', interrupted)
        resumed = f'resume {tmp_path}/run --ppo.total_episodes 256'
        assert train(resumed).exit_code == 130
    found = command_record.read(str(tmp_path / 'run'))
    assert [(command['command'], command['how']) for command in found] == [
        (f'./launch.py {trained}', 'finished'),
        (f'./launch.py evaluate {tmp_path}/run --queries 2 --samples 64', 'finished'),
        (f'./launch.py {resumed}', 'interrupted'),
    ]
    first = found[0]
    assert first['ranks'] == first['threads'] == 1 and first['gpu'] is None
    assert first['lm-human-preferences'] == lm_human_preferences.__version__
    assert first['began'] <= first['ended'] and first['peak_gigabytes'] > 0.1
    assert first['processor_seconds'] > 0 < first['seconds']
    # With the run it is deleted.
    assert train(f'{trained} --overwrite').exit_code == 0
    assert len(command_record.read(str(tmp_path / 'run'))) == 1


def test_nothing_is_left_of_what_did_not_begin(train, tmp_path):
    mistaken = f'{TRAIN} --save_dir {tmp_path} --task.policy.initial_model {tmp_path}/nothing'
    assert train(mistaken).exit_code == 2
    assert train(f'{TRAIN} --save_dir {tmp_path} --dry_run').exit_code == 0
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_was_killed_has_no_end(tmp_path):
    directory = str(tmp_path)
    command_record.begin(directory, REWARD, {'ranks': 3})
    path = tmp_path / 'train_reward_commands.jsonl'
    path.write_text(path.read_text().replace('"id": "', '"id": "other') + '{"id": "other')
    [killed] = command_record.read(directory)
    assert killed['ranks'] == 3 and 'ended' not in killed
    with command_record.ended(directory, REWARD):
        pass  # this process has begun nothing
    assert command_record.read(directory) == [killed]


@pytest.mark.parametrize(
    'word, told',
    [
        ('--labels.source=https://a.b/c.json?sig=SECRET', '--labels.source=https://a.b/c.json'),
        ('https://anna:SECRET@a.b/c', 'https://a.b/c'),
        ('az://account/container/run', 'az://account/container/run'),
        ('what is this?', "'what is this?'"),
    ],
)
def test_no_key_of_a_url_is_kept(word, told):
    assert command_record.typed(['/x/sample.py', word]) == f'./sample.py {told}'
