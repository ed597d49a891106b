"""First fifth of two seeds' learning curves: their means agree with the original's (curves/)."""

import contextlib
import io
from unittest import mock

import numpy as np
import pytest
from compare import assert_close
from golden_data import load_json, load_npz, require

from lm_human_preferences import train_policy

SEEDS = (1, 2)
UPDATES = 30  # of 150
STANDARD_ERRORS = 4
SHARE = 0.97  # of the updates of each tag
LEARNED = 2  # standard deviations over seeds by which the score must have risen


class EnoughUpdates(Exception):
    pass


def one_seed(seed):
    overrides, steps = load_json('curves', 'overrides.json'), []
    for name in ('task.policy.initial_model', 'rewards.trained_model'):
        overrides[name] = str(require('curves', overrides[name]))
    hparams = train_policy.HParams()
    hparams.override_from_dict({**overrides, 'run.seed': seed})

    class Recording(train_policy.PPOTrainer):
        def step(self):
            if len(steps) == UPDATES:
                raise EnoughUpdates
            steps.append(super().step())
            return steps[-1]

    with (
        mock.patch.object(train_policy, 'PPOTrainer', Recording),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.suppress(EnoughUpdates),
    ):
        train_policy.train(hparams)
    return {name: [stats[name] for stats in steps] for name in steps[0]}


def standard_error(a, b):
    """That of the difference of the means over seeds, which vary alike in both."""
    squares = sum(((values - values.mean(0)) ** 2).sum(0) for values in (a, b))
    variance = squares / (len(a) + len(b) - 2)
    return np.sqrt(variance * (1 / len(a) + 1 / len(b)))


@pytest.mark.slow
def test_curves():
    """One test: the trainings take many seconds of a processor."""
    curves = load_npz('curves', 'curves.npz')
    recorded = {name: values[:, :UPDATES] for name, values in curves.items()}
    runs = [one_seed(seed) for seed in SEEDS]
    ours = {name: np.array([run[name] for run in runs], np.float64) for name in recorded}
    curves = ours, recorded
    assert_means_agree(curves)
    for runs in curves:
        score = runs['objective/score'].astype(np.float64)
        assert score[:, -10:].mean() - score[:, :10].mean() > LEARNED * score[:, :10].mean(1).std()
        assert len(np.unique(score[:, 0])) > 1
    last = [runs['objective/score'][:, -10:].mean() for runs in curves]
    assert_close(last[0], last[1], rtol=0.03)


def assert_means_agree(curves):
    disagreeing = {}
    for name, theirs in curves[1].items():
        ours, theirs = curves[0][name], theirs.astype(np.float64)
        assert ours.shape[1:] == theirs.shape[1:], name
        allowed = STANDARD_ERRORS * standard_error(ours, theirs)
        # What does not vary over seeds, such as the number of episodes, may differ by rounding to
        # float32.
        agree = np.abs(ours.mean(0) - theirs.mean(0)) <= allowed + 1e-6 * np.abs(theirs.mean(0))
        if agree.mean() < SHARE:
            disagreeing[name] = agree.mean()
    assert not disagreeing
