"""`./launch.py figures --labels`: what is run, and what the shares are of."""

import csv
import json
import math

import pytest
import torch
from command_line import error_of, invoke
from experiments import resolved

from lm_human_preferences.evaluation import optimum
from lm_human_preferences.reproduction import jobs, label_figures
from lm_human_preferences.reproduction.label_figures import Run

# Two responses, as likely as each other, with rewards 0 and 1. The best policy at this KL chooses
# the second nine times in ten.
KL = 0.9 * math.log(1.8) + 0.1 * math.log(0.2)
TINY = label_figures.Scale(
    labels=((50, 0.1), (32, 0.0)), epochs=(1, 2), members=(1, 2), most_learned=64, seeds=2
)


@pytest.fixture
def known(monkeypatch):
    monkeypatch.setattr(label_figures, 'KLS', (KL,))
    scores = torch.tensor([[0.0, 1.0], [2.0, 4.0]]).double()
    return jobs.Known(torch.arange(2)[:, None], torch.full_like(scores, math.log(0.5)), scores)


def test_the_plan():
    """Seed by seed, and nothing that learns from more labels than the limit says."""
    assert label_figures.runs_of(TINY) == [
        Run(labels, error, epochs, seed)
        for seed in (1, 2)
        for labels, error, epochs in ((50, 0.1, 1), (32, 0.0, 1), (32, 0.0, 2))
    ]
    runs = set(label_figures.runs_of(label_figures.FULL))
    assert {Run(200, 0.1, 16, 10), Run(1024, 0.3, 16, 10), Run(4096, 0.0, 4, 1)} < runs
    assert len(runs) == len(label_figures.runs_of(label_figures.FULL))


def test_runs_are_of_the_experiment():
    experiment = resolved('train_policy', 'mock_sentiment').rewards.train_new_model
    found = Run(200, 0.1, 16, 3).hparams(experiment)
    assert (found.labels.num_train, found.labels.error, found.epochs) == (224, 0.1, 16)
    assert (found.run.seed, found.lr, found.batch_size) == (3, experiment.lr, 32)


def test_shares_by_hand(known):
    """The optimum for these rewards is right about the first query, and wrong about the second."""
    rewards = torch.tensor([[1.0, 2.0], [1.0, 0.0]])
    (row,) = label_figures.shares(rewards, known)
    assert row['kl'] == KL
    assert row['known_reward'] == pytest.approx((0.9 + 2.2) / 2, rel=1e-4)
    best = optimum.frontier_reward_at(KL, known.ref_logprobs, known.scores)
    assert row['share'] == pytest.approx((1.55 - 1.75) / (best - 1.75), rel=1e-4)
    (row,) = label_figures.shares(known.scores, known)
    assert row['share'] == pytest.approx(1)


def test_tables_and_picture_of_what_is_there(tmp_path, monkeypatch, capsys):
    """Nothing is trained that is there: a command that was killed goes on."""
    written = []

    def run_members(path, hparams, labels, members, task):
        share = labels / 100 + hparams.run.seed / 10
        of_kls = [{'kl': kl, 'known_reward': 1.0, 'share': share} for kl in (2.0, 4.0)]
        rows = [{'members': count, **row} for count in members for row in of_kls]
        with open(path, 'w') as file:
            json.dump(rows, file)

    def finish(processes, todo):
        for path, (function, *arguments) in todo.items():
            if path not in written:
                (tmp_path / 'labels1').mkdir(exist_ok=True)
                function(path, *arguments)
                written.append(path)

    monkeypatch.setattr(label_figures, 'KLS', (2.0, 4.0))
    monkeypatch.setattr(label_figures, 'QUICK', TINY)
    monkeypatch.setattr(label_figures, 'run_members', run_members)
    monkeypatch.setattr(jobs, 'finish', finish)
    experiment = resolved('train_policy', 'mock_sentiment')
    label_figures.figures(experiment, str(tmp_path), quick=True)
    label_figures.figures(experiment, str(tmp_path), quick=True, seeds=1)
    assert len(written) == 6  # the same files again
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == '| labels | error | epochs | members | KL 2 | KL 4 |'
    half = 12.706 * 0.05
    shown = f'0.47 ± {half:.2f} (0.42)'
    assert f'| 32 | 0 | 2 | 1 | {shown} | {shown} |' in lines
    table = (tmp_path / 'labels.md').read_text().splitlines()
    assert '| 32 | 0 | 2 | 1 | 0.42 (0.42) | 0.42 (0.42) |' in table
    rows = list(csv.DictReader((tmp_path / 'labels.csv').open()))
    assert len(rows) == 3 * 2 * 2 and rows[-1]['labels'] == '50'
    assert (tmp_path / 'labels.png').read_bytes().startswith(b'\x89PNG')


# Student's t, for an interval of 95 %
@pytest.mark.parametrize(
    'seeds, student',
    [(2, 12.706), (4, 3.182), (6, 2.571), (8, 2.365), (10, 2.262), (12, 2.262)],
)
def test_an_interval_of_several_seeds(seeds, student):
    values = [0.7, 0.9] * (seeds // 2)
    half = student * math.sqrt(0.1 * 0.1 * seeds / (seeds - 1)) / math.sqrt(seeds)
    assert label_figures.interval(values) == f'0.80 ± {half:.2f}'


def test_an_interval_of_three_seeds():
    half = 4.303 * 0.1 / math.sqrt(3)
    assert label_figures.interval([0.7, 0.8, 0.9]) == f'0.80 ± {half:.2f}'


def test_one_set_of_figures_at_a_time():
    told = error_of(invoke('figures /f --online --labels'))
    assert told.startswith('--online and --labels: give one of them at a time')


def test_an_interval_of_95_percent_holds_95_percent_of_students_distribution():
    for freedom, limit in enumerate(label_figures.STUDENT, start=1):
        x = torch.linspace(-limit, limit, 100_001, dtype=torch.float64)
        scale = math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2)
        density = (
            scale / math.sqrt(freedom * math.pi) * (1 + x**2 / freedom) ** (-(freedom + 1) / 2)
        )
        assert torch.trapezoid(density, x).item() == pytest.approx(0.95, abs=1e-4)
