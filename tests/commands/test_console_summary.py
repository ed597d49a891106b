"""Console of a training: --run.console summary, the time left, the end."""

import re
import sys
from types import SimpleNamespace

import pytest
from command_line import succeed
from experiments import resolved

from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.trainers.additions import console, tracked_samples
from lm_human_preferences.training import loop
from lm_human_preferences.utils import logging

NEW = '--rewards.train_new_model'
# 5 steps after 8.
SMALL = f'--ppo.total_episodes 320 {NEW}.labels.num_train 256 {NEW}.normalize_samples 16'


def test_summary(tmp_path):
    result = succeed(
        f'train_policy test first --mpi 1 --save_dir {tmp_path} {SMALL} --run.log_interval 2 '
        f'{NEW}.run.log_interval 4'
    )
    shown = result.stdout
    lines = shown.splitlines()
    assert lines[0] == f'train_policy: 1 rank on a CPU, fp32, saving to {tmp_path}/first'
    assert re.search(r'^  ppo: .*total_episodes=320', shown, re.M) and 'hparams:' not in shown
    reward_heads, policy_heads = [line.split() for line in lines if line.startswith('     step')]
    assert reward_heads == ['step', 'labels', 'loss', 'labels/s', 'time', 'left']
    assert policy_heads == 'step episodes score KL KL coef loss episodes/s time left'.split()
    rows = re.findall(r'^ +(\d+/[58]) +(\d+) ', shown, re.M)
    assert rows[:3] == [('1/8', '32'), ('4/8', '128'), ('8/8', '256')]
    assert rows[3:] == [('1/5', '64'), ('2/5', '128'), ('4/5', '256'), ('5/5', '320')]
    assert 'phases: reward model, then policy\n' in shown
    assert len(re.findall(r'^ +(?:5/5|8/8) .* 00:00$', shown, re.M)) == 2
    assert shown.count('(score ') == 4  # two samples before the first step and after the last
    assert max(map(len, lines)) <= 100 + len(str(tmp_path))
    assert lines[-4] == f'The policy is in {tmp_path}/first/policy'
    next_commands = [line.partition(': ')[2].split() for line in lines[-3:]]
    assert [words[:2] for words in next_commands] == [
        ['./sample.py', 'sample'],
        ['./launch.py', 'evaluate'],
        ['./launch.py', 'report'],
    ]
    assert all(f'{tmp_path}/first' in ' '.join(words) for words in next_commands)


def test_a_policy_has_the_task_of_its_reward_model_and_paths_are_quoted(tmp_path):
    folder = tmp_path / 'a b'
    words = 'train_reward test first --mpi=1 --labels.num_train=64'.split()
    result = succeed([*words, f'--save_dir={folder}', '--task.query_suffix= '])
    assert result.stdout.splitlines()[-1].endswith(
        "./launch.py train_policy test first --task.query_suffix ' '"
        f" --rewards.train_new_model off --rewards.trained_model '{folder}/first'"
    )


@pytest.mark.parametrize('columns', ['1', '80'])
def test_settings_at_the_width_of_a_terminal(columns, capsys, monkeypatch):
    monkeypatch.setenv('COLUMNS', columns)
    monkeypatch.setattr(logging, '_console', 'summary')
    changes = {'rewards.adaptive_kl': 'on'}
    console.show_settings(resolved('train_policy', 'descriptiveness', changes))
    shown = capsys.readouterr().out
    assert "query_dataset='books'" in shown and shown.count('query_length=') == 1
    assert '  rewards.train_new_model.labels: ' in shown and 'num_train=4992' in shown
    assert "adaptive_kl='on'" in shown


@pytest.mark.parametrize('is_terminal', [False, True])
def test_a_progress_bar_is_for_a_terminal(is_terminal, capsys, monkeypatch):
    """In a file it would stand between the lines of the table."""
    monkeypatch.setattr(sys.stderr, 'isatty', lambda: is_terminal)
    monkeypatch.setattr(logging, '_console', 'summary')
    for _ in logging.progress(range(3), comm=Comm(), desc='policy'):
        logging.announce('a line of the table')
    captured = capsys.readouterr()
    assert ('policy' in captured.err) == is_terminal
    assert captured.out.count('a line of the table') == 3


def trainer_of(**more):
    logger = SimpleNamespace(is_due=lambda step: True, log_interval=2)
    return SimpleNamespace(comm=Comm(), logger=logger, **more)


def test_a_line_of_a_table_has_its_speed_and_the_time_left(capsys, monkeypatch):
    """After an interruption: 128 episodes in 8 seconds, and 256 are left."""
    logging.configure_console('summary')
    now = [100.0]
    monkeypatch.setattr(loop, 'time', SimpleNamespace(monotonic=lambda: now[0]))
    trainer = trainer_of(total_steps=4, steps_done=1)
    columns = {'score': ('score', '.2f'), 'KL': ('kl', 'z.2f')}
    table = loop.Progress(trainer, 'policy', 'episodes', lambda steps: 128 * steps, columns)
    now[0] += 8
    table.after_step(2, {'score': 0.5, 'kl': -0.001})
    row = capsys.readouterr().out.splitlines()[-1].split()
    assert row == ['2/4', '256', '0.50', '0.00', '16', '00:16']


@pytest.mark.parametrize('words', ['train_policy test x --dry_run', 'train_reward test x'])
def test_what_is_made_of_a_file_of_queries_is_told_once(tmp_path, words):
    (tmp_path / 'x.jsonl').write_text('"abc"\n"a.b"\n')
    (tmp_path / 'x.test.jsonl').write_text('"x.z"\n')
    if 'train_reward' in words:
        words += f' --labels.num_train 32 --save_dir {tmp_path}/reward'
    given = f'--mpi 1 --task.query_dataset {tmp_path}/x.jsonl --task.start_text .'
    lines = succeed(f'{words} {given}').output.splitlines()
    (first,) = [number for number, line in enumerate(lines) if 'Queries are from' in line]
    assert 'x.jsonl' in lines[first] and '1 of 2 texts' in lines[first]
    cut = '  cut by --task.start_text, --task.end_text or --task.query_length: 1'
    assert lines[first + 1] == cut and lines[first + 2].endswith(': 1')


def test_rank_0_tells_the_speed_as_the_original_did(capsys):
    """Its samples are those of recorded/test_replay.py."""
    logging.configure_console('original')
    trainer = trainer_of(rollout=[], step_seconds=4.0, ppo=SimpleNamespace(batch_size=2))
    trainer.logger.is_due = bool  # of every step but the first
    for trainer.comm.rank in (0, 1):
        tracked_samples.OriginalSamples(trainer, None).after_step(1, {})
    assert capsys.readouterr().out == '[ppo_step 0] step_time=4.00s, eps/s=0.50\n'
