"""synthetic/known_reward: which encodings it judges."""

import pytest
import torch
from tiny_tokenisers import write_byte_level, write_words

from lm_human_preferences.datasets.reviews import WORDS
from lm_human_preferences.errors import UserError
from lm_human_preferences.language import encodings, tokenisers
from lm_human_preferences.synthetic.known_reward import KnownReward


def test_a_tokeniser_with_the_words_of_reviews_is_judged_alike(tmp_path):
    own = tokenisers.read(write_words(tmp_path, ['something', *reversed(WORDS)]))
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
        lambda path: write_words(path, WORDS[1:]),
        # a token for each word, but those have their space before them
        lambda path: write_byte_level(path, [' '.join(WORDS)] * 9, size=5000),
    ],
)
def test_other_tokenisers_are_not(tmp_path, write):
    with pytest.raises(UserError, match=r"judges film reviews only.*not 'tokenizer-"):
        KnownReward(tokenisers.read(write(tmp_path)))
