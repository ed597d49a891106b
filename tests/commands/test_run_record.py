"""SAVE_DIR/run.json: which commands have worked on a run, how they ended, and who may write it."""

import sys
import threading

import pytest
from command_line import invoke

import lm_human_preferences
from lm_human_preferences import train_policy
from lm_human_preferences.runs import run_record
from lm_human_preferences.runs.run_files import COMMANDS

TRAIN = 'train_policy test run --mpi 1 --ppo.total_episodes 128 --ppo.batch_size 64'
TRAIN += ' --rewards.train_new_model off --rewards.trained_model test --run.evaluate off'


@pytest.fixture
def train(monkeypatch, tmp_path):
    def run(words, script='launch.py'):
        number = len(run_record.commands(run_record.read(str(tmp_path / 'run'))))
        monkeypatch.setattr(run_record, '_THIS_PROCESS', f'process {number}')
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
    found = run_record.commands(run_record.read(str(tmp_path / 'run')))
    assert [(command['command'], command['how']) for command in found] == [
        (f'./launch.py {trained}', 'finished'),
        (f'./launch.py evaluate {tmp_path}/run --queries 2 --samples 64', 'finished'),
        (f'./launch.py {resumed}', 'interrupted'),
    ]
    first = found[0]
    assert first['ranks'] == first['threads'] == 1 and first['gpu'] is None
    assert first['lm-human-preferences'] == lm_human_preferences.__version__
    assert first['began'] <= first['ended'] and first['seconds'] > 0
    assert train(f'{trained} --overwrite').exit_code == 0
    assert len(run_record.commands(run_record.read(str(tmp_path / 'run')))) == 1


def test_nothing_is_left_of_what_did_not_begin(train, tmp_path):
    mistaken = f'{TRAIN} --save_dir {tmp_path} --task.policy.initial_model {tmp_path}/nothing'
    assert train(mistaken).exit_code == 2
    assert train(f'{TRAIN} --save_dir {tmp_path} --dry_run').exit_code == 0
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_was_killed_has_no_end(tmp_path, monkeypatch):
    directory = str(tmp_path)
    run_record.begin(directory, 'train_reward', {'ranks': 3}, {'reward_model': 1})
    run_record.begin(directory, 'train_reward', {'ranks': 3}, {'reward_model_1': 2})
    monkeypatch.setattr(run_record, '_THIS_PROCESS', 'another')
    [killed] = run_record.commands(run_record.read(directory))
    assert killed['ranks'] == 3 and 'ended' not in killed
    assert killed['seeds'] == {'reward_model': 1, 'reward_model_1': 2}
    with run_record.ended(directory, 'train_reward'):
        pass  # this process has begun nothing
    assert run_record.commands(run_record.read(directory)) == [killed]


def test_trainings_that_share_a_directory_keep_what_is_known_of_each(tmp_path):
    directory = str(tmp_path)
    for command in COMMANDS:
        run_record.write_trainings(directory, {command: {'ranks': 1}}, resume=False)
        run_record.begin(directory, command, {})
        run_record.write_labels(directory, command, {'found': 1})
        with run_record.ended(directory, command):
            pass
    run_record.write_trainings(directory, {'train_policy': {'ranks': 2}}, resume=True)
    assert [len(entry) for entry in run_record.read(directory).values()] == [3, 3]
    run_record.write_trainings(directory, {'train_policy': {'ranks': 3}}, resume=False)
    record = run_record.read(directory)
    assert record['train_policy'] == {'ranks': 3} and len(record['train_reward']) == 3
    assert run_record.training(directory, 'train_policy')['commands'] == []


def test_no_writer_loses_what_another_one_wrote(tmp_path):
    """An evaluation may begin while a training ends."""

    def write(number):
        for _ in range(20):
            run_record.write_labels(str(tmp_path), f'{number}', {'found': number})

    threads = [threading.Thread(target=write, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(run_record.read(str(tmp_path))) == ['0', '1', '2', '3']
