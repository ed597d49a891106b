"""synthetic/known_reward: which encodings it judges, and that it is fitted once."""

import pytest
import torch

from lm_human_preferences.errors import UserError
from lm_human_preferences.language import encodings
from lm_human_preferences.synthetic import known_reward
from lm_human_preferences.synthetic.known_reward import KnownReward


def test_other_encodings_are_not_judged():
    with pytest.raises(UserError, match=r"judges film reviews only.*not in 'test'"):
        KnownReward(encodings.Test)


@pytest.mark.parametrize('is_writable', [True, False])
def test_it_is_fitted_once_for_all_processes(tmp_path, monkeypatch, is_writable):
    """To the bit what was fitted; where the cache cannot be written, each process fits it."""
    cache = tmp_path / 'cache'
    if not is_writable:
        cache.touch()
    monkeypatch.setenv('LMHP_CACHE', str(cache))
    fits = []

    def fit():
        fits.append(torch.rand(3, 51, 51, dtype=torch.float64))
        return fits[-1]

    monkeypatch.setattr(known_reward, '_fit', fit)
    # Without its functools.cache, as in other processes.
    monkeypatch.setattr(known_reward, '_weights', known_reward._weights.__wrapped__)
    found = [KnownReward(encodings.Reviews).weights for _ in range(2)]
    assert len(fits) == (1 if is_writable else 2)
    assert torch.equal(found[0], fits[0])
    assert torch.equal(found[1], fits[-1])


def test_it_is_where_it_is_asked_to_be():
    assert KnownReward(encodings.Reviews, device='meta').weights.device.type == 'meta'
    assert KnownReward(encodings.Reviews).weights.device.type != 'meta'
