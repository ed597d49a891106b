"""Names in CONTRIBUTING.md and docs/architecture.md exist."""

import importlib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONTRIBUTING = (ROOT / 'CONTRIBUTING.md').read_text(encoding='utf-8')
ARCHITECTURE = (ROOT / 'docs/architecture.md').read_text(encoding='utf-8')


def resolves(name):
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


def test_functions_that_the_architecture_names_exist():
    code = re.findall(r'`([a-z_]+(?:\.\w+)+)`', ARCHITECTURE)
    names = [name for name in code if not re.search(r'\.(py|md|json|ckpt.*|tfevents)$', name)]
    assert len(names) > 15
    assert [
        name for name in names if not resolves(name.removeprefix('lm_human_preferences.'))
    ] == []


def test_methods_that_the_life_of_an_episode_names_exist():
    life = ARCHITECTURE.partition('## The life')[2].partition('\n## ')[0]
    life = life[life.index('\n1. ') :]  # its steps; the sentences before them name modules
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
