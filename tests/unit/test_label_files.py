"""Label files: what is read, what is said of it, and one line for every mistake in them."""

import json
import math

import pytest
import torch
from label_folders import make_folder
from sample_files import label_hparams

from lm_human_preferences import label_types
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams import policy_options
from lm_human_preferences.labels import label_files, training_data
from lm_human_preferences.labels.labeller import Labeller
from lm_human_preferences.language import encodings

PADDING = 27
ANSWERS = {
    'best_of_2': {'best': 1},
    'scalar_rating': {'score': 0.5},
    'scalar_compare': {'difference': -2},
}


def label(label_type='best_of_2', **changes):
    samples = ['sample'] if label_type == 'scalar_rating' else ['sample0', 'sample1']
    return {
        'query': [0, 1, PADDING],
        **{name: [3, 4] for name in samples},
        **ANSWERS[label_type],
        **changes,
    }


def hparams(source, label_type='best_of_2', num_train=None, batch_size=2):
    settings = {'labels.type': label_type, 'labels.num_train': num_train}
    return label_hparams(source, **settings, batch_size=batch_size)


@pytest.fixture
def load(tmp_path):
    def write_and_load(labels, **settings):
        path = tmp_path / 'labels.json'
        path.write_text(labels if isinstance(labels, str) else json.dumps(labels))
        return training_data.load_labels(hparams(path, **settings), encodings.Test)[:2]

    return write_and_load


@pytest.mark.parametrize('label_type', ANSWERS)
def test_fields_become_batched_tensors(load, label_type):
    labels, _ = load(
        [label(label_type, note='kept aside'), label(label_type)], label_type=label_type
    )
    assert labels['query'].tolist() == [[0, 1, PADDING]] * 2
    assert labels['query'].dtype == torch.int64
    (answer,) = ANSWERS[label_type]
    assert labels[answer].tolist() == [ANSWERS[label_type][answer]] * 2
    assert labels[answer].dtype == (torch.int64 if answer == 'best' else torch.float32)
    assert 'note' not in labels


def test_the_first_num_train_labels_are_used(load):
    labels, notes = load([label(best=0), label(best=1), label(best=0)], num_train=2)
    assert labels['best'].tolist() == [0, 1] and notes == ['Num labels found in source: 3']


IDS = 'must be token ids 0 to 26, or 27 for padding'


@pytest.mark.parametrize(
    'change, told',
    [
        ({'query': [0, 1]}, 'must be 3 tokens, not 2'),
        ({'sample0': [0, 1.5]}, IDS),
        ({'sample0': [0, 28]}, IDS),
        ({'query': [27, 27, 27]}, 'is padding only'),
        ({'best': 2}, 'must be a whole number from 0 to 1, not 2'),
        ({'score': math.nan}, 'must be a number, not NaN'),
        ({'difference': 1e300}, 'must be a number, not 1e+300'),
    ],
)
def test_mistake_in_a_label(load, tmp_path, change, told):
    (field,) = change
    kinds = {'score': 'scalar_rating', 'difference': 'scalar_compare'}
    kind = kinds.get(field, 'best_of_2')
    with pytest.raises(UserError) as caught:
        load([label(kind), label(kind, **change)], label_type=kind)
    where = f'--labels.source {tmp_path}/labels.json: label 1, field {field!r}'
    assert str(caught.value) == f'{where} {told}'


@pytest.mark.parametrize(
    'count, settings, told',
    [
        (3, {'num_train': 4}, 'has 3 labels, too few for --labels.num_train 4'),
        (0, {}, 'has no labels'),
    ],
)
def test_a_file_with_too_few_labels_is_refused(load, tmp_path, count, settings, told):
    with pytest.raises(UserError) as caught:
        load([label()] * count, **settings)
    assert str(caught.value) == f'--labels.source {tmp_path}/labels.json {told}'


def test_answers_of_a_folder_are_checked_as_those_of_a_file_are(tmp_path):
    def labels_of(folder):
        with Labeller(folder, 'anna') as anna:
            answers = [anna.answer(question, 3, 1.0) for question in folder.questions.values()]
        return label_files.tensors_of(folder, answers)

    labels = labels_of(make_folder(tmp_path / 'good', 2))
    assert labels['best'].tolist() == [3, 3] and labels['sample2'].shape == (2, 4)
    with pytest.raises(UserError, match="bad, question .*, field 'query' must be token ids 0 to"):
        labels_of(make_folder(tmp_path / 'bad', 9, tokens=99))


@pytest.mark.parametrize(
    'name, told',
    [
        ('a.json', 'more than 3; give {option}too_long cut'),
        ('a.parquet', '{option}source {path} is Parquet, which is not read'),
    ],
)
def test_options_have_the_names_that_the_command_gives_them(tmp_path, name, told):
    """A policy's training calls them --rewards.train_new_model.labels.source and so on."""
    path = tmp_path / name
    path.write_text(json.dumps([{'prompt': 'abcd', 'chosen': 'b', 'rejected': 'c'}]))
    of_policy = hparams(path)
    policy_options.HParams().rewards.train_new_model = of_policy
    with pytest.raises(UserError) as caught:
        training_data.load_labels(of_policy, encodings.Test)
    option = '--rewards.train_new_model.labels.'
    assert f' {told.format(option=option, path=path)}' in f' {caught.value}'


@pytest.mark.parametrize('label_type', ANSWERS)
def test_generated_labels_like_small_token_ids(label_type):
    labels, notes, _ = training_data.load_labels(
        hparams('test', label_type=label_type, num_train=100), encodings.Test
    )
    assert notes == [] and {len(values) for values in labels.values()} == {100}
    kind = label_types.get(label_type)
    rewards = torch.stack([-labels[name].double().mean(1) for name in kind.samples], dim=1)
    expected = kind.simulate(rewards.float() / encodings.Test.n_vocab)
    torch.testing.assert_close(labels[kind.field], expected[kind.field])
