"""Size of an evaluation by sampling, by the time of a first batch."""

import types

import pytest
import torch

from lm_human_preferences.evaluation import evaluate, measure
from lm_human_preferences.hparams.command_options import EvaluationHParams as HParams


@pytest.mark.parametrize(
    'samples, can_cut, affordable_samples, expected',
    [
        (None, True, 10**9, (64, 1024)),
        (None, True, 64 * 500, (64, 500)),
        (None, True, 2700, (42, 64)),  # fewer samples would not do
        (None, True, 1, (2, 64)),
        (None, False, 2700, (64, 64)),  # the user wants 64 queries
        (500, True, 2700, (5, 500)),
        (500, False, 2700, (64, 500)),
    ],
)
def test_sizes(samples, can_cut, affordable_samples, expected):
    assert evaluate.affordable_sizes(64, samples, affordable_samples, can_cut) == expected


@pytest.fixture
def slow(monkeypatch):
    """Sampling that takes .22 s a sample, by a clock of its own; rewards of deviation 1."""
    clock = [0.0]

    def sample_many(models, queries, samples, batch_size, bar):
        clock[0] += 0.22 * len(queries) * samples
        torch.rand(9)
        scores = torch.tensor([-1.0, 1.0]).repeat(len(queries) // 2)[:, None]
        scores /= scores.std()
        return measure.Responses(None, None, {'reward model': scores})

    monkeypatch.setattr(measure, 'sample_many', sample_many)
    monkeypatch.setattr(evaluate, 'time', types.SimpleNamespace(monotonic=lambda: clock[0]))


def fitted(**settings):
    queries = torch.arange(64).unsqueeze(1)
    return evaluate.fitted(None, queries, HParams(**settings))


def test_by_default_an_evaluation_fits_into_ten_minutes_and_says_what_more_would_cost(slow, capsys):
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    queries, settings = fitted()
    assert torch.equal(torch.rand(1), expected)  # of the samples that follow
    assert (len(queries), settings.samples) == (42, 64) and len(queries.unique()) == 42
    assert capsys.readouterr().out.splitlines() == [
        'A sample of both models takes 0.22 s: 42 queries with 64 samples each, in about 09:51,'
        ' give mean rewards within about ± 0.3 (95 %)',
        '--queries 64 --samples 1024 would take 4:00:17, within about ± 0.24',
    ]


def test_what_is_given_stays(slow, capsys):
    queries, settings = fitted(queries=64, samples=64)
    assert (len(queries), settings.samples) == (64, 64)
    told = '0.22 s: 64 queries with 64 samples each, in about 15:01, give mean rewards within about'
    assert told in capsys.readouterr().out  # before it begins
