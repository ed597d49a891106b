"""Console of a training: --run.console summary and quiet, the time left, the end."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch
from command_line import invoke, succeed
from experiments import resolved
from trainers import rollout_of

from lm_human_preferences.distributed.comm import LocalComm
from lm_human_preferences.trainers import hooks
from lm_human_preferences.training import console, time_left
from lm_human_preferences.training.time_left import TimeLeft
from lm_human_preferences.utils import logging

NEW = '--rewards.train_new_model'
# 5 steps after 8.
SMALL = f'--ppo.total_episodes 320 {NEW}.labels.num_train 256 {NEW}.normalize_samples 16'


def test_summary(tmp_path):
    result = succeed(
        f'train_policy test first --mpi 1 --save_dir {tmp_path} {SMALL} --run.log_interval 2 '
        f'{NEW}.run.log_interval 4'
    )
    lines = result.stdout.splitlines()
    assert lines[0] == f'train_policy: 1 rank on a CPU, fp32, saving to {tmp_path}/first'
    assert result.stdout.count('settings:') == 1
    assert any(re.match(r'  ppo: .*total_episodes=320', line) for line in lines)
    others = (
        r'  \d+ others have their defaults; train_policy_hparams.json and'
        r' train_policy_more_hparams.json there hold them all'
    )
    assert any(re.match(others, line) for line in lines)
    reward_heads, policy_heads = [line.split() for line in lines if line.startswith('       step')]
    assert reward_heads == ['step', 'labels', 'loss', 'labels/s', 'time', 'left']
    assert policy_heads == 'step episodes score KL KL coef loss episodes/s time left'.split()
    rows = re.findall(r'^ +(\d+)/8 +(\d+) ', result.stdout, re.M)
    assert rows == [('1', '32'), ('4', '128'), ('8', '256')]
    rows = re.findall(r'^ +(\d+)/5 +(\d+) ', result.stdout, re.M)
    assert rows == [('1', '64'), ('2', '128'), ('4', '256'), ('5', '320')]
    assert re.search(r'^ +5/5 .* 0:00$', result.stdout, re.M)
    assert result.stdout.count('(score ') == 4  # two samples of the first step and of the last
    assert max(map(len, lines)) <= 100 + len(str(tmp_path))
    assert not re.search('missing|k = |hparams:', result.stdout)
    assert lines[-5:] == [
        f'The policy is in {tmp_path}/first/policy',
        f'  sample from it:     ./sample.py sample --save_dir {tmp_path}/first --nsamples 8',
        f'  evaluate it:        ./launch.py evaluate {tmp_path}/first',
        f'  look at its curves: tensorboard --logdir {tmp_path}/first/tb',
        f'  write a report:     ./launch.py report {tmp_path}/first',
    ]


def test_rows_fit_a_terminal(capsys):
    for has_spread in (False, True):
        console.policy_table(has_spread=has_spread).add(
            step='62500/62500',
            episodes=2_000_000,
            score=-12.34,
            spread=12.34,
            KL=123.45,
            KL_coef=0.012345678,
            loss=-12.3456,
            episodes_per_second=12345.6,
            time_left='123:45:59',
        )
    console.reward_table().add(
        step='2875/2875', labels=46_000, loss=1.2345, labels_per_second=1234.5, time_left='1:45:59'
    )
    assert max(map(len, capsys.readouterr().out.splitlines())) < 80


def test_a_policy_has_the_task_of_its_reward_model_and_paths_are_quoted(tmp_path):
    folder = tmp_path / 'a b'
    words = 'train_reward test first --mpi=1 --labels.num_train=64'.split()
    result = succeed([*words, f'--save_dir={folder}', '--task.query_suffix= '])
    assert result.stdout.splitlines()[-2].endswith(
        "./launch.py train_policy test first --task.query_suffix ' '"
        f" --rewards.train_new_model off --rewards.trained_model '{folder}/first'"
    )


def test_quiet(tmp_path):
    words = f'train_policy test first {SMALL} --mpi 1 --save_dir {tmp_path} --run.console quiet'
    result = succeed(words)
    lines = result.stdout.strip().splitlines()
    assert lines[0] == f'The policy is in {tmp_path}/first/policy'
    assert all(line.startswith('  ') for line in lines[1:])
    assert 'reward model:' not in result.stderr  # no progress bar either


@pytest.mark.parametrize('columns', ['1', '2', '0', '80'])
def test_the_width_of_a_terminal(columns, capsys, monkeypatch):
    monkeypatch.setenv('COLUMNS', columns)
    monkeypatch.setattr(logging, '_console', 'summary')
    console.show_settings(resolved('train_policy', 'test'), record=None)
    assert 'total_episodes=6400' in capsys.readouterr().out


@pytest.mark.parametrize('is_terminal', [False, True])
def test_a_progress_bar_is_for_a_terminal(is_terminal, capsys, monkeypatch):
    """In a file it would stand between the lines of the table."""
    monkeypatch.setattr(sys.stderr, 'isatty', lambda: is_terminal)
    monkeypatch.setattr(logging, '_console', 'summary')
    for _ in logging.progress(range(3), comm=LocalComm(), desc='policy'):
        logging.announce('a line of the table')
    captured = capsys.readouterr()
    assert ('policy' in captured.err) == is_terminal
    assert captured.out.count('a line of the table') == 3


def test_the_seed_of_the_reward_model_is_its_own(tmp_path):
    note = (
        'note: --run.seed is the seed of the policy only; that of the reward model stays 1 unless '
        f'{NEW}.run.seed is given'
    )
    assert note in invoke('train_policy test first --dry_run --run.seed 5').stderr
    for words in (
        '',
        f'--run.seed 5 {NEW}.run.seed 5',
        f'--run.seed 5 {NEW} off --rewards.trained_model test',
    ):
        assert 'note: --run.seed' not in invoke(f'train_policy test first --dry_run {words}').stderr


def test_settings(capsys):
    console.show_settings(resolved('train_policy', 'descriptiveness'), None)
    shown = capsys.readouterr().out
    assert "  task: query_length=64  query_dataset='books'" in shown
    assert shown.count('query_length=') == 1
    assert '  rewards.train_new_model: ' in shown and 'labels.num_train=4992' in shown
    assert re.search(r'^  \d+ others have their defaults; --dry_run prints them all$', shown, re.M)


def test_time_left():
    """The speed of the present phase, 2 units a second, tells how long the later ones take."""
    now = [100.0]
    clock = TimeLeft({'reward model': 20, 'policy': 60, 'evaluation': 10}, clock=lambda: now[0])
    clock.begin('reward model')
    assert clock.seconds(0.0) is None
    now[0] += 5
    assert clock.seconds(0.5) == pytest.approx(5 + 30 + 5)
    assert clock.per_second(0.5, 4000) == pytest.approx(400)
    clock.begin('policy', share=0.25)  # it goes on after an interruption
    now[0] += 10
    assert clock.seconds(0.5) == pytest.approx((30 + 10) / 1.5)
    assert clock.per_second(0.5, 1000) == pytest.approx(25)


def test_a_line_of_the_policy_has_its_speed(capsys):
    """After an interruption: 128 episodes in 8 seconds, and 256 are left."""
    logging.configure_console('summary')
    now = [100.0]
    clock = TimeLeft({'policy': 4}, clock=lambda: now[0])
    clock.begin('policy', share=0.25)
    hparams = resolved('train_policy', 'test')
    hparams.ppo.batch_size, hparams.run.log_interval = 128, 2
    trainer = SimpleNamespace(hparams=hparams, comm=LocalComm(), total_steps=4)
    trainer.episodes_done, trainer.total_episodes, trainer.share_done = 256, 512, 0.5
    table = hooks.PolicyTable(trainer, clock)
    now[0] += 8
    names = 'objective/score', 'objective/kl', 'objective/kl_coef', 'ppo/loss/total'
    table.after_step(2, dict.fromkeys(names, 0.5))
    row = capsys.readouterr().out.splitlines()[-1].split()
    assert row[:2] == ['2/4', '256'] and row[-2:] == ['16', '0:16']


def test_pauses_are_no_part_of_the_time_left(monkeypatch):
    monkeypatch.setattr(sys.stderr, 'isatty', lambda: True)
    now = [100.0]
    clock = TimeLeft({'policy': 60}, clock=lambda: now[0])
    clock.begin('policy')
    trainer = SimpleNamespace(total_steps=10, steps_done=0, comm=LocalComm())
    settings = dict(name='policy', unit='episode', per_step=4, shown={})
    with hooks.ProgressBar(trainer, clock, **settings) as bar:
        started = bar.bar.start_t
        now[0] += 5
        with clock.pause():
            now[0] += 3600
        for _ in range(2):
            bar.before_step(0)
        now[0] += 1
        assert bar.bar.start_t == pytest.approx(started + 3600)
    assert clock.seconds(0.5) == pytest.approx(6)
    assert clock.per_second(0.5, 1200) == pytest.approx(100)


@pytest.mark.parametrize(
    'seconds, text',
    [
        (None, '?'),
        (0, '0:00'),
        (6.6, '0:07'),
        (59.7, '1:00'),
        (754, '12:34'),
        (3599.9, '1:00:00'),
        (11109, '3:05:09'),
    ],
)
def test_durations(seconds, text):
    assert time_left.as_text(seconds) == text


def test_what_is_made_of_a_file_of_queries_is_told_once(tmp_path):
    (tmp_path / 'x.jsonl').write_text('"abc"\n"a.b"\n')
    (tmp_path / 'x.test.jsonl').write_text('"x.z"\n')
    words = f'--mpi 1 --task.query_dataset {tmp_path}/x.jsonl --task.start_text .'
    told = [
        f'Queries are from all of {tmp_path}/x.jsonl, the training part: 1 of 2 texts are used',
        "  cut up to their first --task.start_text '.': 1",
        "  left out, without --task.start_text '.': 1",
    ]
    for command, more in (
        ('train_policy', '--dry_run'),
        ('train_reward', f'--labels.num_train 32 --save_dir {tmp_path}/reward'),
    ):
        result = succeed(f'{command} test x {words} {more}')
        lines = result.output.splitlines()
        begin = lines.index(told[0])
        assert lines[begin : begin + 3] == told
        assert result.output.count('Queries are from') == 1


def test_samples_are_shown_with_the_kl_of_each(monkeypatch):
    shown = []
    monkeypatch.setattr(console, 'show_samples', lambda _, values, **more: shown.append(values))
    logprobs = torch.tensor([[-1.0, -2.0], [-3.0, -0.5]])
    rollout = rollout_of(
        queries=torch.zeros(2, 3),
        responses=torch.zeros(2, 2),
        logprobs=logprobs,
        values=logprobs,
        ref_logprobs=torch.tensor([[-1.5, -2.25], [-3.0, -0.25]]),
    )
    trainer = SimpleNamespace(
        rollout=rollout,
        comm=LocalComm(),
        total_steps=2,
        logger=SimpleNamespace(is_due=lambda step: True),
        step_seconds=1.0,
        hparams=resolved('train_policy', 'test'),
    )
    hooks.Samples(trainer, None).after_step(1, {'objective/kl_coef': 0.1})
    assert shown[0][3].tolist() == [0.75, -0.25]
    trainer.comm = SimpleNamespace(rank=1)  # which shows nothing
    hooks.Samples(trainer, None).after_step(1, {'objective/kl_coef': 0.1})
    assert len(shown) == 1


@pytest.mark.parametrize(
    'console_name, line',
    [('summary', '  ab | cd [2 tokens cut]   (score 1.00, KL 0.50)'), ('original', 'cd')],
)
def test_a_response_that_was_cut_has_a_mark(capsys, console_name, line):
    logging.configure_console(console_name)
    tokens = torch.tensor([[0, 1, 2, 3]]).split(2, dim=1)
    values = [torch.tensor([number]) for number in (1.0, 0.5, 2)]
    console.show_samples(
        SimpleNamespace(decode=lambda ids: ''.join('abcd'[each] for each in ids)),
        (*tokens, *values),
        step=0,
        total_steps=1,
        is_logged=True,
        kl_coef=0.1,
    )
    assert line in capsys.readouterr().out.splitlines()
