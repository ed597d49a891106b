"""Size of an evaluation by sampling, by the time of a first batch."""

import types

import pytest
import torch

from lm_human_preferences.evaluation import evaluate, measure
from lm_human_preferences.hparams.command_options import EvaluationHParams as HParams


@pytest.mark.parametrize(
    'samples, can_cut, affordable_samples, expected',
    [
        (None, True, 64 * 500, (64, 500)),
        (None, True, 2700, (42, 64)),  # fewer samples would not do
        (None, True, 1, (2, 64)),
        (None, False, 2700, (64, 64)),  # the user wants 64 queries
        (500, True, 2700, (5, 500)),
    ],
)
def test_sizes(samples, can_cut, affordable_samples, expected):
    assert evaluate.affordable_sizes(64, samples, affordable_samples, can_cut) == expected


@pytest.fixture
def slow(monkeypatch):
    """Sampling that takes .22 s a sample, by a clock of its own."""
    clock = [0.0]

    def sample_many(models, queries, samples, batch_size, bar):
        clock[0] += 0.22 * len(queries) * samples
        torch.rand(9)

    monkeypatch.setattr(measure, 'sample_many', sample_many)
    monkeypatch.setattr(evaluate, 'time', types.SimpleNamespace(monotonic=lambda: clock[0]))


def fitted(**settings):
    queries = torch.arange(64).unsqueeze(1)
    return evaluate.fitted(None, queries, HParams(**settings))


def test_by_default_an_evaluation_fits_into_ten_minutes_and_says_how_long_it_takes(slow, capsys):
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    queries, settings = fitted()
    assert torch.equal(torch.rand(1), expected)  # of the samples that follow
    assert (len(queries), settings.samples) == (42, 64) and len(queries.unique()) == 42
    told = 'from 64 samples of both models to each of 42 queries, in about 09:51; --samples and'
    assert told in capsys.readouterr().out
    queries, settings = fitted(queries=64, samples=64)  # what is given stays
    assert (len(queries), settings.samples) == (64, 64)
    assert 'to each of 64 queries, in about 15:01;' in capsys.readouterr().out
