"""commands/sampler by hand: which response is the best, its rank, and the KL of the choice."""

import math
from types import SimpleNamespace

import pytest
import torch

from lm_human_preferences.commands.sampler import Sampler, choose
from lm_human_preferences.hparams.task_options import TaskHParams
from lm_human_preferences.language import encodings

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    'scores, best, rank, mean, kl',
    [
        ([1.0, 2.0], 1, 1, 1.5, math.log(2) - 1 / 2),
        # 2 of 4 share the ranks 1 and 2: log((1 - (2/4)^4) / (2/4))
        ([1.0, 2.0, 2.0, 1.0], 1, 1.5, 1.5, math.log(15 / 8)),
        ([0.0, 0.0, 0.0, 0.0], 0, 2.5, 0, 0),
        ([NAN, -5.0], 1, 1, NAN, math.log(2) - 1 / 2),
        ([-INF, 1.0], 1, 1, -INF, math.log(2) - 1 / 2),
    ],
)
def test_a_choice(scores, best, rank, mean, kl):
    found = choose(torch.tensor([scores]))
    assert found.best.tolist() == [best] and found.rank.tolist() == [rank]
    expected = torch.tensor([mean, kl], dtype=torch.float64)
    torch.testing.assert_close(
        torch.cat([found.mean_score, found.kl]), expected, rtol=0, atol=1e-12, equal_nan=True
    )


def test_a_response_without_an_end_is_never_better_than_one_with_an_end():
    """Though its penalty is above the other's score."""
    scores = torch.tensor([[-1.0, -5.0, -7.0], [-1.0, -1.0, -1.0]])
    found = choose(scores, torch.tensor([[False, True, True], [False, False, False]]))
    assert found.best.tolist() == [1, 0] and found.rank.tolist() == [1, 2]
    assert found.kl.tolist() == [pytest.approx(math.log(3) - 2 / 3), 0]


@pytest.mark.parametrize('probabilities', [[0.9, 0.1], [0.4, 0.3, 0.2, 0.1]])
def test_the_mean_kl_is_that_of_the_best_of_n(probabilities):
    """Rewards that tie, drawn again and again: the exact divergence of the best of 16."""
    n, rho = 16, torch.tensor(probabilities, dtype=torch.float64)
    up_to = rho.cumsum(0)
    chosen = up_to**n - (up_to - rho) ** n
    exact = (chosen * (chosen / rho).log()).sum()
    generator = torch.Generator().manual_seed(0)
    draws = torch.multinomial(rho, 4000 * n, replacement=True, generator=generator)
    found = choose(draws.view(-1, n).double()).kl.mean()
    assert abs(found - exact) < 0.06 * exact
    assert found < math.log(n) - (n - 1) / n


def test_only_the_samples_that_are_wanted_are_scored():
    """A batch is sampled whole, but each score may be dear."""
    encoder = encodings.Test.get_encoder()
    both = {'encoder': encoder, 'padding_token': encoder.padding_token}
    scored = []

    def score(queries, responses):
        scored.extend(zip(queries.flatten().tolist(), responses.flatten().tolist(), strict=True))
        return responses.flatten().float()

    queries = torch.tensor([[1], [2], [3]])
    policy = SimpleNamespace(respond=lambda *_: {'responses': queries + 3}, **both)
    task = TaskHParams(query_length=1, response_length=1)
    sampler = Sampler(policy, task, SimpleNamespace(score=score, **both))
    rows = sampler.answered(queries, wanted=2)
    assert [row['response_tokens'] for row in rows] == [[4], [5]]
    assert [row['score'] for row in rows] == [4, 5] and scored == [(1, 4), (2, 5)]
    assert sampler.answered(queries, wanted=0) == [] and len(scored) == 2
