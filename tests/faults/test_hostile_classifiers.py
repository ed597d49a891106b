"""Damaged and malicious classifiers: each is one line, and nothing of theirs is executed."""

import json
import pickle
import random
import re
import shutil
from pathlib import Path

import fuzzing
import pytest
import torch
from tiny_classifiers import change_json, write_classifier

from lm_human_preferences.datasets.reviews import WORDS
from lm_human_preferences.errors import UserError
from lm_human_preferences.reward_sources.classifier import Classifier
from lm_human_preferences.reward_sources.texts import joined

WEIGHTS = 'model.safetensors'
CONFIG = 'config.json'
CODE = "from pathlib import Path\nPath('{}/executed').touch()\n"
VARIANTS = 30  # that are drawn


class Harmful:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


@pytest.fixture(scope='module')
def intact(tmp_path_factory):
    return Path(write_classifier(tmp_path_factory.mktemp('intact'), 'bert', hidden_size=16))


@pytest.fixture
def judged(intact, tmp_path):
    """Judges what `damage` makes of a copy of the directory: its scores, or the one line."""
    texts = [joined(WORDS[0], ' '.join(WORDS[3:6])), joined(WORDS[9], WORDS[1])]

    def judge(damage, number=0):
        directory = tmp_path / f'classifier{number}'
        shutil.copytree(intact, directory)
        damage(directory)
        said = None
        try:
            scores = fuzzing.confined(tmp_path, Classifier(str(directory)).score, texts)
            assert scores.shape == (2,) and scores.isfinite().all()
        except UserError as e:
            said = str(e)
            assert '\n' not in said and len(said) < 1000, said
        assert not (directory / 'executed').exists()
        shutil.rmtree(directory)
        return said

    return judge


def config(**changes):
    return lambda directory: change_json(directory / CONFIG, **changes)


def weights(change):
    def damage(directory):
        from safetensors.torch import load_file, save_file

        tensors = load_file(directory / WEIGHTS)
        change(tensors)
        save_file(tensors, directory / WEIGHTS, metadata={'format': 'pt'})

    return damage


def pickles(*names):
    def damage(directory):
        (directory / WEIGHTS).unlink()
        for name in names:
            (directory / name).write_bytes(pickle.dumps(Harmful(directory / 'executed')))

    return damage


def own_code(directory):
    (directory / 'modeling.py').write_text(CODE.format(directory))
    entry = {'AutoModelForSequenceClassification': 'modeling.Bert'}
    change_json(directory / CONFIG, auto_map=entry)


def code_of_the_tokeniser(directory):
    (directory / 'tokenization.py').write_text(CODE.format(directory))
    (directory / 'tokenizer.json').unlink()
    entry = {'AutoTokenizer': ['tokenization.Own', 'tokenization.Own']}
    change_json(directory / 'tokenizer_config.json', auto_map=entry, tokenizer_class='Own')


def token_without_a_row(directory):
    path = directory / 'tokenizer.json'
    content = json.loads(path.read_text())
    content['model']['vocab']['beyond'] = 1000
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    'damage, told',
    [
        (config(architectures=['BertForMaskedLM']), 'does not describe a sequence classifier'),
        (own_code, 'code of its own \\(auto_map\\); code is never run'),
        (code_of_the_tokeniser, 'its tokeniser cannot be read'),
        (config(hidden_size=32), r'bert\..* \(.*16.*\), the model needs \(.*32.*\)'),
        (config(id2label=None, num_labels=10**9), 'num_labels must be 1 to 10000'),
        (config(reward_constant=1e400), 'a text must get 1 finite scores'),
        (
            weights(lambda tensors: tensors['classifier.weight'][0, 0].fill_(torch.nan)),
            'classifier.weight has values that are not finite',
        ),
        (pickles('pytorch_model.bin', 'model.pt'), 'pickled weights are not read'),
        (pickles(WEIGHTS), 'is damaged or missing'),
        (token_without_a_row, 'the tokeniser has .* ids up to 1000, but the model has'),
    ],
)
def test_one_line_says_what_is_wrong(judged, damage, told):
    said = judged(damage)
    assert said is not None and re.search(told, said), said


def test_damage_of_any_kind_is_one_line_or_does_not_matter(judged):
    draw = random.Random(7)

    def damage(directory):
        name = draw.choice([*[CONFIG] * 3, 'tokenizer.json', 'tokenizer_config.json', WEIGHTS])
        path = directory / name
        data = path.read_bytes()
        if name == WEIGHTS:
            path.write_bytes(fuzzing.damaged(draw, data))
        else:
            path.write_bytes(fuzzing.json_bytes(draw, json.loads(data)))

    said = [judged(damage, number) for number in range(VARIANTS)]
    assert VARIANTS / 4 < sum(line is not None for line in said) < VARIANTS
