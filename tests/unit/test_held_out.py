"""Held-out labels: choosing them, predicting them, and a training with some."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import on_ranks

from lm_human_preferences import label_types
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.reward_options import HParams
from lm_human_preferences.labels import training_data
from lm_human_preferences.labels.agreement import clustered_interval
from lm_human_preferences.labels.held_out import parted, predict, split, subjects_of
from lm_human_preferences.language import encodings

PAIRS = label_types.get('best_of_2')
LETTERS = encodings.Test.get_encoder()


def pairs(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randint(26, (count, 4), generator=generator)  # noqa: E731
    best = torch.randint(2, (count,), generator=generator)
    return {'query': draw(), 'sample0': draw(), 'sample1': draw(), 'best': best}


def held_out_by(labels, share, encoder=LETTERS):
    numbered = {**labels, 'number': torch.arange(len(labels['query']))}
    mask = torch.zeros(len(labels['query']), dtype=torch.bool)
    mask[parted(numbered, PAIRS, share, encoder)[0]['number']] = True
    return mask


def test_a_query_is_held_out_by_its_text_alone():
    labels = pairs(4000)
    mask = held_out_by(labels, 0.1)
    assert 0.08 < mask.double().mean() < 0.12
    # Other answers, samples, order, padding, other labels beside them: the same queries.
    shuffled = torch.randperm(4000)
    some = {field: values[shuffled][:500] for field, values in labels.items()}
    some['best'], some['sample0'] = 1 - some['best'], some['sample1']
    some['query'] = torch.nn.functional.pad(some['query'], (0, 2), value=LETTERS.padding_token)
    assert held_out_by(some, 0.1).tolist() == mask[shuffled][:500].tolist()
    assert held_out_by(labels, 0.3)[mask].all()


def test_where_there_is_no_query_a_pair_in_any_order_is_held_out_as_a_whole():
    labels = pairs(500)
    labels['query'] = torch.tensor([[50256, 50259]]).expand(500, 2)  # as texts without one become
    swapped = {**labels, 'sample0': labels['sample1'], 'sample1': labels['sample0']}
    encoder: Any = SimpleNamespace(padding_token=50259, eot_token=50256, decode=str)
    mask, other = (held_out_by(each, 0.2, encoder) for each in (labels, swapped))
    assert 0.1 < mask.double().mean() < 0.3 and mask.tolist() == other.tolist()
    # The queries tell nothing apart, so the interval counts questions.
    prediction = predict(rewards_are_first_tokens, labels, PAIRS, 64, Comm())
    assert (prediction.queries, prediction.effective) == (500, 500)


def test_white_space_and_composed_accents_make_no_other_query():
    texts = ['the caf\u00e9 was', ' the  caf\u00e9 was\n', 'the cafe\u0301 was', 'the cafe was']
    encoder: Any = SimpleNamespace(
        padding_token=99, eot_token=98, decode=lambda tokens: ''.join(texts[i] for i in tokens)
    )
    numbers = torch.arange(4)[:, None]
    labels = {'query': numbers, 'sample0': numbers, 'sample1': numbers, 'best': numbers[:, 0]}
    assert subjects_of(labels, PAIRS, encoder).tolist() == [0, 0, 0, 1]
    about_one = {**labels, 'query': torch.zeros_like(numbers)}
    assert subjects_of(about_one, PAIRS, encoder).tolist() == [0, 0, 0, 1]
    ordered = {'sample0': torch.tensor([[0], [3], [3], [0]])}
    ordered['sample1'] = torch.tensor([[3], [0], [3], [0]])
    # The third connects what is about two other responses.
    assert subjects_of({**about_one, **ordered}, PAIRS, encoder).tolist() == [0, 0, 0, 0]
    apart = {'sample0': ordered['sample0'][:2], 'sample1': ordered['sample0'][:2]}
    two = {'query': torch.zeros(2, 1, dtype=torch.int64), **apart}
    assert subjects_of(two, PAIRS, encoder).tolist() == [0, 1]
    sides = []
    for share in torch.linspace(0.05, 0.9, 18).tolist():
        mask = held_out_by(labels, share, encoder)
        assert mask[:3].unique().numel() == 1
        sides.append(mask[0].item() == mask[3].item())
    assert not all(sides)


def hparams(share):
    result = HParams()
    result.override_from_dict({'labels.type': 'best_of_2', 'labels.held_out': share})
    return result


def test_split_loses_nothing():
    labels = pairs(203)
    train, held_out, (note,) = split(labels, hparams(0.25), LETTERS)
    mask = held_out_by(labels, 0.25)
    for field, values in labels.items():
        assert held_out[field].tolist() == values[mask].tolist()
        assert train[field].tolist() == values[~mask].tolist()
    count = int(mask.sum())
    assert note == f'Held out: {count} of 203 labels ({count} queries); training on {203 - count}'
    few = {field: values[mask] for field, values in labels.items()}
    with pytest.raises(UserError, match='--labels.held_out 0.25 leaves none of'):
        split(few, hparams(0.25), LETTERS)


def rewards_are_first_tokens(queries, responses):
    return responses[:, :, 0].float()


@pytest.mark.parametrize('size', [1, 3])
def test_predictions_do_not_depend_on_ranks_and_batches(size):
    labels = {
        'query': torch.zeros(4, 2, dtype=torch.int64),
        'sample0': torch.tensor([[5, 0], [1, 0], [9, 0], [2, 0]]),
        'sample1': torch.tensor([[4, 0], [2, 0], [3, 0], [7, 0]]),
        'best': torch.tensor([0, 1, 1, 1]),
    }
    for count, accuracy in ((4, 3 / 4), (1, 1.0)):
        some = {field: values[:count] for field, values in labels.items()}
        for found in on_ranks(
            size, lambda comm, some=some: predict(rewards_are_first_tokens, some, PAIRS, 2, comm)
        ):
            assert found is not None
            assert (found.labels, found.accuracy, found.chance) == (count, accuracy, 1 / 2)
            assert found.queries == min(count, 3)  # the second and the last are connected
    twice = {field: torch.cat([values, values]) for field, values in labels.items()}
    prediction = predict(rewards_are_first_tokens, twice, PAIRS, 2, Comm())
    assert prediction is not None and (prediction.labels, prediction.queries) == (8, 3)
    nothing = {field: values[:0] for field, values in labels.items()}
    assert predict(rewards_are_first_tokens, nothing, PAIRS, 2, Comm()) is None


@pytest.mark.parametrize(
    'name, rewards, answers, right',
    [
        ('best_of_4', [[0, 0, 0, 0], [1, 1, 0, 1], [1, 2, 2, 0]], [3, 1, 0], [1 / 4, 1 / 3, 0]),
        ('scalar_compare', [[1, 1], [0, 2], [2, 0]], [3.0, 0.5, 1.0], [1 / 2, 1, 0]),
    ],
)
def test_among_equal_rewards_each_answer_is_as_right(name, rewards, answers, right):
    label_type = label_types.get(name)
    labels = {label_type.field: torch.tensor(answers)}
    found = label_type.is_right(torch.tensor(rewards, dtype=torch.float32), labels)
    assert found.tolist() == pytest.approx(right)


NO_CORRELATION = 'no correlation with 12 labels: rewards or labels are all the same'


@pytest.mark.parametrize(
    'slope, scores, told',
    [
        (1e-8, range(12), NO_CORRELATION),
        (1.0, [3] * 12, NO_CORRELATION),
        (1.0, range(12), 'correlation 1.000 with 12 labels'),
    ],
)
def test_rewards_that_are_all_the_same_have_no_correlation(slope, scores, told):
    tokens = torch.arange(12)[:, None]
    labels = {'query': tokens, 'sample': tokens, 'score': torch.tensor(list(scores)).float()}
    rewards = lambda queries, responses: 5 + slope * responses[..., 0]  # noqa: E731
    found = predict(rewards, labels, label_types.get('scalar_rating'), 4, Comm())
    assert found is not None and str(found) == told
    assert found.interval() is None


@pytest.mark.parametrize('name', ['best_of_4', 'scalar_rating'])
def test_rewards_that_are_not_finite_predict_nothing(name):
    label_type = label_types.get(name)
    tokens = torch.ones(3, 1, dtype=torch.int64)
    labels = {field: tokens for field in ('query', *label_type.samples)}
    labels[label_type.field] = torch.tensor([0, 1, 1])
    not_finite = lambda queries, responses: responses[..., 0] * math.nan  # noqa: E731
    with pytest.raises(UserError, match='reward nan, which cannot be compared'):
        predict(not_finite, labels, label_type, 2, Comm())


def test_all_answers_to_one_question_are_together_in_the_interval():
    """Four labellers agree on nine of ten questions; the rewards get eight right."""
    query = torch.arange(10).repeat_interleave(4)[:, None]
    samples = {'sample0': torch.zeros(40, 1, dtype=torch.int64), 'sample1': query % 5 + 1}
    best = (query[:, 0] < 8).long()
    best[:2] = 0
    labels = {'query': query, **samples, 'best': best}
    best_of_2 = label_types.get('best_of_2')
    prediction = predict(rewards_are_first_tokens, labels, best_of_2, 16, Comm())
    assert prediction.accuracy == 0.75
    interval = clustered_interval([2] + [4] * 7 + [0] * 2, [4] * 10)
    assert prediction.interval() == pytest.approx(interval)
    told = 'as the labeller in 75.0 % of 40 labels (95 % interval 46.0 to 91.3 %, '
    assert str(prediction).startswith(told) and str(prediction).endswith('; chance is 50.0 %')


def test_simulated_labels_err_as_often_as_they_should():
    labels = {'best': torch.zeros(8000, dtype=torch.int64)}
    torch.manual_seed(0)
    wrong = training_data._with_errors(labels, label_types.get('best_of_4'), 0.4)['best'] != 0
    assert wrong.double().mean().item() == pytest.approx(0.4 * 3 / 4, abs=0.02)
    assert not labels['best'].any()
