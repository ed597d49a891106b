"""`benchmarks/figures`: its runs, each done once, its tables and its pictures."""

import copy
import csv
import dataclasses
import os
from pathlib import Path

import pytest
import worker_jobs
from experiments import resolved
from figures import draw, jobs, worker_pool

from lm_human_preferences import storage, train_policy
from lm_human_preferences.errors import UserError
from lm_human_preferences.evaluation import measure

TINY = jobs.Scale(labels=(64, 32), targets=(1.0, 2.0), curve=1.0, episodes=(512, 1024), seeds=2)


@pytest.fixture(scope='module')
def experiment():
    return resolved('train_policy', 'mock_sentiment')


def runs_of(scale, experiment):
    return {run: run.hparams(experiment) for run in jobs.runs_of(scale)}


@pytest.mark.parametrize('scale', [jobs.FULL, jobs.QUICK, TINY])
def test_plan(scale, experiment):
    runs = runs_of(scale, experiment)
    combinations = {(run.access, run.target, run.episodes, run.seed) for run in runs}
    count = (1 + len(scale.labels)) * len(scale.targets) * len(scale.episodes) * scale.seeds
    assert len(combinations) == len(runs) == count
    assert [run.episodes for run in runs] == sorted((run.episodes for run in runs), reverse=True)
    curves = [run for run in runs if run.points > 1]  # Figure 2's are among Figure 3's
    assert len(curves) == (1 + len(scale.labels)) * scale.seeds
    assert {(run.target, run.episodes) for run in curves} == {(scale.curve, max(scale.episodes))}


def test_jobs_are_done_once(tmp_path):
    marks = tmp_path / 'marks'
    marks.mkdir()
    (marks / 'broken-1').touch()
    jobs = {
        str(tmp_path / 'results' / name): (worker_jobs.write_number, number, str(marks))
        for number, name in enumerate('abc')
    }
    (tmp_path / 'results').mkdir()
    (tmp_path / 'results' / 'a').write_text('of an earlier run')
    done = []
    with worker_pool.pool(2) as pool:
        with pytest.raises(
            UserError,
            match=f'^1 of 3 runs failed, the first with {tmp_path}/results/b.log: 1 is brok',
        ):
            worker_pool.finish(pool, jobs, lambda: done.append(1))
        assert (len(done), (tmp_path / 'results' / 'c').read_text()) == (2, '2')
        log = (tmp_path / 'results' / 'b.log').read_text()
        assert log.startswith('number 1 False 1\n') and 'UserError: 1 is broken' in log
        (marks / 'broken-1').unlink()
        worker_pool.finish(pool, jobs, lambda: done.append(1))
        worker_pool.finish(pool, jobs, lambda: done.append(1))
    assert len(done) == 3
    assert [Path(path).read_text() for path in jobs] == ['of an earlier run', '1', '2']
    assert sorted(name[0] for name in os.listdir(marks)) == ['1', '1', '2']


def read_csv(path):
    with path.open(newline='') as file:
        return [
            {key: value if key == 'access' else float(value) for key, value in row.items()}
            for row in csv.DictReader(file)
        ]


@pytest.mark.slow
def test_end_to_end(tmp_path, monkeypatch, experiment, capsys):
    """Tables of real runs, whose numbers are those of the policy that train_policy saves under the
    same settings.

    Responses of two tokens, 2,500 in all, are measured in a fraction of the time.
    """
    short = copy.deepcopy(experiment)
    for task in (short.task, short.rewards.train_new_model.task):
        task.response_length = 2
    episodes = 512, 256
    scale = dataclasses.replace(TINY, labels=(64,), targets=(1.0,), episodes=episodes, seeds=1)
    monkeypatch.setattr(jobs, 'QUICK', scale)
    monkeypatch.setattr(jobs, 'POINTS', 2)
    draw.figures(short, str(tmp_path), quick=True, processes=1)
    for name in ('figure2.png', 'figure3.png'):
        assert (tmp_path / name).read_bytes().startswith(b'\x89PNG')
    rows = {(row['access'], row['episodes']): row for row in read_csv(tmp_path / 'figure3.csv')}
    assert set(rows) == {('direct', 512), ('direct', 256), ('64', 512), ('64', 256)}
    assert all(row['known_reward'] < row['optimal_reward'] for row in rows.values())

    run = next(run for run in jobs.runs_of(scale) if (run.access, run.episodes) == ('64', 256))
    hparams = run.hparams(short)
    (result,) = tmp_path.glob('runs/64-kl1-256-seed1-*.json')
    hparams.rewards.kl_coef = storage.read_json(str(result))['kl_coef']
    hparams.run.save_dir, hparams.run.evaluate = str(tmp_path / 'saved'), False
    train_policy.train(hparams)
    models = measure.load_models(hparams.run.save_dir, hparams)
    queries = measure.queries_of(hparams, models.policy.encoder, None)
    enumerated = measure.enumerate_all(models, queries)
    assert rows['64', 256]['kl'] == pytest.approx(enumerated.kl.mean().item(), rel=1e-6)
    assert rows['64', 256]['known_reward'] == pytest.approx(
        enumerated.scores['known reward'][1].mean().item(), rel=1e-6
    )
