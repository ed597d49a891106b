"""`./launch.py evaluate`: a policy beside the best one possible."""

import json
import math
import os
import re
import types

import pytest
import torch
from command_line import error_of, invoke, last_error_of, succeed
from events import events_of
from experiments import resolved
from full_disks import largest_file
from matplotlib.figure import Figure
from run_folders import write_curves

from lm_human_preferences.evaluation import (
    comparison,
    evaluate,
    measure,
    optimum,
    report,
)
from lm_human_preferences.hparams.policy_options import AdaptiveKLParams, HParams
from lm_human_preferences.language import encodings
from lm_human_preferences.reward_sources.function import FunctionScorer
from lm_human_preferences.reward_sources.sources import source_of
from lm_human_preferences.reward_sources.texts import TextReward
from lm_human_preferences.rewards import TrainedRewardModel

LN2, LN3 = math.log(2), math.log(3)


def test_against_the_frontier_by_hand():
    """A reward of 0 or 1, equally likely; the optimum of beta 1 / ln 3 is (1/4, 3/4)."""
    ref_logprobs = torch.tensor([[0.5, 0.5]]).double().log()
    scores = torch.tensor([[0.0, 1.0]]).double()
    logprobs = torch.tensor([[3 / 8, 5 / 8]]).double().log()
    points = comparison.compare(ref_logprobs, logprobs, scores, 1 / LN3)
    found = comparison.summarize(points, with_errors=False)
    assert found['base'] == {'kl': 0, 'reward': pytest.approx(0.5)}
    assert found['policy'] == pytest.approx(
        {
            'kl': 3 / 8 * math.log(3 / 4) + 5 / 8 * math.log(5 / 4),
            'reward': 5 / 8,
            'frontier': 5 / 8,  # of two responses no other policy has this KL
            'share': 1,
            'kl_to_optimum': 3 / 8 * math.log(3 / 2) + 5 / 8 * math.log(5 / 6),
        }
    )
    half_way = comparison.against_frontier(
        torch.tensor([0.75 * LN3 - LN2]).double(), torch.tensor([0.625]), ref_logprobs, scores
    )
    assert [half_way[name].item() for name in ('frontier', 'share')] == pytest.approx([0.75, 0.5])
    assert found['optimum'] == pytest.approx({'kl': 0.75 * LN3 - LN2, 'reward': 0.75})
    assert found['best_of_4']['reward'] == pytest.approx(15 / 16)
    unmoved = comparison.against_frontier(torch.zeros(1), torch.tensor([0.5]), ref_logprobs, scores)
    assert comparison.summarize({'policy': unmoved}, with_errors=False)['policy']['share'] is None
    greedy = comparison.against_frontier(
        torch.tensor([LN2 + 1e-12]), torch.tensor([1.0]), ref_logprobs, scores
    )
    assert greedy['share'].item() == pytest.approx(1)


@pytest.mark.parametrize('score, kl', [(-1.0, 0.3), (None, 0.0)])
def test_no_share_of_a_gain_that_cannot_be(score, kl):
    """A flat reward, such as the penalty for every response, and a policy that has not moved."""
    torch.manual_seed(0)
    scores = torch.randn(32, 90).double() if score is None else torch.full((32, 90), score).double()
    reference, policy = optimum.mixture(kl * torch.randn(32, 90))
    points = comparison.compare_samples(reference, policy, scores, None)
    found = comparison.summarize(points, with_errors=True)
    assert found['policy']['share'] is None
    lines = list(report.table({**results_of(), 'rewards': {'reward model': found}}))
    row = next(line for line in lines if line.startswith('policy'))
    assert row.split()[-1] == '-' and lines[-1].startswith('-: nothing to gain, or too few')


def of_normal_rewards(kl, queries, samples, cosine, scale):
    """Return arguments of compare_samples, for a policy with this KL and a share of `cosine`.

    Rewards are `scale (queries, 1)` times normal numbers.
    """
    shift = scale * math.sqrt(2 * kl / scale.square().mean())
    rewards, others = torch.randn(2, queries, 2 * samples).double()
    rewards[:, samples:] += shift * cosine
    others[:, samples:] += shift * math.sqrt(1 - cosine**2)
    log_ratios = shift * (cosine * rewards + math.sqrt(1 - cosine**2) * others) - shift**2 / 2
    reference, policy = optimum.mixture(log_ratios)
    return reference, policy, scale * rewards


@pytest.mark.parametrize('queries, has_share', [(28, False), (32, True)])
def test_a_share_from_samples_is_the_true_one_though_half_the_queries_have_none(queries, has_share):
    torch.manual_seed(0)
    scale = torch.tensor([0.0, 1.0]).double().repeat(queries // 2).unsqueeze(1)
    arguments = of_normal_rewards(4.0, queries, 1024, 0.9, scale)
    points = comparison.compare_samples(*arguments, 1.0)
    found = comparison.summarize(points, with_errors=True)['policy']
    assert found['frontier'] > 1 and (found['share'] is not None) == has_share
    if has_share:
        width = report.margin(found, 'share', queries)
        assert found['share'] == pytest.approx(0.9, abs=0.01) and abs(found['share'] - 0.9) < width
        assert 0.001 < width < 0.01


@pytest.mark.parametrize('chance', [0.01, 0.3])
def test_the_best_of_n_of_samples_with_ties_is_the_true_one(chance):
    """A reward is 1 with this chance, and else 0; the policy raises it to .6."""
    torch.manual_seed(0)
    chances = torch.tensor([chance, 0.6]).repeat_interleave(64)
    rewards = (torch.rand(400, 128) < chances).double()
    log_ratios = torch.where(rewards == 1, 0.6 / chance, 0.4 / (1 - chance)).log()
    points = comparison.compare_samples(*optimum.mixture(log_ratios), rewards, None)
    for n in report.BEST_OF:
        none = (1 - chance) ** n
        kl = (1 - none) * math.log((1 - none) / chance) + none * math.log(none / (1 - chance))
        found = comparison.summarize(points, with_errors=True)[f'best_of_{n}']
        assert 'kl' not in found['standard_errors']
        assert found['reward'] == pytest.approx(1 - none, rel=0.03)
        assert found['kl'] == pytest.approx(kl, rel=0.03)
        assert found['share'] == pytest.approx(1, abs=1e-3)  # no policy is better at its KL


def test_the_error_of_a_share_is_that_of_queries_of_two_kinds():
    """The policy goes as far on queries that have nothing to gain: E[s] / E[s^2]^(1/2) = .707."""
    torch.manual_seed(0)
    shift, scale = 2.0, torch.tensor([0.0, 1.0]).double().repeat(16).unsqueeze(1)
    rewards = torch.randn(32, 1024).double()
    rewards[:, 512:] += shift
    reference, policy = optimum.mixture(shift * rewards - shift**2 / 2)
    points = comparison.compare_samples(reference, policy, scale * rewards, None)
    found = comparison.summarize(points, with_errors=True)['policy']
    assert report.margin(found, 'share', 32) == pytest.approx(0.13, abs=0.02)
    assert found['share'] == pytest.approx(0.707, abs=0.03)


def test_few_samples_do_not_bias_the_share():
    """Of 64 samples it was .3 to .5 points too high, several times as much as ±."""
    torch.manual_seed(0)
    points = comparison.compare_samples(
        *of_normal_rewards(4.0, 400, 64, 0.9, torch.ones(400, 1).double()), 1.0
    )
    found = comparison.summarize(points, with_errors=True)
    error = found['policy']['standard_errors']['share']
    assert error < 0.0012 and abs(found['policy']['share'] - 0.9) < 2 * error
    for name, expected in ('kl', 0.5), ('reward', 1.0):
        error = found['optimum']['standard_errors'][name]
        assert abs(found['optimum'][name] - expected) < 3 * error, name


def test_a_policy_that_mostly_says_the_same_has_no_share():
    same, other = [[1, 2]] * 3 + [[3, 4]], [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert measure.repeats_of(torch.tensor([same, other])) == (0.75 + 0.25) / 2
    torch.manual_seed(0)
    arguments = of_normal_rewards(2, 30, 512, 0.9, torch.ones(30, 1).double())
    for repeats, has_share in (0.5, True), (0.51, False):
        points = comparison.compare_samples(*arguments, None, repeats=repeats)
        found = comparison.summarize(points, with_errors=True)['policy']
        assert (found['effective_samples'] > 1) == has_share
        assert (found['share'] is not None) == (found['frontier'] is not None) == has_share


@pytest.mark.parametrize('samples, has_share', [(64, False), (1024, True)])
def test_a_hard_query_is_not_hidden_by_easy_ones(samples, has_share):
    torch.manual_seed(0)
    scale = torch.ones(32, 1).double()
    scale[::8] = 3
    arguments = of_normal_rewards(4, 32, samples, 0.9, scale)
    points = comparison.compare_samples(*arguments, 0.9)
    found = comparison.summarize(points, with_errors=True)
    names = ('frontier', 'share', 'kl_to_optimum')
    assert [found['policy'][name] is not None for name in names] == [has_share] * 3
    assert (found['optimum']['kl'] is not None) == has_share
    assert found['policy']['reward'] > 1


def results_of():
    """Made-up results of `evaluate` for both rewards, with standard errors."""
    errors = {'kl': 0.25, 'reward': 0.125}
    point = {'kl': 2.0, 'reward': 3.0, 'frontier': 4.0, 'share': 0.75, 'standard_errors': errors}
    frontier = {'kl': [0.5, 1.0, 3.0], 'reward': [1.0, 2.0, 4.0]}
    base = {'kl': 0.0, 'reward': 0.0, 'standard_errors': {'kl': 0.0, 'reward': 0.5}}
    bests = {f'best_of_{n}': {**point, 'kl': n / 5} for n in report.BEST_OF}
    known = {'base': base, 'policy': point, **bests}
    known |= {f'{name}_by_reward_model': {**of, 'reward': 2.5} for name, of in bests.items()}
    own = {'base': base, 'policy': {**point, 'kl_to_optimum': 0.5}, **bests, 'optimum': point}
    return {
        'save_dir': '/somewhere/a $run^$/',
        'exact': False,
        'queries': 16,
        'responses': 64,
        'kl_coef': 0.25,
        'rewards': {
            'reward model': {**own, 'frontier': frontier},
            'known reward': {**known, 'frontier': frontier},
        },
    }


KNOWN_ROWS = ['known reward', 'base', 'policy']
for chooser in ('known reward', 'reward model'):
    KNOWN_ROWS += [f'best of {n} by {chooser}' for n in report.BEST_OF]


def test_the_table_says_who_chose():
    lines = list(report.table(results_of()))
    own, known = (lines[i + 1 :] for i, line in enumerate(lines) if not line)
    names = [line.split('  ')[0] for line in known]
    assert names == KNOWN_ROWS
    assert 'best of 4 by reward model' in {line.split('  ')[0] for line in own}
    assert re.fullmatch(r'KL\(policy \|\| optimum\) +0\.500', own[6])
    assert own[7] == 'optimum: the best policy at the KL coefficient 0.25'
    # Of 16 queries: 2.131 standard errors.
    assert '2.000 ± 0.533  3.000 ± 0.266' in known[2]
    size = '64 responses to each of 16 queries'
    assert lines[0].endswith(f'{size}; ±: 95 % interval, from 10 queries on')


def test_the_picture_has_a_name_and_a_mark_for_each_point(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(Figure, 'savefig', lambda figure, *_, **settings: drawn.append(figure))
    report.draw(results_of(), str(tmp_path / 'out.png'))
    (figure,) = drawn
    assert figure.get_suptitle().startswith('Run a $run^$: ')  # as a formula it would be an error
    largest = 16 / 5
    for axes in figure.axes:
        lines = {line.get_label(): line for line in axes.lines}
        curve = [list(each) for each in lines['frontier'].get_data()]
        assert curve == [[0, 0.5, 1, 3], [0, 1, 2, 4]]
        assert list(lines['frontier, at least'].get_xdata()) == pytest.approx([3, 1.2 * largest])
        assert [list(each) for each in lines['policy'].get_data()] == [[2], [3]]
    assert list(lines)[2:] == [name for name in KNOWN_ROWS if name != 'known reward']


def test_a_picture_does_without_numbers_that_are_not_finite(tmp_path):
    results = results_of()
    for points in results['rewards'].values():
        points['policy'] = dict.fromkeys(points['policy'])
    report.draw(results, str(tmp_path / 'out.png'))


@pytest.mark.parametrize('adaptive, before', [(None, 0.15), (AdaptiveKLParams(target=6.0), None)])
def test_the_coefficient_is_the_last_that_was_logged(tmp_path, adaptive, before):
    hparams = HParams()
    hparams.rewards.kl_coef, hparams.rewards.adaptive_kl = 0.15, adaptive
    assert evaluate.last_kl_coef(str(tmp_path), hparams) == before
    for begin, values in (0, [0.5, 1.0, 1.5]), (2, [0.25, 0.75]):
        curves = {'objective/kl_coef': values}
        write_curves(tmp_path / 'tb/ppo', curves, begin, is_resumed=begin > 0)
    assert evaluate.last_kl_coef(str(tmp_path), hparams) == 0.75


@pytest.fixture
def task_of_files(tmp_path):
    """Function that writes x.jsonl and x.test.jsonl, and returns settings with queries of them."""

    def settings(texts, test_texts):
        for name, lines in (('x.jsonl', texts), ('x.test.jsonl', test_texts)):
            (tmp_path / name).write_text('\n'.join(map(json.dumps, lines)))
        hparams = HParams()
        task = {'query_dataset': f'{tmp_path}/x.jsonl', 'query_length': 1, 'start_text': None}
        hparams.override_from_dict({f'task.{name}': value for name, value in task.items()})
        return hparams

    return settings


def test_queries_are_those_of_the_test_part(task_of_files):
    encoder = encodings.Reviews.get_encoder()
    source = source_of(task_of_files(['film', 'plot', 'cast'], ['music', 'story', 'music']))
    for count in (None, 3):
        queries = measure.queries_of(source, encoder, count)
        assert sorted(map(encoder.decode, queries)) == ['music', 'story']


def test_test_queries_that_are_trained_on_are_counted(task_of_files):
    encoder = encodings.Reviews.get_encoder()
    hparams = task_of_files(['film was good', 'music was good'], ['music was bad', 'story was bad'])
    queries = measure.queries_of(source_of(hparams), encoder, None)
    assert measure.count_trained_on(hparams.task, encoder, queries) == 1
    told = '16 queries (1 of them are trained on, too)'
    for count in (0, 1):
        results = {**results_of(), 'queries_trained_on': count}
        assert (told in next(report.table(results))) == bool(count)
    hparams.task.query_dataset = 'books'
    assert measure.count_trained_on(hparams.task, encoder, torch.zeros(32, 3)) is None


def test_queries_of_reviews_are_drawn_by_the_seed():
    source = source_of(resolved('train_policy', 'mock_sentiment'))

    def queries(count, seed=1):
        return measure.queries_of(source, encodings.Reviews.get_encoder(), count, seed)

    every, state = queries(None), torch.get_rng_state()
    assert len(every) == len(every.unique(dim=0)) == 32
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(queries(8), every[:8]) and not torch.equal(queries(8, seed=2), every[:8])
    assert len(queries(40)) == 32


@pytest.fixture
def measured(monkeypatch):
    half = torch.full((2, 2), -LN2).double()
    logprobs = torch.tensor([[0.5, 0.5], [0.0, 1.0]]).double().log()
    scores = {
        'reward model': torch.tensor([[0.0, 1.0]] * 2).double(),
        'known reward': torch.tensor([[3.0, 1.0]] * 2).double(),
    }
    responses = measure.Responses(half, logprobs, scores)
    monkeypatch.setattr(measure, 'enumerate_all', lambda *arguments: responses)
    monkeypatch.setattr(measure, 'sample_many', lambda *arguments: responses)
    monkeypatch.setattr(report, 'BEST_OF', (2,))
    sizes = types.SimpleNamespace(n_vocab=9)
    policy = types.SimpleNamespace(model=types.SimpleNamespace(sizes=sizes))
    task = HParams().task
    task.response_length = 3

    models = measure.Models(policy, None, scores, task)

    def measure_(*, most=9**3, reward=scores['reward model']):
        scores['reward model'] = reward
        monkeypatch.setattr(measure, 'MOST_RESPONSES', most)
        return measure.measure(models, torch.zeros(2, 1), 0.5, samples=7, batch_size=1)

    return measure_


@pytest.mark.parametrize(
    'queries, reward, expected',
    [
        ('reviews', TrainedRewardModel, ['reward model', 'known reward']),
        ('reviews', TextReward, ['reward function']),
        ('mine.jsonl', TrainedRewardModel, ['reward model']),
    ],
)
def test_only_what_learned_about_reviews_is_measured_by_their_known_reward(
    monkeypatch, queries, reward, expected
):
    monkeypatch.setattr(measure.KnownReward, '__init__', lambda self, encoding: None)
    source = types.SimpleNamespace(task=HParams().task)
    source.task.query_dataset = queries
    given = object.__new__(reward)
    given.scorer = object.__new__(FunctionScorer)
    source.for_evaluation = lambda *_: given
    assert list(measure._reward_models('run', source, encodings.Reviews, None)) == expected


def test_the_reward_that_was_trained_on_chooses_for_the_other_as_well(measured):
    found = measured()
    rewards = found.pop('rewards')
    assert found == {'exact': True, 'queries': 2, 'responses': 2, 'kl_coef': 0.5}
    own, known = rewards['reward model'], rewards['known reward']
    assert own['policy']['kl'] == pytest.approx(LN2 / 2) and 'kl_to_optimum' in own['policy']
    assert 'kl_to_optimum' not in known['policy'] and 'optimum' not in known
    rewards_of_policy = [each['policy']['reward'] for each in (own, known)]
    assert rewards_of_policy == pytest.approx([0.75, 1.5])
    assert own['best_of_2']['reward'] == pytest.approx(3 / 4)
    assert known['best_of_2']['reward'] == pytest.approx(3 * 3 / 4 + 1 / 4)
    assert known['best_of_2_by_reward_model']['reward'] == pytest.approx(1 * 3 / 4 + 3 / 4)
    assert 'best_of_2_by_reward_model' not in own
    sampled = measured(most=9**3 - 1)
    assert (sampled['exact'], sampled['responses']) == (False, 7)
    assert sampled['rewards']['known reward'].keys() == known.keys()


@pytest.mark.parametrize('most', [9**3, 9**3 - 1])
def test_the_frontier_of_rewards_that_are_all_alike_is_a_point(measured, most):
    flat = torch.full((2, 2), 0.1).double()
    found = measured(most=most, reward=flat)
    json.dumps(found, allow_nan=False)
    frontier = found['rewards']['reward model']['frontier']
    assert max(frontier['kl']) < 1e-7 and max(frontier['reward']) == pytest.approx(0.1)


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp('runs')
    succeed(
        f'train_policy test first --mpi 1 --save_dir {folder} --task.response_length 2 '
        '--ppo.total_episodes 1280 --rewards.train_new_model.labels.num_train 256'
    )
    return folder / 'first'


def evaluated(run, words=''):
    result = succeed(f'evaluate {run} {words}')
    text = (run / 'evaluation.json').read_text()
    assert text == json.dumps(json.loads(text), indent=2)  # people read it too
    return result.stdout, json.loads(text)


def test_an_exact_evaluation(run):
    output, found = evaluated(run, '--queries 5')
    assert (found['exact'], found['queries'], found['responses']) == (True, 5, 27**2)
    assert found['kl_coef'] == pytest.approx(
        events_of(run / 'tb' / 'ppo')['objective/kl_coef'][-1][1]
    )
    points = found['rewards']['reward model']
    policy = points['policy']
    assert policy['kl_to_optimum'] > 0 and 0.3 < policy['share'] < 1
    assert 'standard_errors' not in policy and '±' not in output
    assert (run / 'evaluation.png').read_bytes().startswith(b'\x89PNG')
    for number in (policy['reward'], policy['frontier'], points['best_of_16']['kl']):
        assert f'{number:.3f}' in output
    assert output.splitlines()[-1] == f'Saved evaluation.json and evaluation.png in {run}'


def test_a_training_that_ends_in_nan_is_said_instead_of_an_evaluation(tmp_path):
    result = invoke(
        f'train_policy test nan --mpi 1 --save_dir {tmp_path} --task.response_length 2 --ppo.lr'
        ' 1e30 --ppo.total_episodes 192 --run.evaluate on --rewards.train_new_model off'
        ' --rewards.trained_model test'
    )
    checkpoint = tmp_path / 'nan/policy/checkpoints/model.ckpt-3'
    told = f'{checkpoint} has values that are not finite, first in policy/model/wte'
    assert last_error_of(result) == told
    assert error_of(invoke(f'evaluate {tmp_path}/nan')) == told
    succeed(f'report {tmp_path}/nan')
    page = (tmp_path / 'nan/report.html').read_text()
    assert 'end in NaN or infinity' in page


def test_samples_tell_what_enumeration_does(run, monkeypatch):
    exact = evaluated(run, '--queries 32 --kl_coef 0.4')[1]['rewards']['reward model']
    monkeypatch.setattr(measure, 'MOST_RESPONSES', 0)
    output, found = evaluated(run, '--queries 32 --samples 512 --kl_coef 0.4')
    assert 'estimated' in output and (found['exact'], found['responses']) == (False, 512)
    sampled = found['rewards']['reward model']
    lengths = [len(of['frontier'][name]) for of in (exact, sampled) for name in ('kl', 'reward')]
    assert lengths[:2] == [50, 50] and 20 < lengths[2] == lengths[3] < 50
    assert sampled['policy']['effective_samples'] > 30
    compared = {'base': 'reward', 'policy': 'reward kl frontier share kl_to_optimum'}
    for point, names in {**compared, 'optimum': 'kl', 'best_of_16': 'reward'}.items():
        for name in names.split():
            error = sampled[point]['standard_errors'][name]
            assert abs(sampled[point][name] - exact[point][name]) < 3 * error, (point, name)


def test_results_go_where_they_are_asked_to(run, tmp_path):
    before = {name: (run / name).stat().st_mtime_ns for name in os.listdir(run)}
    succeed(f'evaluate {run} --queries 3 --output_dir {tmp_path}/new')
    assert json.loads((tmp_path / 'new/evaluation.json').read_text())['queries'] == 3
    assert set(os.listdir(tmp_path / 'new')) == {'evaluation.json', 'evaluation.png'}
    assert {name: (run / name).stat().st_mtime_ns for name in os.listdir(run)} == before
    with largest_file(1000):
        result = invoke(f'evaluate {run} --queries 2 --output_dir {tmp_path}')
    assert 'Traceback' not in result.stderr
    assert re.search(r'^policy +\d', result.stdout, re.MULTILINE) and 'Saved' not in result.stdout
    told = last_error_of(result)
    assert told.startswith(f'--output_dir: cannot write to {tmp_path}: File too large; ')
    assert f'`./launch.py evaluate {run} --output_dir ANOTHER`' in told


def test_an_output_directory_that_cannot_be_is_refused_before_the_work(run, tmp_path, monkeypatch):
    monkeypatch.setattr(measure, 'load_models', lambda *_: pytest.fail('the models are loaded'))
    (tmp_path / 'file').touch()
    for directory, reason in [
        (f'{tmp_path}/file/new', f'cannot write to {tmp_path}/file/new: Not a directory'),
        ('az://account/container/new', 'az://account/container/new is remote'),
    ]:
        told = error_of(invoke(f'evaluate {run} --output_dir {directory}'))
        assert told.startswith(f'--output_dir: {reason}') and 'give a' in told
