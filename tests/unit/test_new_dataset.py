"""A new data set is its module and one entry in datasets.registry."""

import pytest
import torch

from lm_human_preferences import lm_tasks
from lm_human_preferences.commands import dry_run
from lm_human_preferences.datasets import registry
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams import policy_options
from lm_human_preferences.language import datasets, encodings
from lm_human_preferences.plan.phases import make_plan
from lm_human_preferences.reward_sources.sources import source_of

POEMS = """
def generator(mode, seed=0, shuffle=False, labels=None):
    for number in range(10):
        yield f'{mode}{seed or 0}'.translate(str.maketrans('0123456789', 'abcdefghij')) + labels

def queries():
    return ['a', 'b']
"""


@pytest.fixture
def add_poems(tmp_path, monkeypatch):
    (tmp_path / 'poems_of_a_test.py').write_text(POEMS)
    monkeypatch.syspath_prepend(tmp_path)

    def add(**properties):
        info = registry.DatasetInfo('poems', 'poems', 'poems_of_a_test', **properties)
        monkeypatch.setitem(registry.DATASETS, 'poems', info)

    return add


def task_of_poems():
    lengths = {'query_length': 6, 'response_length': 2}
    return lm_tasks.TaskHParams(query_dataset='poems', start_text=None, **lengths)


def test_it_is_offered_and_read(add_poems):
    add_poems(labels_stand_in=True)
    with pytest.raises(UserError, match=f'choose {registry.choices()} or a') as e:
        datasets.get_dataset('poem')
    assert ' poems or a' in str(e.value)
    sampler = lm_tasks.make_query_sampler(
        hparams=task_of_poems(), encoder=encodings.Test.get_encoder(), batch_size=2, labels='z'
    )
    tokens = encodings.Test.get_encoder().encode('trainaz')[:6]
    assert sampler()['tokens'].tolist() == [tokens, tokens]


def test_labels_that_stand_in_are_those_of_the_reward_model():
    hparams = policy_options.HParams()
    new = {'rewards.train_new_model': 'on', 'rewards.train_new_model.labels.source': 'labels.json'}
    hparams.override_from_dict(new)
    assert source_of(hparams).label_source() == 'labels.json'


def test_a_dry_run_does_not_fetch_what_is_downloaded(add_poems):
    add_poems(downloaded=True)
    hparams = policy_options.HParams()
    hparams.override_from_dict({'task.query_dataset': 'poems'})
    unchecked = []
    assert dry_run._queries(make_plan(hparams), encodings.Test.get_encoder(), unchecked) == []
    assert unchecked == ['--task.query_dataset poems']


def test_each_run_may_read_it_in_another_order(add_poems):
    add_poems(seed_per_run=True)
    encoder = encodings.Test.get_encoder()
    samplers = []
    for _ in range(2):
        torch.manual_seed(len(samplers))
        task = task_of_poems()
        samplers.append(lm_tasks.make_query_sampler(task, encoder=encoder, batch_size=1))
    assert samplers[0].rules.seed != samplers[1].rules.seed


def test_the_order_of_queries_to_train_on_has_a_seed_of_its_own(add_poems):
    add_poems()
    task = task_of_poems()
    task.query_seed = 3
    encoder = encodings.Test.get_encoder()
    seeds = [
        lm_tasks.make_query_sampler(task, encoder=encoder, batch_size=1, mode=mode).rules.seed
        for mode in ('train', 'test')
    ]
    assert seeds == [3, 0]


def test_a_dataset_lists_itself_as_in_the_original(monkeypatch):
    monkeypatch.setattr(registry, 'DATASETS', dict(registry.DATASETS))

    def mine(mode, seed=0, shuffle=False, comm=None):
        yield from ('abc', 'de')

    datasets.Dataset('mine', generator=mine)
    task = lm_tasks.TaskHParams(query_length=3, query_dataset='mine', start_text=None)
    encoder = encodings.Test.get_encoder()
    sampler = lm_tasks.make_query_sampler(hparams=task, encoder=encoder, batch_size=2)
    assert sampler()['tokens'].tolist() == [[0, 1, 2], [3, 4, encoder.padding_token]]
    assert registry.choices().endswith('reviews, mine')
    for name in ('mine', 'books'):
        with pytest.raises(ValueError, match=f"a data set named '{name}' is registered already"):
            datasets.Dataset(name, generator=mine)
