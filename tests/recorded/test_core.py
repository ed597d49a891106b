"""utils.core against the recordings in utils.npz and utils.json."""

import re

import numpy as np
import pytest
import torch
from compare import assert_close, assert_equal, logprobs_from_logits, tokens
from golden_data import json_if_there, load_json, load_npz, npz_keys, under

from lm_human_preferences.language.networks import vocabulary
from lm_human_preferences.utils import core

EPSILON = 1e-8  # of whiten


def _groups(kind):
    names = {key.split('/')[0] for key in npz_keys('utils.npz')}
    return sorted(name for name in names if re.fullmatch(kind, name))


def _case(name):
    return under(load_npz('utils.npz'), f'{name}/')


@pytest.mark.parametrize(
    'case', json_if_there('utils.json', default={}).get('exact_div', ()), ids=str
)
def test_exact_div(case):
    if 'ok' in case:
        assert core.exact_div(case['a'], case['b']) == case['ok']
    else:
        with pytest.raises((ValueError, ZeroDivisionError)) as caught:
            core.exact_div(case['a'], case['b'])
        assert (caught.type.__name__, str(caught.value)) == (case['error'], case['message'])


def test_ceil_div_as_recorded():
    for case in load_json('utils.json')['ceil_div']:
        assert core.ceil_div(case['a'], case['b']) == case['ok'], case


@pytest.mark.parametrize('name', _groups(r'whiten\d+'))
def test_whiten(name):
    case = _case(name)
    x = torch.from_numpy(case['x'])
    # A variance near epsilon, or near the rounding of a large mean, turns rounding errors into
    # differences.
    largest = float(np.abs(case['x']).max())
    noise = case['x'].astype(np.float64).var() < max(100 * EPSILON, 1e-5 * largest**2)
    for shift_mean, key in ((True, 'shift_mean_true'), (False, 'shift_mean_false')):
        whitened = core.whiten(x, shift_mean=shift_mean)
        assert_close(whitened, case[key], rtol=1e-5, atol=1e-3 if noise else 2e-6, name=key)


@pytest.mark.parametrize('value, count', [(0.1, 1), (0.1, 1024), (1234.5678, 100), (0.0, 8)])
def test_equal_numbers_are_whitened_to_nothing(value, count):
    """A mean that is off by rounding would be divided by the root of epsilon."""
    values = torch.full((2, count), value)
    values[1] = 7
    mask = torch.tensor([[True], [False]]).expand_as(values)
    assert_equal(core.whiten(values, mask=mask), torch.zeros(2, count))
    kept = core.whiten(values, shift_mean=False, mask=mask)
    assert_equal(kept, values.masked_fill(~mask, 0))


@pytest.mark.parametrize('name', _groups(r'logits\d+'))
def test_entropy_and_logprobs(name):
    case = _case(name)
    logits = torch.from_numpy(case['logits'])
    rounding = 1e-7 * max(
        1, float(np.abs(case['logits']).max())
    )  # the original took a difference of such numbers
    labels = tokens(case['labels'])
    # Logits are a product with the embedding there.
    one_hot = torch.eye(logits.shape[-1])
    fused, entropies = vocabulary.logprobs_and_entropies(logits, one_hot, labels)
    assert_close(entropies, case['entropy_from_logits'], rtol=1e-5, atol=rounding)
    assert_close(fused, case['logprobs_from_logits'], rtol=1e-5, atol=1e-7)
    logprobs = logprobs_from_logits(logits=logits, labels=labels)
    assert_close(logprobs, case['logprobs_from_logits'], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize('name', _groups('logits_inf'))
def test_infinite_logits(name):
    case = _case(name)
    logits = torch.from_numpy(case['logits'])
    # The label is not recorded; of all labels, only the third has this log-probability.
    logprobs = logprobs_from_logits(logits=logits, labels=torch.tensor([2]))
    assert_close(logprobs, case['logprobs'], rtol=1e-5)


@pytest.mark.parametrize('name', _groups(r'index_each\d+'))
def test_index_each(name):
    case = _case(name)
    assert_equal(core.index_each(torch.from_numpy(case['a']), tokens(case['ix'])), case['y'])


@pytest.mark.parametrize('name', _groups(r'pearson_r\d+'))
def test_pearson_r(name):
    case = _case(name)
    found = core.pearson_r(torch.from_numpy(case['x']), torch.from_numpy(case['y']))
    assert_close(found, case['r'], rtol=1e-5)


def test_a_sample_is_where_its_number_is_in_a_cdf_of_any_scale():
    size = 100_000
    cdf = torch.ones(4, size).cumsum(-1, dtype=torch.float64) / 7
    uniform = torch.tensor([0, 0.1, 0.7, 1], dtype=torch.float64)
    draws = core.sample_from_cdf(cdf, uniform)
    assert (draws - uniform * size).abs().max() <= 1


@pytest.mark.parametrize('size', [4097, 5003, 5120])
def test_a_sample_of_a_large_vocabulary_is_that_of_one_cdf(size):
    """The last piece of a vocabulary may be a short one, and pieces may be impossible."""
    torch.manual_seed(0)
    probs = (3 * torch.randn(500, size)).softmax(-1)
    probs[:100, :600] = probs[100:200, -600:] = 0
    uniform = torch.rand(500, dtype=torch.float64)
    uniform[::100] = 0
    cdf = probs.cumsum(-1, dtype=torch.float64)
    draws, sums = core.sample_from_probs(probs, uniform)
    assert_equal(draws, core.sample_from_cdf(cdf, uniform))
    assert_close(sums, cdf[:, -1], rtol=5e-7)  # pieces are added up in float32
    assert probs.gather(1, draws[:, None]).all()
    # Where there is nothing to draw, as after a loss that is not a number, it is some word.
    assert (core.sample_from_probs(probs * torch.nan, uniform)[0] == size - 1).all()


def test_seeds_of_ranks_differ_and_repeat():
    draws = []
    for rank in (0, 1, 0):
        core.set_seed(7, rank)
        draws.append((np.random.random(), torch.rand(()).item()))
    assert draws[0] == draws[2] != draws[1]
