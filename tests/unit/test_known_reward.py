"""synthetic/known_reward: which encodings it judges, and that it is fitted once."""

import pytest
import torch
from tiny_tokenisers import write_byte_level, write_words

from lm_human_preferences.datasets.reviews import WORDS
from lm_human_preferences.errors import UserError
from lm_human_preferences.language import encodings, tokenisers
from lm_human_preferences.synthetic import known_reward
from lm_human_preferences.synthetic.known_reward import KnownReward


def test_a_tokeniser_with_the_words_of_reviews_is_judged_alike(tmp_path):
    words = [word for word in reversed(WORDS) if word != 'today']  # not all of them
    own = tokenisers.read(write_words(tmp_path, ['something', *words]))
    texts = [('the film was', 'great indeed'), ('overall the plot was', 'bad')]

    def scores(encoding):
        encoder = encoding.get_encoder()
        columns = []
        for text in zip(*texts):
            rows = [encoder.encode(part) for part in text]
            rows = [row + [encoder.padding_token] * (4 - len(row)) for row in rows]
            columns.append(torch.tensor(rows))
        return KnownReward(encoding).score(*columns)

    assert torch.equal(scores(own), scores(encodings.Reviews))


@pytest.mark.parametrize(
    'write',
    [
        lambda path: write_words(path, ['something', 'else', *WORDS[:2]]),
        # a token for each word, but those have their space before them
        lambda path: write_byte_level(path, [' '.join(WORDS)] * 9, size=5000),
    ],
)
def test_other_tokenisers_are_not(tmp_path, write):
    with pytest.raises(UserError, match=r"judges film reviews only.*not 'tokenizer-"):
        KnownReward(tokenisers.read(write(tmp_path)))


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
