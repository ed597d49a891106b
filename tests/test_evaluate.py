"""`./launch.py evaluate`: a policy beside the best one possible."""
import json
import math
import re
import shutil

import pytest
import torch

from command_line import error_of, invoke
from events import events_of
from lm_human_preferences import evaluate, optimum
from lm_human_preferences.rewards import make_score_fn
from lm_human_preferences.sample_policy import load_run_hparams
from test_optimum import optimal_logprobs

LN2, LN3 = math.log(2), math.log(3)


def test_against_the_frontier_by_hand():
    """A reward of 0 or 1, equally likely; half the way to the optimum of beta 1 / ln 3, which is (1/4, 3/4)."""
    ref_logprobs, scores = torch.tensor([[0.5, 0.5]]).double().log(), torch.tensor([[0.0, 1.0]]).double()
    kl = torch.tensor([0.75 * LN3 - LN2]).double()
    points = evaluate.compare(ref_logprobs, kl, scores, torch.tensor([0.625]).double(), kl_coef=1 / LN3, exact=True)
    found = evaluate.summarised(points, whole=True)
    assert found['base'] == {'kl': 0, 'reward': pytest.approx(0.5)}
    assert found['policy'] == pytest.approx({'kl': 0.75 * LN3 - LN2, 'reward': 0.625, 'frontier': 0.75, 'share': 0.5,
                                             'kl_to_optimum': 0.125 * LN3})
    assert found['optimum'] == pytest.approx({'kl': 0.75 * LN3 - LN2, 'reward': 0.75})
    assert found['best_of_4']['reward'] == pytest.approx(15 / 16)
    unmoved = evaluate.against_frontier(torch.zeros(1), torch.tensor([0.5]), ref_logprobs, scores)[0]
    assert evaluate.summarised({'policy': unmoved}, whole=True)['policy']['share'] is None
    greedy = evaluate.against_frontier(torch.tensor([LN2 + 1e-12]), torch.tensor([1.0]), ref_logprobs, scores)[0]
    assert greedy['share'].item() == pytest.approx(1)


def test_kl_to_the_optimum_is_that_of_the_distributions():
    torch.manual_seed(0)
    ref_logprobs, logprobs, scores = torch.randn(3, 5, 8).double()
    ref_logprobs, logprobs = ref_logprobs.log_softmax(-1), logprobs.log_softmax(-1)
    points = evaluate.compare(ref_logprobs, optimum.kl(logprobs, ref_logprobs), scores,
                              optimum.expected(logprobs, scores), kl_coef=0.3, exact=True)
    best = optimal_logprobs(ref_logprobs, scores, 0.3)
    torch.testing.assert_close(points['policy']['kl_to_optimum'], optimum.kl(logprobs, best))


def test_standard_errors_are_the_spread_of_results():
    """Of 80 sets of 30 queries."""
    torch.manual_seed(0)
    found = {'frontier': [], 'share': []}
    for _ in range(80):
        shape = torch.rand(30, 1).double() + 0.5
        ref_logprobs, scores = torch.randn(30, 6).double().log_softmax(-1), shape * torch.randn(30, 6).double()
        logprobs = (ref_logprobs + 1.5 * scores + 0.5 * torch.randn(30, 6)).log_softmax(-1)
        values = evaluate.against_frontier(optimum.kl(logprobs, ref_logprobs), optimum.expected(logprobs, scores),
                                           ref_logprobs, scores)[0]
        for name, results in found.items():
            results.append((values[name].mean(), optimum.standard_error(values[name])))
    for name, results in found.items():
        means, errors = torch.tensor(results).T
        assert means.std() == pytest.approx(errors.mean(), rel=0.25), name


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    """A short run of the experiment `test` whose 27 ** 2 responses can be enumerated."""
    folder = tmp_path_factory.mktemp('runs')
    result = invoke(f'train_policy test first --mpi 1 --save_dir {folder} --task.response_length 2 '
                    '--ppo.total_episodes 1280 --rewards.train_new_model.labels.num_train 256')
    assert result.exit_code == 0, result.output
    return folder / 'first'


def evaluated(run, words=''):
    result = invoke(f'evaluate {run} {words}')
    assert result.exit_code == 0, result.output
    return result.stdout, json.loads((run / 'evaluation.json').read_text())


def test_an_exact_evaluation(run):
    output, found = evaluated(run, '--queries 5')
    assert (found['exact'], found['queries'], found['responses']) == (True, 5, 27 ** 2)
    assert found['kl_coef'] == pytest.approx(events_of(run / 'tb' / 'ppo')['objective/kl_coef'][-1][1])
    points = found['rewards']['reward model']
    policy, base = points['policy'], points['base']
    assert base['reward'] < policy['reward'] < policy['frontier']
    assert policy['share'] == pytest.approx((policy['reward'] - base['reward']) / (policy['frontier'] - base['reward']))
    assert 0 < policy['kl_to_optimum'] and 0.3 < policy['share'] < 1
    assert policy['standard_errors']['reward'] > 0
    for n in (4, 16, 64):
        assert base['reward'] < points[f'best_of_{n}']['reward'] <= points[f'best_of_{n}']['frontier'] + 1e-9
    assert (run / 'evaluation.png').read_bytes().startswith(b'\x89PNG')
    for number in (policy['reward'], policy['frontier'], points['best_of_16']['kl']):
        assert f'{number:.3f}' in output


def test_the_expected_score_is_the_mean_over_all_responses(run):
    """Query by query, through the functions that PPO uses."""
    found = evaluated(run, '--queries 2')[1]['rewards']['reward model']
    hparams = load_run_hparams(str(run))
    policy, reference, models = evaluate.load_models(str(run), hparams)
    torch.manual_seed(1)
    queries = evaluate.queries_of(hparams, policy.encoder, 2).repeat_interleave(27 ** 2, 0)
    responses = optimum.all_responses(27, 2).repeat(2, 1)
    logprobs, ref_logprobs = (model.analyze_responses(queries, responses)['logprobs'].double().sum(1)
                              for model in (policy, reference))
    scores = make_score_fn(hparams.task, models['reward model'])(queries, responses)[0].double()
    assert (logprobs.exp() * scores).sum() / 2 == pytest.approx(found['policy']['reward'], abs=1e-5)
    assert (ref_logprobs.exp() * scores).sum() / 2 == pytest.approx(found['base']['reward'], abs=1e-5)
    assert (logprobs.exp() * (logprobs - ref_logprobs)).sum() / 2 == pytest.approx(found['policy']['kl'], abs=1e-5)


def test_samples_tell_what_enumeration_does(run, monkeypatch):
    exact = evaluated(run, '--queries 16')[1]['rewards']['reward model']
    monkeypatch.setattr(evaluate, 'MOST_RESPONSES', 0)
    output, found = evaluated(run, '--queries 16 --samples 512')
    assert 'estimated' in output and (found['exact'], found['responses']) == (False, 512)
    sampled = found['rewards']['reward model']
    curve = sampled['frontier']
    assert {len(values) for values in curve.values()} == {50} and curve['effective_samples'][-1] < 2
    assert list(exact['frontier']) == ['kl', 'reward'] and min(curve['standard_errors']) > 0
    assert sampled['policy']['effective_samples'] > 10
    for point, name in [('base', 'reward'), ('policy', 'reward'), ('policy', 'kl'), ('policy', 'frontier'),
                        ('policy', 'share'), ('policy', 'kl_to_optimum'), ('optimum', 'kl'), ('best_of_16', 'reward')]:
        error = sampled[point]['standard_errors'][name]
        assert abs(sampled[point][name] - exact[point][name]) < 3 * error, (point, name)


def test_a_policy_out_of_reach_of_its_samples_is_reported(run, monkeypatch):
    monkeypatch.setattr(evaluate, 'MOST_RESPONSES', 0)
    output, _ = evaluated(run, '--queries 4 --samples 64')
    assert re.search(r'^WARNING: less than 10 effective samples at the KL of policy, .*best of 64.*; the best there is '
                     'estimated too low: give more --samples$', output, re.MULTILINE)


def test_results_go_where_they_are_asked_to(run, tmp_path):
    evaluated(run, '--queries 2')
    before = (run / 'evaluation.json').read_text()
    assert invoke(f'evaluate {run} --queries 3 --output_dir {tmp_path}/new').exit_code == 0
    assert json.loads((tmp_path / 'new' / 'evaluation.json').read_text())['queries'] == 3
    assert (tmp_path / 'new' / 'evaluation.png').exists() and (run / 'evaluation.json').read_text() == before


def test_what_the_run_was_trained_on_may_be_gone(run, tmp_path):
    """The reward model's own directory, and the events that hold the coefficient."""
    result = invoke(f'train_policy test second --mpi 1 --save_dir {tmp_path} --task.response_length 1 '
                    '--ppo.total_episodes 64 --rewards.train_new_model off --rewards.trained_model test')
    assert result.exit_code == 0, result.output
    first = evaluated(tmp_path / 'second', '--queries 3')[1]
    hparams = json.loads((tmp_path / 'second' / 'train_policy_hparams.json').read_text())
    hparams['rewards']['trained_model'] = str(tmp_path / 'nowhere')
    (tmp_path / 'second' / 'train_policy_hparams.json').write_text(json.dumps(hparams))
    shutil.rmtree(tmp_path / 'second' / 'tb')
    second = evaluated(tmp_path / 'second', '--queries 3')[1]
    assert second['kl_coef'] is None and 'optimum' not in second['rewards']['reward model']
    assert second['rewards']['reward model']['best_of_4'] == first['rewards']['reward model']['best_of_4']
    given = evaluated(tmp_path / 'second', f'--queries 3 --kl_coef {first["kl_coef"]}')[1]
    assert given['rewards'] == first['rewards']


@pytest.mark.slow
def test_training_on_the_known_reward_ends_with_a_table_that_agrees_with_ppo(tmp_path):
    """What PPO saw in its last 8 of 40 steps, where the learning rate is low, is what enumeration finds."""
    result = invoke(f'train_policy mock_sentiment first --mpi 1 --save_dir {tmp_path} --rewards.trained_model mock '
                    '--rewards.train_new_model off --ppo.total_episodes 10240')
    assert result.exit_code == 0, result.output
    assert 'exact, from all 125000 responses to each of 32 queries' in result.stdout
    found = json.loads((tmp_path / 'first' / 'evaluation.json').read_text())
    assert list(found['rewards']) == ['known reward']
    policy = found['rewards']['known reward']['policy']
    assert 'standard_errors' not in policy and 0.5 < policy['share'] < 1
    for name, exact in [('score', policy['reward']), ('kl', policy['kl'])]:
        seen = torch.tensor(events_of(tmp_path / 'first' / 'tb' / 'ppo')[f'objective/{name}'])[-8:, 1].double()
        assert abs(seen.mean() - exact) < 4 * optimum.standard_error(seen), name


@pytest.mark.parametrize('words, told', [
    ('/nowhere', '--save_dir /nowhere is no run of train_policy: it has no train_policy_hparams.json'),
    ('. --kl_coef 0', '--kl_coef 0.0 must be above 0'),
    ('. --samples 8', '--samples must be at least 64, got 8')])
def test_mistakes(words, told):
    assert error_of(invoke(f'evaluate {words}')) == told
