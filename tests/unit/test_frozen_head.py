"""A head on frozen hidden states: its fit against closed forms, its doubt, its validation."""

import dataclasses
import json
import math
import pathlib
from types import SimpleNamespace
from unittest import mock

import pytest
import safetensors.torch
import torch
from experiments import resolved
from ranks import on_ranks

from lm_human_preferences import label_types, lm_tasks, ppo, rewards
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import UserError
from lm_human_preferences.language import encodings
from lm_human_preferences.lm_tasks import TaskHParams
from lm_human_preferences.plan.phases import reward_phase
from lm_human_preferences.policy import Policy
from lm_human_preferences.reward_sources.frozen_head import fitting, head, posterior
from lm_human_preferences.reward_sources.frozen_head import reward as frozen_reward
from lm_human_preferences.reward_sources.frozen_head.reward import (
    FrozenReward,
    checked,
    probe_of,
)
from lm_human_preferences.trainers.additions import head_training

TYPES = {'best_of_2': 2, 'best_of_4': 4, 'scalar_rating': 1, 'scalar_compare': 2}


def made_labels(name, rewards, noise=0.0):
    """Return labels of a type by rewards (labels, n), each about texts of its own."""
    label_type = label_types.get(name)
    answers = label_type.simulate(rewards + noise * torch.randn_like(rewards))
    texts = dict.fromkeys(('query', *label_type.samples), torch.arange(len(rewards))[:, None])
    return label_type, {**texts, **answers}


def problem_of(name, count=40, width=6):
    torch.manual_seed(1)
    x = torch.randn(count, TYPES[name], width, dtype=torch.float64)
    label_type, labels = made_labels(name, x @ torch.randn(width, dtype=torch.float64), noise=1)
    return posterior.Problem(x, posterior.standardized(labels, label_type)[0], label_type)


def test_a_single_choice_by_hand():
    """Of prior w^2 / 2 and likelihood 1 / (1 + exp(-w)): w = 1 / (1 + exp(w))."""
    labels = {'best': torch.tensor([0]), 'query': torch.zeros(1, 1)}
    x = torch.tensor([[[1.0], [0.0]]], dtype=torch.float64)
    problem = posterior.Problem(x, labels, label_types.get('best_of_2'))
    weight, bias, known, doubt = posterior.posterior(problem, 1.0).values()
    assert doubt == 1 and weight.item() == pytest.approx(0.4010581, abs=1e-5)
    assert bias.item() == pytest.approx(0, abs=1e-9)
    chance = 1 / (1 + math.exp(-weight.item()))
    variance = 1 / (1 + chance * (1 - chance))
    assert 1 - known.square().sum().item() == pytest.approx(variance, abs=1e-6)


def test_ratings_are_ridge_regression():
    problem, strength = problem_of('scalar_rating'), 0.7
    x, y = problem.features[:, 0], problem.labels['score']
    assert y.mean().item() == pytest.approx(0, abs=1e-9)
    assert y.square().mean().item() == pytest.approx(1)
    x = x - x.mean(0)
    expected = torch.linalg.solve(x.T @ x + strength * torch.eye(x.shape[1]), x.T @ y)
    weight, bias, _, doubt = posterior.posterior(problem, strength).values()
    torch.testing.assert_close(weight, expected, atol=1e-5, rtol=1e-5)
    mean = (y - problem.features[:, 0] @ weight).mean().item()
    assert bias.item() == pytest.approx(mean, abs=1e-4)
    # The most probable noise, of y ~ N(0, noise (1 + x x' / strength)): 39 are free of the bias
    inverse = torch.linalg.inv(torch.eye(len(y)) + x @ x.T / strength)
    noise = (y @ inverse @ y / 39).item()
    assert doubt.item() == pytest.approx((noise / strength) ** 0.5, rel=1e-4)


@pytest.mark.parametrize('name', ['scalar_rating', 'scalar_compare'])
def test_labels_teach_the_same_in_every_unit(name, monkeypatch):
    monkeypatch.setattr(fitting, 'STRENGTHS', (3.0, 0.3))
    torch.manual_seed(4)
    x, others = torch.randn(30, TYPES[name], 8), torch.randn(50, 8)
    label_type, labels = made_labels(name, 2 * x[..., 0] - x[..., 1], noise=0.5)
    origin = 1000 if name == 'scalar_rating' else 0
    found = []
    for unit in (1, 100):
        values = {label_type.field: unit * (labels[label_type.field].double() + origin)}
        of_unit = {**labels, **values}
        fitted = fitting.fit_head(x, of_unit, label_type, others, torch.arange(30))
        scores, deviations = fitted.head(others.double())
        found.append((scores / unit, deviations / unit, fitted.strength, fitted.gain))
        found[-1] += (fitted.prediction.agreement, fitted.head.usual / unit)
    assert found[0][4] > 0.6 and found[0][1].mean() < 1
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('name', ['best_of_4', 'scalar_compare'])
def test_the_doubt_is_the_inverse_of_the_curvature(name):
    problem, strength = problem_of(name), 0.3
    weight, bias, known, _ = posterior.posterior(problem, strength).values()

    def loss(weight):
        of_labels = problem.surprise(problem.features @ weight + bias)
        return of_labels + strength / 2 * weight.square().sum()

    assert torch.autograd.functional.jacobian(loss, weight).abs().max() < 1e-4
    curvature = torch.autograd.functional.hessian(loss, weight)
    x = torch.randn(5, len(weight), dtype=torch.float64)
    expected = (x @ torch.linalg.inv(curvature) * x).sum(1)
    left = x.square().sum(1) - (x @ known.T).square().sum(1)
    torch.testing.assert_close(left / strength, expected)


def test_labels_of_one_query_are_left_out_together():
    subjects = torch.arange(30).repeat(2)
    fold = fitting.folds_of(subjects)
    assert torch.equal(fold[:30], fold[30:])
    assert torch.bincount(fold).tolist() == [6] * fitting.FOLDS
    assert fitting.folds_of(subjects[:3]).unique().tolist() == [0, 1, 2]


def test_ratings_that_are_all_the_same_teach_nothing():
    x = torch.randn(12, 1, 8)
    label_type, labels = made_labels('scalar_rating', torch.full((12, 1), 5.0))
    fitted = fitting.fit_head(x, labels, label_type, torch.randn(9, 8), torch.arange(12))
    assert fitted.head.weight.norm() < 1e-5
    assert fitted.gain == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    'name, is_random', [('best_of_4', False), ('best_of_4', True), ('scalar_rating', False)]
)
def test_it_knows_whether_it_has_learned(name, is_random):
    torch.manual_seed(2)
    x = torch.randn(120, TYPES[name], 8)
    rewards = torch.randn(x.shape[:2]) if is_random else 2 * x[..., 0] - x[..., 1]
    label_type, labels = made_labels(name, rewards, noise=0.5)
    others = torch.randn(50, 8)
    fitted = fitting.fit_head(x, labels, label_type, others, torch.arange(120))
    doubts = fitted.head(torch.cat([x.flatten(0, 1), others]).double())[1]
    assert fitted.head.usual == pytest.approx(doubts.mean().item())
    assert (fitted.warning() is not None) == is_random
    if not is_random:
        scores, spread = fitted.head.to(torch.device('cpu'))(x)
        assert torch.corrcoef(torch.stack([scores.flatten(), rewards.flatten()]))[0, 1] > 0.9
        far = fitted.head.to(torch.device('cpu'))(10 * x)[1]
        assert (far > spread).all()  # which no label has spoken about


def test_the_least_gain_counts_that_folds_learn_from_each_other():
    """Student's t: 97.5 % of 119 degrees of freedom are below 1.9801; 10 folds: 1 + 10 / 9."""
    gains = torch.randn(120)
    expected = 1.9801 * gains.std().item() * math.sqrt((1 + 10 / 9) / 120)
    assert fitting.least_gain(gains) == pytest.approx(expected, rel=1e-4)
    assert fitting.least_gain(gains[:9]) is None


def test_the_correlation_of_dice_is_0(monkeypatch):
    """A mean over other folds is the lower, the higher what is left out."""
    monkeypatch.setattr(fitting, 'STRENGTHS', (3.0,))
    torch.manual_seed(6)
    found = []
    for _ in range(12):
        x = torch.randn(5, 1, 6)
        label_type, labels = made_labels('scalar_rating', torch.randn(5, 1))
        fitted = fitting.fit_head(x, labels, label_type, x[:, 0], torch.arange(5))
        assert fitted.prediction.is_cross_validated and 'interval' not in str(fitted)
        found.append(fitted.prediction.agreement)
    mean = torch.tensor(found).mean().item()
    assert abs(mean) < 3.3 * torch.tensor(found).std().item() / math.sqrt(len(found))


def test_labels_that_are_all_connected_tell_no_number():
    label_type, labels = made_labels('best_of_2', torch.randn(3, 2))
    x = torch.randn(3, 2, 4)
    fitted = fitting.fit_head(x, labels, label_type, torch.randn(9, 4), torch.zeros(3).long())
    assert (fitted.prediction, fitted.gain, fitted.least_gain) == (None, None, None)
    assert fitted.head.weight.norm() > 0
    assert fitted.loss == pytest.approx(math.log(2))  # of guessing
    assert 'all labels are connected' in str(fitted)
    assert 'labels about at least 10 queries' in str(fitted.warning())


def test_features_are_means_and_a_last_state():
    states = torch.arange(24.0).view(2, 2, 3, 2)
    real = torch.tensor([[True, True, False], [False, False, False]])
    found = head.pooled(states, real)
    assert found[0].tolist() == [1, 2, 2, 3, 13, 14]
    assert found[1].tolist() == [6, 7, 6, 7, 18, 19]  # behind the query


def test_blocks_of_shallow_models_are_there():
    assert [head.blocks_of(n) for n in (1, 2, 12, 30)] == [(0, 0), (1, 1), (7, 11), (18, 27)]


@pytest.fixture
def reference():
    torch.manual_seed(3)
    return Policy(lm_tasks.initial_model('test'), scope='ref_policy', only_samples=True)


@pytest.fixture
def responses(reference):
    """Queries (4, 3) in pairs of equal ones, and responses (4, 4) to them, padded."""
    padding = reference.padding_token
    queries = torch.tensor([[1, 2, padding], [3, 4, 5]]).repeat_interleave(2, 0)
    rows = [[6, 7, 8, 9], [1, 2, padding, padding], [5, 5, 5, padding], [0, 1, 2, 3]]
    tokens = torch.tensor(rows)
    return queries, tokens


def random_head(reference):
    width = 3 * reference.model.sizes.n_embd
    found = head.unfitted(torch.randn(50, width))
    numbers = {'doubt': torch.tensor(0.5), 'usual': torch.tensor(0.3)}
    return dataclasses.replace(found, weight=torch.randn(width), **numbers)


def test_the_deviations_of_scores_are_logged_of_penalties_too():
    task = TaskHParams(query_length=1, response_length=1, penalty_reward_value=-7)
    task.truncate_token = 1  # the second response has none
    tokens, zeros = torch.tensor([[1], [2]]), torch.zeros(2, 1)
    encoder, found = encodings.Test.get_encoder(), {'score_std': torch.tensor([1.0, 2.0])}
    reward = SimpleNamespace(encoder=encoder, padding_token=encoder.padding_token, blocks=())
    reward.score_and_stats = lambda *_: (torch.tensor([3.0, 3.0]), found)
    scores, scored, stats = rewards.make_score_fn(task, reward)(tokens, tokens)
    logged = {'logprobs': zeros, 'ref_logprobs': zeros, 'values': zeros, 'scores': scores}
    rollout = ppo.Rollout(tokens, tokens, scored_responses=scored, **logged)
    assert 'objective/score_std' not in ppo.step_stats(rollout, 0.1, zeros, {})
    rollout.score_std = stats['score_std']
    found = ppo.step_stats(rollout, 0.1, zeros, {})
    assert (found['objective/score_std'].item(), found['objective/score'].item()) == (1.5, -2)


@pytest.mark.parametrize('same', [1, 2])
def test_the_references_own_pass_gives_the_reward(reference, responses, same):
    reward = FrozenReward(random_head(reference), reference, pessimism=0.5)
    states = reference.analyze_responses(*responses, same, reward.blocks)['states']
    reads = []
    reference.states = lambda *args: reads.append(args)
    found = reward.score_and_stats(*responses, states)
    assert not reads
    del reference.states
    alone, stats = reward.score_and_stats(*responses)
    torch.testing.assert_close(found, (alone, stats), atol=1e-5, rtol=1e-4)
    several = reward.get_rewards(responses[0][::2], responses[1].view(2, 2, -1))
    torch.testing.assert_close(several.flatten(), alone, atol=1e-5, rtol=1e-4)
    reward.pessimism = 0
    expected = alone + 0.5 * (stats['score_std'] - 0.3)
    torch.testing.assert_close(reward.get_rewards(*responses), expected)


def test_states_are_those_of_transformers(reference, responses):
    """The inputs of a block are transformers' hidden states, from before each token on."""
    theirs = reference.trained_model.as_transformers(reference.model)
    states = reference.states(*responses, 2, (0, 1))
    for row, (query, response) in enumerate(zip(*responses, strict=True)):
        real = [each[each != reference.padding_token] for each in (query, response)]
        hidden = theirs(torch.cat(real)[None], output_hidden_states=True).hidden_states
        for block in range(2):
            expected = hidden[block][0, len(real[0]) - 1 : -1]
            found = states[block, row, : len(real[1])]
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    'largest, others, is_same',
    [(5.0, 0.03, True), (0.0, 0.3, False), (0.0, math.nan, False)],
)
def test_a_model_is_known_by_standardised_features(
    reference, monkeypatch, largest, others, is_same
):
    torch.manual_seed(8)
    deviations = torch.rand(300) + 0.5
    here = torch.randn(300)
    here[0] = 10_000
    there = here + others * deviations * torch.randn(300)
    there[0] = here[0] + largest * deviations[0]
    monkeypatch.setattr(frozen_reward, 'probe_of', lambda reference: here)
    fitted = dataclasses.replace(head.unfitted(torch.zeros(1, 300)), scale=deviations * 300**0.5)
    about = {'probe': there.tolist(), 'initial_model': 'test'}
    if is_same:
        checked('here', fitted, about, reference, 0.0)
        return
    with pytest.raises(UserError, match='here is a head on hidden states of test'):
        checked('here', fitted, about, reference, 0.0)


def test_all_samples_that_are_wanted_set_the_scale_and_a_bar_counts_what_is_read(
    reference, responses, monkeypatch
):
    settings = {'features': 'frozen', 'normalize_samples': 160, 'rollout_batch_size': 32}
    phase = reward_phase(resolved('train_reward', 'test', settings))
    assert len(head_training._sampled(phase, reference, Comm())) == 160
    bar = mock.MagicMock()
    monkeypatch.setattr(head_training, 'progress', bar)
    queries, answers = responses
    found = head_training._features_of_labels(reference, queries, answers.unsqueeze(1), Comm())
    assert found.shape == (4, 1, 3 * reference.model.sizes.n_embd)
    counted = bar.return_value.__enter__.return_value.update.call_args_list
    # Of queries 2 * (2 + 3), of responses 4 + 2 + 3 + 4
    assert bar.call_args.kwargs['total'] == sum(call.args[0] for call in counted) == 23


def test_ranks_share_one_head(reference, monkeypatch):
    phase = reward_phase(resolved('train_reward', 'test', {'features': 'frozen'}))
    samples = torch.randn(16, 3 * reference.model.sizes.n_embd)
    monkeypatch.setattr(head_training, '_sampled', lambda *args: samples)
    normalized = head_training._normalized

    def nearly(*args):  # as if each rank had another number of threads
        head = normalized(*args)
        return head.rescaled(1 + 1e-6 * torch.rand(()).item(), 0.0)

    monkeypatch.setattr(head_training, '_normalized', nearly)
    labels = {'query': torch.randint(9, (40, 3)), 'best': torch.randint(4, (40,))}
    labels.update({f'sample{i}': torch.randint(9, (40, 4)) for i in range(4)})
    first, second = on_ranks(2, lambda comm: head_training.fit(phase, reference, labels, comm))
    assert second[1:] == first[1:] and str(second) == str(first)
    torch.testing.assert_close(vars(second.head), vars(first.head), rtol=0, atol=0)


@pytest.fixture
def saved(reference, tmp_path):
    """Directory of a saved head, and the head."""
    made = random_head(reference)
    task = resolved('train_reward', 'test').task.to_nested_dict()
    about = {'probe': probe_of(reference).tolist(), 'initial_model': 'test', 'task': task}
    made.save(str(tmp_path), about)
    return str(tmp_path), made


def test_a_head_is_saved_with_its_model(reference, saved):
    directory, made = saved
    loaded, about = head.load(directory)
    torch.testing.assert_close(vars(loaded), vars(made.to(torch.device('cpu'))))
    checked(directory, loaded, about, reference, 0.0)
    other = Policy(lm_tasks.initial_model('test'), scope='ref_policy')
    nothing = {**about, 'probe': [math.nan] * len(about['probe'])}
    for said, model in ((about, other), (nothing, reference)):
        with pytest.raises(UserError, match=f'{directory} is a head on hidden states of test'):
            checked(directory, loaded, said, model, 0.0)


def test_files_that_were_not_written_here_are_damaged(saved):
    directory, made = saved
    file = pathlib.Path(directory, head.FROZEN_HEAD)
    whole = file.read_bytes()
    with safetensors.safe_open(file, 'pt') as opened:
        about = json.loads(opened.metadata()['about'])
    flipped = [bytearray(whole), bytearray(whole)]
    flipped[0][whole.index(b'initial_model') + 20] ^= 1
    flipped[1][-2] ^= 0x40
    contents = [whole[:-8], *flipped]
    tensors = {**vars(made), 'weight': made.weight.bool()}
    contents.append(safetensors.torch.save(tensors, {'about': json.dumps(about)}))
    for changed in ('[]', '"text"', json.dumps({**about, 'probe': [[0.5]]}), 100_000 * '['):
        contents.append(safetensors.torch.save(vars(made), {'about': changed}))
    for content in contents:
        file.write_bytes(content)
        with pytest.raises(UserError, match='is damaged: '):
            head.load(directory)


@pytest.mark.parametrize(
    'tensors, more, told',
    [
        ({'weight': lambda weight: weight * math.nan}, {}, 'the tensor weight must hold finite'),
        ({'known': lambda known: known[:, 1:]}, {}, 'the tensor known has the wrong shape'),
        ({'scale': torch.zeros_like}, {}, 'the tensor scale must be positive; doubt'),
        ({'doubt': torch.neg}, {}, 'the tensor scale must be positive; doubt'),
        ({}, {'probe': [[0.5]]}, 'the metadata of the head must have a valid initial_model, task'),
        ({}, {'task': {'policy': 5}}, '--query_length must be given'),
    ],
)
def test_heads_that_cannot_be_are_damaged(saved, tensors, more, told):
    """Even if their checksum is right."""
    directory, made = saved
    _, about = head.load(directory)
    changed = {name: change(getattr(made, name)) for name, change in tensors.items()}
    dataclasses.replace(made, **changed).save(directory, {**about, **more})
    with pytest.raises(UserError, match=f'is damaged: {told}'):
        head.load(directory)
