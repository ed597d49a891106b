"""CONTRIBUTING.md and docs/architecture.md stay true: the example works, what they name exists."""

import importlib
import json
import math
import re
from pathlib import Path

import pytest
import torch

from lm_human_preferences import label_types
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams import train_reward
from lm_human_preferences.labels import files as label_files
from lm_human_preferences.language import encodings

ROOT = Path(__file__).resolve().parents[2]
CONTRIBUTING = (ROOT / 'CONTRIBUTING.md').read_text(encoding='utf-8')
ARCHITECTURE = (ROOT / 'docs/architecture.md').read_text(encoding='utf-8')


# ---------------------------------------------------------------- the example of a label type


@pytest.fixture
def example(monkeypatch):
    """The label type for three responses, as the page's code defines it."""
    (code,) = re.findall(r'^```python\n(.*?)^```$', CONTRIBUTING, re.MULTILINE | re.DOTALL)
    monkeypatch.setattr(label_types, 'TYPES', dict(label_types.TYPES))
    exec(code, dict(vars(label_types)))
    return label_types.get('ranking_of_3')


def hparams_for(path):
    hparams = train_reward.HParams()
    hparams.override_from_dict(
        {
            'labels.source': str(path),
            'labels.type': 'ranking_of_3',
            'task.query_length': 1,
            'task.response_length': 1,
            'batch_size': 1,
        }
    )
    return hparams


def label(ranking):
    return {'query': [0], 'sample0': [1], 'sample1': [2], 'sample2': [3], 'ranking': ranking}


def test_the_example_reads_label_files(example, tmp_path):
    path = tmp_path / 'labels.json'
    path.write_text(json.dumps([label([2, 0, 1]), label([0, 1, 2])]))
    labels, _ = label_files.load_labels(hparams_for(path), encodings.Test)
    assert sorted(labels['ranking'].tolist()) == [[0, 1, 2], [2, 0, 1]]


@pytest.mark.parametrize('ranking', [[0, 0, 1], [1, 2, 3], [-1, 0, 1]])
def test_the_example_refuses_what_is_no_ranking(example, tmp_path, ranking):
    path = tmp_path / 'labels.json'
    path.write_text(json.dumps([label([2, 0, 1]), label(ranking)]))
    with pytest.raises(UserError, match='each of 0 to 2 once, the best first') as e:
        label_files.load_labels(hparams_for(path), encodings.Test)
    assert str(path) in str(e.value) and 'ranking' in str(e.value)


def test_the_loss_of_the_example_by_hand(example):
    rewards = torch.tensor([[1.0, 2.0, 0.5]], dtype=torch.float64)
    a, b, c = (math.exp(reward) for reward in rewards[0].tolist())
    loss = example.loss_of(rewards, {'ranking': torch.tensor([[2, 0, 1]])})['loss']
    assert loss.item() == pytest.approx(-math.log(c / (a + b + c)) - math.log(a / (a + b)))
    guessed = example.loss_of(torch.zeros(1, 3), {'ranking': torch.tensor([[2, 0, 1]])})['loss']
    assert guessed.item() == pytest.approx(math.log(6)) == example.guessing_loss({})


def test_the_example_agrees_with_whom_it_simulates(example):
    scores = torch.tensor([[0.3, -1.0, 2.0], [5.0, 4.0, 3.0]])
    labels = example.simulate(scores)
    assert labels['ranking'].tolist() == [[2, 0, 1], [0, 1, 2]]
    assert example.agreement(scores, labels) == 1 and example.agreement(-scores, labels) == -1


# ---------------------------------------------------------------- names


def resolves(name):
    """Whether module.attribute.attribute, below the package, is there."""
    modules = name.split('.')
    for length in range(len(modules), 0, -1):
        path = '.'.join(['lm_human_preferences', *modules[:length]])
        try:
            value = importlib.import_module(path)
        except ModuleNotFoundError:
            continue
        for attribute in modules[length:]:
            if not hasattr(value, attribute):
                return False
            value = getattr(value, attribute)
        return True
    return False


def test_a_name_that_is_not_there_is_noticed():
    assert resolves('ppo.compute_rewards') and resolves('policy.Policy.respond')
    assert not resolves('ppo.no_such_function') and not resolves('no_such_module.x')


def test_functions_that_the_architecture_names_exist():
    code = re.findall(r'`([a-z_]+(?:\.\w+)+)`', ARCHITECTURE)
    names = [name for name in code if not re.search(r'\.(py|md|json|ckpt.*|tfevents)$', name)]
    assert len(names) > 15
    assert [
        name for name in names if not resolves(name.removeprefix('lm_human_preferences.'))
    ] == []


def test_methods_that_the_life_of_an_episode_names_exist():
    life = ARCHITECTURE.partition('## The life')[2].partition('\n## ')[0]
    methods = set(re.findall(r'`([a-z_]+)`', life)) - {'kl_coef', 'query_sampler'}
    assert {'step', 'generate', 'train', 'train_minibatch'} <= methods
    trainer = [name for name in methods if not resolves(f'train_policy.PPOTrainer.{name}')]
    assert trainer == []


def test_files_that_the_map_names_exist():
    for path in re.findall(r'`([\w/.]+\.(?:py|md)|[\w/]+/)`', CONTRIBUTING + ARCHITECTURE):
        assert any(
            (folder / path).exists()
            for folder in (ROOT, ROOT / 'lm_human_preferences', ROOT / 'tests')
        ), path
