"""A new label type is one class, here that of CONTRIBUTING.md (Plackett and Luce's loss)."""

import json
import math
import re

import documentation
import example_label_type
import pytest
import torch
from command_line import error_of, invoke, succeed
from experiments import resolved
from label_folders import make_folder, say
from label_page import answers_of, served

from lm_human_preferences import label_types, train_reward
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import UserError
from lm_human_preferences.labels.folder import LabelFolder
from lm_human_preferences.labels.report.label_report import report
from lm_human_preferences.labels.training_data import load_labels
from lm_human_preferences.language import encodings


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    example_label_type.register(monkeypatch)


def test_it_is_known_by_its_name():
    assert label_types.get('ranking_of_3').samples == ('sample0', 'sample1', 'sample2')
    with pytest.raises(UserError, match=r'scalar_compare, ranking_of_N \(as in ranking_of_4, up'):
        label_types.get('ranking')


def test_an_imported_ranking_is_of_the_samples_in_their_order_here():
    assert label_types.get('ranking_of_3').moved([2, 0, 1], [1, 2, 0]) == [0, 1, 2]


def test_loss_of_three_by_hand():
    ranking = label_types.get('ranking_of_3')
    labels = {'ranking': torch.tensor([[2, 0, 1]])}
    rewards = torch.tensor([[1.0, 2.0, 0.5]], dtype=torch.float64)
    a, b, c = rewards[0].exp().tolist()
    expected = -math.log(c / (a + b + c)) - math.log(a / (a + b))
    assert ranking.loss_of(rewards, labels)['loss'].item() == pytest.approx(expected)
    guessed = ranking.loss_of(torch.zeros(1, 3), labels)['loss'].item()
    assert guessed == pytest.approx(math.log(6))


def test_people_answer_on_the_page_and_a_reward_model_learns_from_it(tmp_path):
    path = tmp_path / 'f'
    succeed(f'ask test {path} --count 8 --labels.type ranking_of_4')
    assert 'give --web on' in error_of(invoke(f'label {path} --labeller anna'))
    with served(path, 'anna') as (_, anna):
        while question := anna.question():
            assert anna.answer(question['id'], 3, 3, 1, 2)[0] == 400
            assert anna.answer(question['id'], 3, 4, 1, 2)[0] == 200
    rankings = [example_label_type.places(answer) for answer in answers_of(path, 'anna')]
    assert rankings == [[3, 4, 1, 2]] * 8
    hparams = resolved('train_reward', 'test')
    settings = {'labels.type': 'ranking_of_4', 'labels.source': str(path), 'labels.num_train': 8}
    hparams.override_from_dict({**settings, 'run.save_dir': None, 'batch_size': 8})
    labels, *_ = load_labels(hparams, encodings.Test)
    assert labels['ranking'].tolist() == [answer.value for answer in answers_of(path, 'anna')]
    train_reward.train(hparams, Comm())


def test_the_page_has_a_template_for_each_label_type():
    page = documentation.page('lm_human_preferences/labels/page/page.html')
    block = page.partition('const templates = {')[2].partition('};')[0]
    templates = re.findall(r'^  (\w+): ', block, re.MULTILINE)
    used = {label_types.get(name.replace('N', '4')).control.template for name in label_types.TYPES}
    assert sorted(templates) == sorted(used) == ['choose', 'scale']


def test_answers_are_reported_and_exported(tmp_path):
    path = tmp_path / 'f'
    task = {'label_type': 'ranking_of_4'}
    make_folder(path, 2, task=task, labellers=2)
    make_folder(path, 1, task=task, seed=1, kind='validation', policies=['a', 'a', 'b', 'b'])
    make_folder(path, 1, task=task, seed=2, kind='gold', gold=[3, 2, 1, 0], labellers=9)
    say(path, 'anna', [0, 1, 2, 3], [3, 0, 1, 2], [2, 0, 1, 3], [3, 2, 1, 0])
    say(path, 'bob', [0, 1, 2, 3], [3, 0, 1, 2], [0, 1, 2, 3], [3, 2, 0, 1])
    found = report(LabelFolder(str(path)))
    agreement, anna, bob = found['agreement'], found['labellers']['anna'], found['labellers']['bob']
    assert (agreement['pairs'], agreement['raw'], agreement['chance']) == (3, 2 / 3, 1 / 24)
    assert (anna['gold'], bob['gold']) == ('1 of 1', '0 of 1')
    assert anna['agreement'] == '2 of 3' and sum(map(int, anna['positions'].split())) == 4
    (comparison,) = found['comparisons']
    assert (comparison['n'], comparison['wins_of_against']) == (1, 1)
    options = f'--export {tmp_path}/pairs.json --export_as preferences'
    succeed(f'labels {path} {options} --without bob')
    assert len(json.loads((tmp_path / 'pairs.json').read_text())) == 2 * 6
