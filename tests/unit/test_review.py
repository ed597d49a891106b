"""Remarks to answers, and decisions on what labellers disagree about."""

import json

import pytest
from command_line import error_of, invoke, succeed
from label_folders import make_folder
from label_page import press, say

from lm_human_preferences.labels.answers import LONGEST_REMARK, clean_remark
from lm_human_preferences.labels.folder import EVERYBODY, LabelFolder
from lm_human_preferences.labels.labeller import AlreadyUsed, Labeller
from lm_human_preferences.labels.page.assignments import Assignments
from lm_human_preferences.labels.report.label_report import report
from lm_human_preferences.online import run_labels


@pytest.mark.parametrize(
    'typed, kept',
    [
        ('  the second\tis rude \n', 'the second is rude'),
        ('a\x1b[2J\u202eb\u2067c\x00', 'a[2Jbc'),
        ('نمی\u200cدانم', 'نمی\u200cدانم'),  # a word of Persian needs it
        (' \x00\n', None),
        ('x' * 999, 'x' * LONGEST_REMARK),
        ('', None),
    ],
)
def test_a_remark_is_one_line_that_controls_nothing(typed, kept):
    assert clean_remark(typed) == kept
    assert kept is None or clean_remark(kept) == kept


def test_a_remark_is_kept_with_the_answer_or_the_skip_after_it(tmp_path):
    path = tmp_path / 'f'
    make_folder(path, 4)
    printed = press(path, 'cboth q1\x1b[2J\n1cno\nc\n2cunclear\ns23')
    assert 'remark: both q1[2J' in printed and 'no remark' in printed
    lines = list(map(json.loads, (path / 'answers/anna.jsonl').read_text().splitlines()))
    found = [line.get('remark') for line in lines]
    assert found == ['both q1[2J', None, 'unclear', None]
    assert 'skip' in lines[2] and all('decides' not in line for line in lines)
    folder = LabelFolder(str(path))
    assert [answer.remark for answer in folder.logs['anna'].uuids.values()][2] == 'unclear'
    shown = invoke(f'labels {path}').stdout
    question = lines[0]['question'][:8]
    assert f'remarks (2):\n  anna, {question}, {lines[0]["best"]}: both q1[2J\n' in shown
    assert '"skipped: not understandable": unclear' in shown


def test_labellers_and_remarks_come_back_from_texts(tmp_path):
    file = tmp_path / 'texts.json'
    texts = {'query': 'a', 'sample0': 'ab', 'sample1': 'b'}
    records = [
        {**texts, 'best': 1, 'labeller': 'anna', 'remark': 'better'},
        {**texts, 'best': 0, 'labeller': 'bob'},
    ]
    file.write_text(json.dumps(records))
    words = f'import_labels test {file} {tmp_path}/f --labels.type best_of_2'
    succeed(words)
    for form in ('text', 'tokens'):
        succeed(f'labels {tmp_path}/f --export {tmp_path}/{form}.json --export_as {form}')
    assert json.loads((tmp_path / 'text.json').read_text()) == records
    assert not {'labeller', 'remark'} & json.loads((tmp_path / 'tokens.json').read_text())[0].keys()


@pytest.fixture
def disputed(tmp_path):
    path = tmp_path / 'f'
    make_folder(path, 4, labellers=2)
    say(path, 'anna', 0, 1, 2, 3)
    say(path, 'bob', 0, 2, 2, 1)
    return path


def test_a_decision_counts_instead_of_the_answers(disputed):
    before = report(LabelFolder(str(disputed)))
    decision = say(disputed, 'carl', None, 2, decides=True)[0]
    folder = LabelFolder(str(disputed))
    ids = list(folder.questions)
    assert [ids.index(answer.question) for answer in folder.counted()] == [0, 2, 3, 0, 2, 3, 1]
    assert folder.counted()[-1] == decision and decision.decides
    assert [answer.value for answer in run_labels.collected(folder)] == [0, 0, 2, 2, 2, 3, 1]
    found = report(folder)
    assert found['review'] == {'disputed': 1, 'decided': {'carl': 1}}
    assert (before['training_labels'], found['training_labels']) == (8, 7)
    assert found['agreement'] == before['agreement']
    assert found['labellers']['anna'] == before['labellers']['anna']
    assert found['labellers']['carl']['answers'] == 0 and 'review' not in before
    line = 'decided where labellers disagree, and counted instead of their answers: 1 by carl'
    assert f'{line}; 1 left to decide' in invoke(f'labels {disputed}').stdout
    assert len(folder.counted(without=['carl'])) == 8
    assert report(folder, ['carl'])['training_labels'] == 8


def test_disagreements_are_listed_and_exported(disputed, tmp_path):
    """Until they are decided, and without the labellers who are left out."""
    ids = list(LabelFolder(str(disputed)).questions)
    found = report(LabelFolder(str(disputed)))['disagreements']
    assert found == {ids[1]: {'anna': 1, 'bob': 2}, ids[3]: {'anna': 3, 'bob': 1}}
    assert report(LabelFolder(str(disputed)), ['bob'])['disagreements'] == {}
    file = tmp_path / 'd.jsonl'
    result = succeed(f'labels {disputed} --export {file} --export_as disagreements')
    assert '\n2 disagreements (--export FILE --export_as disagreements' in result.stdout
    assert f'  {ids[1][:8]}: anna 1, bob 2\n  {ids[3][:8]}: anna 3, bob 1\n' in result.stdout
    assert f'4 answers are in {file}' in result.stdout
    written = [json.loads(line) for line in file.read_text().splitlines()]
    told = [(record['labeller'], record['best']) for record in written]
    assert told == [('anna', 1), ('bob', 2), ('anna', 3), ('bob', 1)]
    assert all(isinstance(record['sample3'], str) for record in written)
    say(disputed, 'carl', None, 2, decides=True)
    assert list(report(LabelFolder(str(disputed)))['disagreements']) == ids[3:]


def test_who_decides_sees_who_said_what_and_may_take_it_back(disputed):
    with Labeller(LabelFolder(str(disputed)), 'anna') as anna:
        question = list(anna.folder.questions.values())[3]
        anna.answer(question, 3, 1.0, remark='rude \\')
    printed = press(disputed, '9s1ucsure\n2', '--review', 'on', name='carl')
    assert 'your decision counts instead of the answers' in printed
    assert 'All are decided but 1, which you have left for later.' in printed
    assert '0 done, 2 to go' in printed and '1 done, 1 to go' not in printed
    folder = LabelFolder(str(disputed))
    (decision,) = folder.counted()[-1:]
    assert decision.decides and decision.value == decision.order[1]
    assert (decision.remark, folder.logs['carl'].undone) == ('sure', 0)
    assert not folder.logs['carl'].by_question
    # By the numbers on carl's screen
    of_decided = [
        f'{answer.labeller}: {decision.order.index(answer.value) + 1}'
        for answer in folder.answers_to(folder.questions[decision.question])
    ]
    for line in of_decided:
        assert line in printed
    assert '(rude \\)' in printed
    left = press(disputed, '4', '--review', 'on', name='anna')  # who has answered it, too
    assert '0 done, 1 to go' in left and 'Nothing is left that labellers disagree about.' in left
    folder = LabelFolder(str(disputed))
    assert len(folder.logs['anna'].by_question) == 4 and len(folder.logs['anna'].decisions) == 1
    assert not any(map(folder.is_disputed, folder.questions.values()))
    assert len(folder.counted()) == 6
    press(disputed, 'u', name='anna')  # of the answers, not of the decisions
    assert len(LabelFolder(str(disputed)).logs['anna'].decisions) == 1


def test_what_is_decided_is_asked_of_nobody_and_gold_is_not_decided(tmp_path):
    path = tmp_path / 'f'
    make_folder(path, 1, labellers=3)
    make_folder(path, 1, seed=1, kind='gold', labellers=EVERYBODY, gold=2)
    say(path, 'anna', 0, 0)
    say(path, 'bob', 1, 1)
    folder = LabelFolder(str(path))
    question, gold = folder.questions.values()
    assert folder.is_disputed(question) and not folder.is_disputed(gold)
    assert folder.is_open_for(question, 'carl')
    say(path, 'dora', 1, decides=True)
    make_folder(path, 1, seed=2, labellers=3)  # nobody is asked gold questions alone
    folder.refresh()
    assert not folder.is_disputed(question) and not folder.is_open_for(question, 'carl')
    given = Assignments(folder, ['carl']).give('carl', 3)
    assert len(given) == 2 and gold in given and question not in given


def test_a_run_goes_on_with_the_decisions_that_there_were(disputed):
    """They are lines of the files of answers, of which each run knows how many it has read."""
    say(disputed, 'carl', None, 2, decides=True)
    lines = LabelFolder(str(disputed)).lines_read()
    before = LabelFolder(str(disputed)).counted()
    digest = run_labels.digest(run_labels.collected(LabelFolder(str(disputed))))
    say(disputed, 'dora', None, 1, None, 3, decides=True)
    assert len(LabelFolder(str(disputed)).counted()) == 6
    then = LabelFolder(str(disputed), lines)
    assert then.counted() == before
    assert run_labels.digest(run_labels.collected(then)) == digest
    # The last decision counts; and one that a reward model has learned from stays.
    now = LabelFolder(str(disputed))
    assert now.decision_on(list(now.questions.values())[1]).labeller == 'dora'
    (disputed / 'used.jsonl').write_text(json.dumps({'answers': {'carl': 1}}) + '\n')
    with Labeller(now, 'carl', decides=True) as carl, pytest.raises(AlreadyUsed):
        carl.undo()


def test_a_review_is_of_a_person_in_the_terminal(disputed):
    words = f'label {disputed} --labeller carl --review on'
    assert '--review on: a person decides' in error_of(invoke(f'{words} --web on'))
    assert 'leave --simulate out' in error_of(invoke(f'{words} --simulate on'))
