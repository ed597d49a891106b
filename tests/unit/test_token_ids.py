"""labels/texts/token_ids: labels of token ids of another encoding than the model's."""

import json
import re

import pytest
from label_page import ByteEncoder
from query_sequences import sequences_of
from sample_files import label_hparams
from tiny_tokenisers import write_words

from lm_human_preferences.errors import UserError
from lm_human_preferences.labels import training_data
from lm_human_preferences.labels.texts import token_ids
from lm_human_preferences.language import datasets, encodings
from lm_human_preferences.language.texts import tokenisers

WORDS = ['the', 'film', 'was', 'good', 'bad', 'a', 'b']


@pytest.fixture
def own(tmp_path):
    return tokenisers.read(write_words(tmp_path / 'model', WORDS))


@pytest.fixture(autouse=True)
def main_has_letters(monkeypatch):
    letters = encodings.Encoding('main', n_vocab=27, eot_token=26)
    monkeypatch.setattr(encodings, 'Main', letters)


def letters(text, length):
    encoder = encodings.Test.get_encoder()
    return (encoder.encode(text) + [encoder.padding_token] * length)[:length]


def words(text, length):
    spelled = [space + word for word in WORDS for space in ('', ' ') if len(space + word) > 1]
    ids = {'a': 64, 'b': 65, **{word: 256 + i for i, word in enumerate(spelled)}}
    tokens = [ids[word] for word in re.findall(' ?[a-z]+', text)]
    return (tokens + [256 + len(spelled) + 1] * length)[:length]


def load(tmp_path, labels, encoding):
    path = tmp_path / 'labels.json'
    path.write_text(json.dumps(labels))
    return training_data.load_labels(label_hparams(path), encoding)[:2]


def label_of(encoded, *texts, best=0, **more):
    query, *samples = texts
    fields = {f'sample{i}': encoded(text, 4) for i, text in enumerate(samples)}
    return {'query': encoded(query, 5), **fields, 'best': best, **more}


def rows(labels):
    return {field: values.tolist() for field, values in labels.items()}


def test_ids_of_gpt2_are_read_as_texts(tmp_path, own):
    labels, notes = load(tmp_path, [label_of(letters, 'a', 'b', 'a', best=1)], own)
    assert rows(labels) == {
        'query': [words('a', 3)],
        'sample0': [words('b', 2)],
        'sample1': [words('a', 2)],
        'best': [1],
    }
    assert notes == [
        'Num labels found in source: 1',
        f"Token ids of encoding 'main' were read as texts, in '{own.name}'",
    ]


def test_a_query_that_only_ends_a_text_is_empty():
    """A response that does is not: the end is what was sampled."""
    encoder = ByteEncoder()
    encoder.eot_token = ord('.')
    label = {'query': [ord('.'), 256], 'sample': [ord('.'), 256]}
    texts = [token_ids.text_of(label[field], field, encoder) for field in label]
    assert texts == ['', '.']


def test_ids_that_say_whose_they_are_are_taken_as_they_are(tmp_path, own):
    label = {'query': words('the film', 3), 'sample0': words('good', 2), 'best': 0}
    label |= {'sample1': words('bad', 2), 'encoding': own.name}
    labels, notes = load(tmp_path, [label], own)
    assert rows(labels)['sample1'] == [words('bad', 2)]
    assert notes == ['Num labels found in source: 1']
    with pytest.raises(UserError, match=f'ids of encoding {own.name}, not test: export these'):
        load(tmp_path, [label], encodings.Test)


@pytest.mark.parametrize(
    'change, told',
    [
        ({'query': [0, 99]}, "label 1, field 'query' must be token ids 0 to 26, or 27 for padding"),
        ({'best': 2}, "label 1, field 'best' must be a whole number from 0 to 1, not 2"),
    ],
)
def test_damage_is_told(tmp_path, own, change, told):
    label = label_of(letters, 'a', 'b', 'a')
    with pytest.raises(UserError, match=rf'^--labels.source .*labels.json, {re.escape(told)}'):
        load(tmp_path, [label, {**label, **change}], own)


def test_queries_of_labels_of_gpt2_are_read_as_texts(own):
    encoder = own.get_encoder()
    labels = [letters('a', 4)]
    dataset = datasets.Dataset('x', lambda mode, seed, shuffle: iter(labels), is_new=False)
    options = dict(mode='train', encoder=encoder, repeat_count=1, start_token=own.eot_token)
    found = sequences_of(dataset, 3, **options)
    assert list(found) == [words('a', 3)]
