"""Label types against the recordings in reward_training/label_types.npz and .json."""

import numpy as np
import pytest
import torch
from compare import assert_close
from golden_data import json_if_there, load_npz, npz_keys, under

from lm_human_preferences import label_types
from lm_human_preferences.utils.core import mean_and_std

NAMES = json_if_there('reward_training', 'label_types.json', default={})
LOSSES = sorted({key.split('/')[0] for key in npz_keys('reward_training', 'label_types.npz')})
DTYPES = {
    'int32': torch.int64,
    'float32': torch.float32,
}  # the port's token ids and indices are int64


def recorded_reward(queries, responses):
    return 0.05 * queries.float().sum(1) + 0.1 * responses.float().sum(1) - 1


def case_of(name):
    case = under(load_npz('reward_training', 'label_types.npz'), f'{name}/')
    labels = {
        field: torch.from_numpy(values.astype(np.int64) if values.dtype.kind == 'i' else values)
        for field, values in under(case, 'labels/').items()
    }
    return case, labels


@pytest.mark.parametrize('scores', [[0.1] * 9, [3.0], [1.0, 2.0, 3.0]])
def test_ratings_or_rewards_that_are_all_alike_have_no_correlation(scores):
    """The last batch may be of a single label; a NaN would count as a damaged log."""
    labels = {'score': torch.tensor(scores)}
    stats = label_types.get('scalar_rating').loss_of(torch.full((len(scores), 1), 0.7), labels)
    assert stats['corr'] == 0


@pytest.mark.parametrize('name', LOSSES)
def test_loss(name):
    case, labels = case_of(name)
    stats = label_types.get(name).loss(recorded_reward, labels)
    recorded = under(case, 'stats/')
    assert set(stats) == set(recorded)
    for stat, value in recorded.items():
        assert_close(stats[stat], value, rtol=1e-5, name=stat)


@pytest.mark.parametrize('name', LOSSES)
def test_target_scales(name):
    case, labels = case_of(name)
    scales = label_types.get(name).target_scales(labels)
    assert (scales is None) == bool(case['target_scales_is_none'])
    if scales is not None:
        assert_close(scales, case['target_scales'], rtol=1e-5)
        mean, std = mean_and_std(scales)
        assert_close(mean, case['target_mean'], rtol=1e-5)
        assert_close(std, case['target_std'], rtol=1e-5)


@pytest.mark.parametrize(
    'name', [name for name, case in NAMES.items() if 'question_schemas' in case]
)
def test_schemas(name):
    case = NAMES[name]
    lengths = {field == 'query': shape[0] for field, (_, shape) in case['question_schemas'].items()}
    label_type = label_types.get(name)
    questions = label_type.question_schemas(
        query_length=lengths[True], response_length=lengths[False]
    )
    for ours, recorded in (
        (questions, 'question_schemas'),
        (label_type.label_schemas(), 'label_schemas'),
    ):
        assert {field: (schema.dtype, list(schema.shape)) for field, schema in ours.items()} == {
            field: (DTYPES[dtype], shape) for field, (dtype, shape) in case[recorded].items()
        }


@pytest.mark.parametrize(
    'name', [name for name, case in NAMES.items() if 'question_schemas' not in case]
)
def test_odd_names(name):
    case = NAMES[name]
    if 'ok' in case:
        schemas = label_types.get(name).question_schemas(query_length=5, response_length=7)
        assert list(schemas) == case['ok']
        return
    with pytest.raises(ValueError, match=r'^--labels.type .* best_of_N .*, scalar_rating, scalar_'):
        label_types.get(name)


@pytest.mark.parametrize(
    'name, number, order, expected',
    [
        ('best_of_4', 4, (2, 0, 3, 1), 1),
        ('best_of_4', 0, (2, 0, 3, 1), 'tie'),
        ('scalar_rating', 1, (0,), 1),
        # 1 is for the first that is shown; a difference is how much better the second sample is
        ('scalar_compare', 1, (0, 1), -4),
        ('scalar_compare', 1, (1, 0), 4),
        ('scalar_compare', 5, (1, 0), 0),
    ],
)
def test_a_number_means_what_is_shown_there(name, number, order, expected):
    label_type = label_types.get(name).allow_ties()
    assert label_type.control.accepts([number])
    assert label_type.answer_of([number], order) == expected


def test_a_label_has_up_to_a_thousand_responses():
    assert len(label_types.get('best_of_1000').samples) == 1000
    with pytest.raises(ValueError, match='up to 1000'):
        label_types.get('best_of_1001')
