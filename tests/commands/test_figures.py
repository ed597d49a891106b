"""`benchmarks/figures`: its runs, its tables and its pictures."""

import csv

import pytest
from experiments import resolved
from figures import draw, jobs

from lm_human_preferences import storage, train_policy
from lm_human_preferences.evaluation import measure, optimum
from lm_human_preferences.reward_sources.sources import source_of


def read_csv(path):
    with path.open(newline='') as file:
        return [
            {key: value if key == 'access' else float(value) for key, value in row.items()}
            for row in csv.DictReader(file)
        ]


@pytest.mark.slow
def test_end_to_end(tmp_path, monkeypatch):
    """The numbers are those of the policy that train_policy saves under the same settings."""
    short = resolved('train_policy', 'mock_sentiment')
    for task in (short.task, short.rewards.train_new_model.task):
        task.response_length = 2
    episodes = (256,)
    scale = jobs.Scale(labels=(64,), targets=(1.0,), curve=1.0, episodes=episodes, seeds=1)
    monkeypatch.setattr(jobs, 'QUICK', scale)
    monkeypatch.setattr(jobs, 'POINTS', 2)
    draw.figures(short, str(tmp_path), quick=True, processes=1)
    for name in ('figure2.png', 'figure3.png'):
        assert (tmp_path / name).read_bytes().startswith(b'\x89PNG')
    rows = {(row['access'], row['episodes']): row for row in read_csv(tmp_path / 'figure3.csv')}
    assert set(rows) == {('direct', 256), ('64', 256)}
    assert all(row['known_reward'] < row['optimal_reward'] for row in rows.values())

    run = next(run for run in jobs.runs_of(scale) if (run.access, run.episodes) == ('64', 256))
    hparams = run.hparams(short)
    (result,) = tmp_path.glob('runs/64-kl1-256-seed1-*.json')
    hparams.rewards.kl_coef = storage.read_json(str(result))['kl_coef']
    hparams.run.save_dir, hparams.run.evaluate = str(tmp_path / 'saved'), False
    train_policy.train(hparams)
    source = source_of(hparams)
    models = measure.load_models(hparams.run.save_dir, source)
    queries = measure.queries_of(source, models.policy.encoder, None)
    enumerated = measure.enumerate_all(models, queries)
    kl = optimum.kl(enumerated.logprobs, enumerated.ref_logprobs).mean().item()
    known = enumerated.scores['known reward']
    reward = optimum.expected(enumerated.logprobs, known).mean().item()
    assert rows['64', 256]['kl'] == pytest.approx(kl, rel=1e-6)
    assert rows['64', 256]['known_reward'] == pytest.approx(reward, rel=1e-6)
