"""Best policy at every KL: by hand, by brute force, and against random policies."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_human_preferences.evaluation import optimum
from lm_human_preferences.hparams.task_options import TaskHParams
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.policy import Policy
from lm_human_preferences.rewards import TrainedRewardModel, make_score_fn

LN2, LN3 = math.log(2), math.log(3)
EVEN = torch.tensor([[0.5, 0.5]]).log()
ZERO_ONE = torch.tensor([[0.0, 1.0]])


def close(value, expected, tolerance=1e-10):
    torch.testing.assert_close(
        torch.as_tensor(value, dtype=torch.float64),
        torch.as_tensor(expected, dtype=torch.float64),
        rtol=0,
        atol=tolerance,
    )


def test_the_error_of_a_mean_needs_two_queries():
    values = torch.tensor([[1.0, 5.0], [3.0, 5.0]])
    close(optimum.standard_error(values), [1.0, 0.0])
    assert optimum.standard_error(values[:1]).isnan().all()


def drawn(queries=3, responses=7, seed=0, ties=False):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(queries, responses, dtype=torch.float64, generator=generator)
    logits = 2 * torch.randn(queries, responses, dtype=torch.float64, generator=generator)
    return logits.log_softmax(-1), rewards.round() if ties else rewards


def optimal_logprobs(ref_logprobs, rewards, beta):
    """Return log pi*(y|x) that maximises E[reward] - beta KL, shaped like the arguments."""
    return (ref_logprobs.double() + rewards.double() / beta).log_softmax(-1)


def test_two_responses_by_hand():
    """With beta 1 / ln 3, a reward of 1 triples the odds: 3/4 and 1/4, Z = 2, KL = 3/4 ln 3 - ln
    2."""
    best = optimal_logprobs(EVEN, ZERO_ONE, 1 / LN3)
    close(best.exp(), [[0.25, 0.75]], 1e-7)
    close(optimum.expected(best, ZERO_ONE), [0.75], 1e-7)
    close(optimum.kl(best, EVEN), [0.75 * LN3 - LN2], 1e-7)
    log_z, mean, variance = optimum.moments(EVEN, ZERO_ONE, 1 / LN3)
    close(torch.cat([log_z, mean, variance]), [LN2, 0.75, 0.1875], 1e-7)
    kls, rewards = optimum.frontier(EVEN, ZERO_ONE, [1 / LN3, 1e-3])
    close(kls, [0.75 * LN3 - LN2, LN2], 1e-7)
    close(rewards, [0.75, 1], 1e-7)
    reward, beta = optimum.frontier_at(0.75 * LN3 - LN2, EVEN, ZERO_ONE)
    close([reward, beta], [0.75, 1 / LN3], 1e-6)


def test_a_policy_that_never_gives_a_response_has_a_kl():
    close(optimum.kl(torch.tensor([[-torch.inf, 0.0]]), EVEN), [LN2], 1e-7)
    close(optimum.kl(torch.tensor([[-torch.inf, 0.0]]), torch.tensor([[-torch.inf, 0.0]])), [0])


def test_the_ends_of_the_frontier():
    """Without KL there is the reference; from some KL on there are only the best responses."""
    ref_logprobs = torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.375, 0.5]], dtype=torch.float64).log()
    rewards = torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 1.0]])
    assert optimum.frontier_at(0, ref_logprobs, rewards) == (pytest.approx(1.25), math.inf)
    assert optimum.frontier_at(-0.1, ref_logprobs, rewards) == (pytest.approx(1.25), math.inf)
    most = (math.log(2) + math.log(8)) / 2
    assert optimum.frontier_at(most, ref_logprobs, rewards) == (3.5, 0)
    assert optimum.frontier_at(most - 1e-3, ref_logprobs, rewards)[0] < 3.5
    assert optimum.frontier_at(0.5, ref_logprobs, torch.ones(2, 3)) == (1, 0)


@pytest.mark.parametrize('beta', [100, 1, 0.05])
def test_the_reward_at_a_kl_is_the_frontiers(beta):
    """Within 1e-9, and the slope of the frontier is beta."""
    ref_logprobs, rewards = drawn()
    (kl,), (reward,) = optimum.frontier(ref_logprobs, rewards, [beta])
    found, slope = optimum.frontier_at(kl, ref_logprobs, rewards)
    close(found, reward, 1e-9)
    assert slope == pytest.approx(beta, rel=1e-4)
    step = 1e-4 * kl.item()
    ahead, behind = (optimum.frontier_at(kl + d, ref_logprobs, rewards)[0] for d in (step, -step))
    assert (ahead - behind) / (2 * step) == pytest.approx(beta, rel=1e-4)


def test_optimum_is_what_the_moments_say():
    ref_logprobs, rewards = drawn()
    best = optimal_logprobs(ref_logprobs, rewards, 0.4)
    kls, means = optimum.frontier(ref_logprobs, rewards, [0.4])
    close(kls[0], optimum.kl(best, ref_logprobs).mean())
    close(means[0], optimum.expected(best, rewards).mean())
    betas = optimum.beta_grid(rewards)
    kls, means = optimum.frontier(ref_logprobs, rewards, betas)
    assert (kls.diff() >= -1e-12).all() and (means.diff() >= -1e-12).all() and kls[0] < 1e-3
    close(means[-1], rewards.max(1).values.mean(), 1e-2)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32), st.integers(1, 3), st.integers(2, 6), st.floats(0.01, 10), st.booleans()
)
def test_no_policy_lies_above_the_frontier(seed, queries, responses, sharpness, ties):
    ref_logprobs, rewards = drawn(queries, responses, seed, ties)
    logits = torch.randn(
        queries, responses, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 1)
    )
    policies = [
        (sharpness * logits).log_softmax(-1),
        (ref_logprobs + sharpness * rewards**3).log_softmax(-1),
    ]
    for logprobs in policies:
        kl = optimum.kl(logprobs, ref_logprobs).mean()
        at, _ = optimum.frontier_at(kl, ref_logprobs, rewards)
        assert optimum.expected(logprobs, rewards).mean() <= at + 1e-9
    for n in (2, 5):
        reward, kl = optimum.best_of_n(ref_logprobs, rewards, n, rewards)
        assert reward.mean() <= optimum.frontier_at(kl.mean(), ref_logprobs, rewards)[0] + 1e-9


@pytest.mark.parametrize('ties', [False, True])
@pytest.mark.parametrize('n', [1, 2, 4])
def test_best_of_n_judged_by_another_reward_is_that_of_all_draws(n, ties):
    """Every way to draw n of 5 responses; the KL is that of the choice."""
    ref_logprobs, rewards = drawn(2, 5, ties=ties)
    judged = drawn(2, 5, seed=1)[1]
    rho = ref_logprobs.exp()
    found, kls = optimum.best_of_n(ref_logprobs, rewards, n, judged)
    own, own_kls = optimum.best_of_n(ref_logprobs, rewards, n, rewards)
    assert torch.equal(kls, own_kls)
    for query in range(2):
        chosen = torch.zeros(5, dtype=torch.float64)
        for draw in itertools.product(range(5), repeat=n):
            best = max(draw, key=lambda response: rewards[query, response])
            chosen[best] += math.prod(rho[query, response].item() for response in draw)
        close(own[query], chosen @ rewards[query])
        close(kls[query], optimum.kl(chosen.log(), ref_logprobs[query]))
        # Of equally good responses the first one drawn is taken, so each as often as it is drawn.
        close(found[query], chosen @ judged[query])


def test_a_response_that_is_never_drawn_is_not_chosen():
    ref_logprobs = torch.tensor([[-torch.inf, 0.0]])
    judged = torch.tensor([[3.0, 2.0]])
    close(torch.cat(optimum.best_of_n(ref_logprobs, -ZERO_ONE, 4, judged)), [2, 0])


def test_samples_of_both_models_by_hand():
    """The policy gives the first response 1/2 instead of 1/4: log-ratios ln 2, and -ln 3/2."""
    log_ratios = torch.tensor([[LN2, -math.log(1.5)]])
    reference, policy = optimum.mixture(log_ratios)
    assert reference.dtype == torch.float64
    close(optimum.mixture(torch.zeros(2, 4))[0].exp(), torch.full((2, 4), 0.25))
    # Weights 2/3 and 6/5 of rho, 4/3 and 4/5 of pi.
    close(reference.exp(), [[5 / 14, 9 / 14]], 1e-7)
    close(policy.exp(), [[5 / 8, 3 / 8]], 1e-7)


def test_one_value_tells_no_error_of_its_mean(recwarn):
    assert optimum.standard_error(torch.ones(1, 2)).isnan().tolist() == [True, True]
    assert not recwarn.list


def test_effective_samples_by_hand():
    """Weights 3/4 and 1/4: 1 / (9/16 + 1/16). Queries with nothing to gain hide no other."""
    even = EVEN.expand(3, 2)
    assert optimum.effective_samples(EVEN, ZERO_ONE, 1 / LN3) == pytest.approx(1.6)
    assert optimum.effective_samples(EVEN, ZERO_ONE, 1e-9) == pytest.approx(1)
    assert optimum.effective_samples(even, torch.ones(3, 2), 1) == 2
    one_of_three = torch.tensor([[2.0, 2.0], [0.0, 1.0], [3.0, 3.0]])
    assert optimum.effective_samples(even, one_of_three, 1 / LN3) == pytest.approx(1.6)
    # Gains 1/4 and 4/5 - 1/2, and harmonic: 1.6 and 1 / (16 + 1) * 25.
    two = torch.tensor([[0.0, 1.0], [0.0, 2 * LN2 / LN3]])
    gains = 0.25, 0.3 * 2 * LN2 / LN3
    expected = sum(gains) / (gains[0] / 1.6 + gains[1] * 17 / 25)
    assert optimum.effective_samples(even[:2], two, 1 / LN3) == pytest.approx(expected)


def test_the_best_of_equal_rewards_has_no_negative_kl():
    """Also not by rounding, which would be shown as -0.000."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(100, 64, generator=generator).double().log_softmax(-1)
    _, kl = optimum.best_of_n(weights, torch.ones(100, 64), 4, torch.ones(100, 64))
    assert kl.min() >= 0 and kl.max() < 1e-12


@pytest.fixture
def tiny():
    torch.manual_seed(0)
    start = TrainedModel('test')
    policy = Policy(
        start,
        temperature=0.7,
        device='cpu',
        embed_queries=lambda queries: torch.cat([torch.full((len(queries), 1), 5), queries], dim=1),
    )
    reward_model = TrainedRewardModel('test', start.encoding, device='cpu')
    policy.model.double()
    reward_model.double()
    return policy, reward_model, torch.tensor([[1, 2, 3], [4, 5, 27]])


def test_enumeration_is_that_of_a_double_loop(tiny, monkeypatch):
    """One in seven of all 27 ** 2 responses, in float64; chunks of less and more than a query."""
    policy, reward_model, queries = tiny
    responses = list(itertools.product(range(27), repeat=2))
    some = slice(None, None, 7)
    pairs = [
        (queries[query : query + 1], torch.tensor([response]))
        for query in range(2)
        for response in responses[some]
    ]
    logprobs = torch.stack([policy.analyze_responses(*pair)['logprobs'].sum() for pair in pairs])
    scores = torch.cat([reward_model.score(*pair) for pair in pairs])
    for chunk in (8192, 100, 1):
        monkeypatch.setattr(optimum, 'CHUNK', chunk)
        close(optimum.all_logprobs(policy, queries, 2)[:, some].flatten(), logprobs)
        close(optimum.all_rewards(reward_model, queries, 27, 2)[:, some].flatten(), scores)
    all_logprobs = optimum.all_logprobs(policy, queries, 2)
    close(all_logprobs.exp().sum(1), [1, 1])
    first = optimum.all_logprobs(policy, queries, 1)
    close(first.exp(), all_logprobs.exp().reshape(2, 27, 27).sum(2))
    monkeypatch.setattr(optimum, 'CHUNK', 500)
    score_fn = make_score_fn(TaskHParams(response_length=2), reward_model)
    all_scores = optimum.all_scores(score_fn, queries, 27, 2)
    close(all_scores[:, some].flatten(), scores)


def test_truncated_responses_score_what_they_do_in_training(tiny):
    _, reward_model, queries = tiny
    score_fn = make_score_fn(
        TaskHParams(response_length=2, truncate_token=3, penalty_reward_value=-7), reward_model
    )
    scores = optimum.all_scores(score_fn, queries, 27, 2).reshape(2, 27, 27)
    close(scores[:, 3, 0], scores[:, 3, 1])
    assert (scores[:, 0, 0] == -7).all()
    close(scores[0, 8, 3], reward_model.score(queries[:1], torch.tensor([[8, 3]]))[0])
