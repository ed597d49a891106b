"""Ties: answers that prefer none of the samples, from the key that is pressed to the loss."""

import json
import re

import pytest
import torch
from command_line import error_of, invoke, succeed
from experiments import resolved
from label_folders import make_folder, say
from label_page import press
from sample_files import write_lines

from lm_human_preferences import label_types
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import UserError
from lm_human_preferences.label_types import TIE, TIED
from lm_human_preferences.labels import training_data
from lm_human_preferences.labels.folder import LabelFolder
from lm_human_preferences.labels.held_out import predict
from lm_human_preferences.labels.report.label_report import report
from lm_human_preferences.language import encodings

WITH_TIES = {'ties': True}


@pytest.mark.parametrize('samples, chosen', [(2, 0), (4, 1)])
def test_loss_and_gradient_are_those_of_equal_chances_for_all(samples, chosen):
    rewards = torch.tensor([[0.3, -1.2, 2.0, 0.7], [1.5, 0.25, -0.5, 1.0]])[:, :samples]
    rewards.requires_grad_()
    chances = rewards.detach().softmax(1)
    label_type = label_types.get(f'best_of_{samples}')
    statistics = label_type.loss_of(rewards, {'best': torch.tensor([chosen, TIED])})
    of_choice = -chances[0, chosen].log()
    of_tie = -sum(chances[1].log()) / samples
    assert statistics['loss'].item() == pytest.approx((of_choice + of_tie).item() / 2)
    statistics['loss'].backward()
    of_chosen = [float(sample == chosen) for sample in range(samples)]
    wanted = torch.tensor([of_chosen, [1 / samples] * samples])
    torch.testing.assert_close(rewards.grad, (chances - wanted) / 2)


def test_ties_are_no_part_of_accuracy():
    label_type = label_types.get('best_of_2')
    labels = {
        'query': torch.zeros(4, 1, dtype=torch.int64),
        'sample0': torch.tensor([[1], [2], [3], [9]]),
        'sample1': torch.tensor([[0], [0], [0], [0]]),
        'best': torch.tensor([0, 0, 1, TIED]),
    }

    def first_tokens(queries, responses):
        return responses[..., 0].float()

    prediction = predict(first_tokens, labels, label_type, 2, Comm())
    assert (prediction.labels, prediction.accuracy) == (3, pytest.approx(2 / 3))
    only = {field: values[3:] for field, values in labels.items()}
    assert predict(first_tokens, only, label_type, 2, Comm()) is None


def test_in_the_terminal_0_is_a_tie_and_9_is_both_bad(tmp_path):
    make_folder(tmp_path / 'f', 3, task=WITH_TIES)
    printed = press(tmp_path / 'f', '029')
    assert '0    no preference, and go on' in printed and '0-4 or 9 answer' in printed
    assert '9    no preference, as all are bad, and go on' in printed
    log = LabelFolder(str(tmp_path / 'f')).logs['anna']
    tie, choice, bad = log.kept.values()
    assert (tie.value, tie.reason) == (TIE, None) and choice.order.index(choice.value) == 1
    assert (bad.value, bad.is_bad, tie.is_bad) == (TIE, True, False)
    *_, line = (tmp_path / 'f/answers/anna.jsonl').read_text().splitlines()
    assert '"best": "tie"' in line and '"bad": true' in line
    make_folder(tmp_path / 'without', 1)
    assert 'no preference' not in press(tmp_path / 'without', '0')
    assert not LabelFolder(str(tmp_path / 'without')).logs['anna'].kept


def test_files_of_answers_have_ties_where_the_folder_allows_them(tmp_path):
    path = tmp_path / 'f'
    make_folder(path, 1, task=WITH_TIES)
    say(path, 'anna', TIE)
    assert json.loads((path / 'answers/anna.jsonl').read_text())['best'] == 'tie'
    assert [answer.value for answer in LabelFolder(str(path)).counted()] == [TIE]
    task = json.loads((path / 'task.json').read_text())
    (path / 'task.json').write_text(json.dumps({**task, 'ties': False}))
    with pytest.raises(UserError, match=r"anna\.jsonl, line 1 .* best must be .* not 'tie'"):
        LabelFolder(str(path))
    (path / 'task.json').write_text(json.dumps(task))
    answers = path / 'answers/anna.jsonl'
    answers.write_text(answers.read_text().replace('"best": "tie"', '"best": 1, "bad": true'))
    match = r"anna\.jsonl, line 1 .* bad is only allowed if best is 'tie'"
    with pytest.raises(UserError, match=match):
        LabelFolder(str(path))


def test_two_ties_agree_and_a_tie_with_a_choice_does_not(tmp_path):
    make_folder(tmp_path / 'f', 3, task=WITH_TIES, labellers=2)
    say(tmp_path / 'f', 'anna', TIE, TIE, 1)
    say(tmp_path / 'f', 'bob', TIE, 1, 1)
    found = report(LabelFolder(str(tmp_path / 'f')))
    agreement = found['agreement']
    assert (agreement['pairs'], agreement['raw']) == (3, pytest.approx(2 / 3))
    assert agreement['chance'] == 1 / 5
    # Six values in four orders: 12 ties, 3 of each other value; unequal ordered pairs 8 inside.
    assert agreement['alpha'] == pytest.approx(1 - 23 * 8 / (24**2 - 12**2 - 4 * 3**2))
    anna, bob = found['labellers']['anna'], found['labellers']['bob']
    assert (anna['answers'], anna['ties'], bob['ties']) == (3, 2, 1)
    assert anna['agreement'] == '2 of 3' and anna['positions'].split().count('1') == 1
    printed = invoke(f'labels {tmp_path}/f').stdout
    assert re.search(r'^labeller +kind +answers +ties ', printed, re.MULTILINE)


def test_that_all_are_bad_is_trained_as_a_tie_and_counted_apart(tmp_path):
    path = tmp_path / 'f'
    make_folder(path, 3, task=WITH_TIES)
    press(path, '092')
    assert [answer.value == TIE for answer in LabelFolder(str(path)).counted()].count(True) == 2
    anna = report(LabelFolder(str(path)))['labellers']['anna']
    assert (anna['ties'], anna['all bad']) == (2, 1)
    assert re.search(
        r'^labeller +kind +answers +ties +all bad ', invoke(f'labels {path}').stdout, re.M
    )
    export = tmp_path / 'labels.jsonl'
    succeed(f'labels {path} --export {export} --export_as text')
    lines = [json.loads(line) for line in export.read_text().splitlines()]
    assert [line.get('bad') for line in lines if line['best'] == TIE] == [None, True]


def test_a_folder_is_begun_with_ties_or_without(tmp_path):
    path = tmp_path / 'f'
    succeed(f'ask test {path} --count 2')
    assert 'does not allow ties' in error_of(invoke(f'ask test {path} --count 1 --ties on'))
    error = error_of(invoke(f'ask test {path}2 --ties on --labels.type scalar_rating'))
    assert error.startswith('--ties on: labels of the type scalar_rating have no ties')
    file = write_lines(
        tmp_path / 'x.jsonl', [{'query': 'b', 'sample0': 'b', 'sample1': 'a', 'best': 'tie'}]
    )
    words = f'import_labels test {file} {path}3 --labels.type best_of_2'
    assert "field 'best' must be" in error_of(invoke(words))
    succeed(f'{words} --ties on')
    assert [answer.value for answer in LabelFolder(f'{path}3').counted()] == [TIE]


def test_ties_count_for_neither_policy(tmp_path):
    policies = ['old', 'old', 'new', 'new']
    make_folder(tmp_path / 'f', 3, task=WITH_TIES, kind='validation', policies=policies)
    say(tmp_path / 'f', 'anna', 2, TIE, 0)
    (comparison,) = report(LabelFolder(str(tmp_path / 'f')))['comparisons']
    assert (comparison['n'], comparison['wins_of_against'], comparison['ties']) == (2, 1, 1)
    assert ', 1 ties left out' in invoke(f'labels {tmp_path}/f').stdout


def test_a_training_learns_from_ties_and_exports_keep_them_where_they_have_a_place(tmp_path):
    path = tmp_path / 'f'
    make_folder(path, 3, task=WITH_TIES)
    say(path, 'anna', 2, TIE, 1)

    def learned(source):
        hparams = resolved('train_reward', 'test')
        lengths = {'task.query_length': 3, 'task.response_length': 4}
        settings = {'labels.source': str(source), 'labels.num_train': None, **lengths}
        hparams.override_from_dict(settings)
        return training_data.load_labels(hparams, encodings.Test)[0]['best'].tolist()

    assert learned(path) == [2, TIED, 1]
    note = '1 answers without a preference are left out'
    for form, name in (('tokens', 'a.json'), ('preferences', 'b.jsonl'), ('text', 'c.jsonl')):
        printed = succeed(f'labels {path} --export {tmp_path}/{name} --export_as {form}').stdout
        assert (note in printed) == (form != 'text')
    assert learned(tmp_path / 'a.json') == [2, 1]
    assert len((tmp_path / 'b.jsonl').read_text().splitlines()) == 6
    assert learned(tmp_path / 'c.jsonl') == [2, TIED, 1]
