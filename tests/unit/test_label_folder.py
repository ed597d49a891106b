"""Folder of labels: exact after a kill, one writer a file, and the answers that count."""

import json
import operator
import os
import time

import pytest
from full_disks import largest_file
from label_folders import TASK, answer_all, make_folder, questions
from sample_files import write_lines

from lm_human_preferences.errors import UserError
from lm_human_preferences.labels import answers
from lm_human_preferences.labels.folder import EVERYBODY, LabelFolder, QuestionWriter
from lm_human_preferences.labels.labeller import Labeller, Refused
from lm_human_preferences.language import encodings
from lm_human_preferences.online import collection


def test_questions_and_answers_are_read_as_they_were_written(path):
    make_folder(path, 3)
    opened = LabelFolder(str(path))
    assert [question.tokens() for question in opened.questions.values()] == questions(3)
    question = next(iter(opened.questions.values()))
    assert (question.kind, question.labellers, question.policies) == ('train', 1, ['initial'] * 4)
    with Labeller(opened, 'anna') as labeller:
        before = time.time()
        answer = labeller.answer(question, 2, 0.75)
    record = json.loads((path / 'answers/anna.jsonl').read_text())
    assert before <= record.pop('time') <= time.time()
    about = {'answer': answer.uuid, 'question': question.id}
    order = list(labeller.order(question))
    assert record == {**about, 'best': 2, 'order': order, 'seconds': 0.75}
    assert LabelFolder(str(path)).counted() == [answer]


def test_an_id_is_of_query_and_samples_alone():
    first, second = questions(2)
    swapped = {**first, 'sample0': first['sample1'], 'sample1': first['sample0']}
    assert len({answers.question_id(tokens) for tokens in (first, second, swapped)}) == 3
    # what sha256sum says of the JSON text [[1],[2,3]]
    expected = '7b0dd71b55b2e66fb3a890d3a1ac99dacb6d9b854cdd2fbef1dcba717b94d6b7'
    assert answers.question_id({'query': [1], 'sample': [2, 3]}) == expected


def test_orders_are_of_labeller_question_and_key(path):
    folder = make_folder(path, 300)

    def orders(name, key=b''):
        with Labeller(folder, name, key) as labeller:
            ranked = sorted(folder.questions, key=labeller.rank)
            return [labeller.order(each) for each in folder.questions.values()], ranked

    found = [orders('anna'), orders('bob'), orders('anna', b'one')]
    assert orders('anna', b'one') == found[2]
    for i, (places, ranked) in enumerate(found):
        assert len(set(places)) == 24
        firsts = [order[0] for order in places]
        assert all(45 < firsts.count(sample) < 105 for sample in range(4))  # 75 +- 7.5
        for others, other_ranked in found[:i]:
            assert sum(map(operator.eq, places, others)) < 40  # one in 24 by chance
            assert ranked != other_ranked


def test_more_questions_of_the_same_task_are_added_and_others_refused(tmp_path):
    make_folder(tmp_path / 'f', 3)
    make_folder(tmp_path / 'f', 2, seed=1)
    assert len(LabelFolder(str(tmp_path / 'f')).questions) == 5
    changed = {'task': {**TASK['task'], 'response_length': 5}}
    with pytest.raises(UserError) as refused:  # which is kept, and with it what it comes from
        make_folder(tmp_path / 'f', task=changed)
    assert 'another task: its --task.response_length is 4, not 5' in str(refused.value)
    make_folder(tmp_path / 'f', seed=2, task={'task': {**TASK['task'], 'query_dataset': 'books'}})


def test_the_first_answer_counts_though_the_clock_is_set_back(path, monkeypatch):
    """Two who are at one question at the same time: on one page, or each in a terminal."""
    opened = make_folder(path, 1)
    (question,) = opened.questions.values()
    clock = iter([2000.0, 1000.0, 999.0])
    monkeypatch.setattr(time, 'time', lambda: next(clock))
    with Labeller(opened, 'zoe') as zoe:
        first = zoe.answer(question, 3, 1.0)
    for name, folder in (('anna', opened), ('bob', LabelFolder(opened.path))):
        with Labeller(folder, name) as labeller:
            assert labeller.answer(question, 0, 1.0).time > first.time
    read = LabelFolder(opened.path)
    assert read.counted() == collection.collected(read) == [first]


def test_a_cut_loses_no_answer_that_was_acknowledged(path):
    make_folder(path, 4)
    with Labeller(LabelFolder(str(path)), 'anna') as labeller:
        for value in (3, 1):
            labeller.answer(labeller.next_question(), value, 1)
        labeller.answer(labeller.next_question(), None, 1, reason='cannot tell')
        labeller.undo()
        labeller.answer(labeller.next_question(), 0, 1)
    file = path / 'answers/anna.jsonl'
    whole = file.read_bytes()
    lines = whole.splitlines(keepends=True)
    assert len(lines) == 5
    ends = {len(b''.join(lines[:count])) + more for count in range(6) for more in (-1, 0)}
    for cut in sorted(ends.union(range(0, len(whole), 31)) - {-1}):
        file.write_bytes(whole[:cut])
        complete = whole[:cut].count(b'\n')
        reader = LabelFolder(str(path))
        assert len(reader.counted()) == [0, 1, 2, 2, 2, 3][complete]
        with Labeller(reader, 'anna') as labeller:
            again = labeller.answer(labeller.next_question(), 2, 1)
        assert file.read_bytes().startswith(b''.join(lines[:complete]))
        assert file.read_bytes().count(b'\n') == complete + 1
        assert again in LabelFolder(str(path)).counted()


def test_a_full_disk_leaves_what_was_there_and_the_next_answer_fits(path):
    make_folder(path, 4)
    file = path / 'answers/anna.jsonl'
    with Labeller(LabelFolder(str(path)), 'anna') as labeller:
        labeller.answer(labeller.next_question(), 1, 1)
        before = file.read_bytes()
        question = labeller.next_question()
        told = 'anna.jsonl cannot be written: File too large'
        with largest_file(len(before) + 20), pytest.raises(UserError, match=told):  # 20 bytes fit
            labeller.answer(question, 2, 1)
        assert file.read_bytes() == before
        labeller.answer(question, 2, 1)
    assert sorted(answer.value for answer in LabelFolder(str(path)).counted()) == [1, 2]


def test_a_file_has_one_writer(path):
    opened = make_folder(path)
    with (
        Labeller(opened, 'anna'),
        Labeller(LabelFolder(str(path)), 'bob'),
        pytest.raises(UserError, match=r'anna is labelling already; use another --labeller'),
    ):
        Labeller(opened, 'anna')
    Labeller(opened, 'anna').close()
    arguments = str(path), TASK, encodings.Test
    with QuestionWriter(*arguments), pytest.raises(UserError, match='questions.jsonl is in'):
        QuestionWriter(*arguments)


def test_nobody_begins_in_a_folder_that_is_damaged(path):
    opened = make_folder(path)
    (path / 'answers/bob.jsonl').write_text('nonsense\n')
    with pytest.raises(UserError, match='bob.jsonl, line 1 is not JSON'):
        Labeller(opened, 'anna')
    assert not (path / 'answers/anna.jsonl').exists()


def test_a_labeller_answers_a_question_once(path):
    with Labeller(make_folder(path, 2), 'anna') as labeller:
        first, second = labeller.folder.questions.values()
        labeller.answer(first, 1, 1, uuid='u')
        with pytest.raises(Refused, match='anna has answered this question already'):
            labeller.answer(first, 1, 1, uuid='v')
        with Labeller(labeller.folder, 'bob') as bob, pytest.raises(Refused):
            bob.answer(second, 1, 1, uuid='u')  # he knows how anna calls her answer
        labeller.undo('u')
        labeller.undo('u')
        with pytest.raises(Refused):  # it stays taken back
            labeller.answer(first, 1, 2, uuid='u')
        assert labeller.log.last.get(first.id) is None
    assert (path / 'answers/anna.jsonl').read_text().count('\n') == 2


def test_undo_goes_back_one_by_one_and_asks_again(path):
    with Labeller(make_folder(path, 3), 'anna') as labeller:
        asked = [labeller.next_question()]
        labeller.answer(asked[0], 0, 1)
        asked.append(labeller.next_question())
        labeller.answer(asked[1], None, 1, reason='cannot tell')
    with Labeller(LabelFolder(str(path)), 'anna') as labeller:  # on another day
        assert labeller.undo().question == asked[1].id
        assert labeller.undo().question == asked[0].id
        assert labeller.next_question() == asked[0] and labeller.done() == 0
        labeller.answer(asked[0], 1, 1)
        assert labeller.next_question() == asked[1]


def test_an_answer_in_the_last_line_that_a_training_has_used_stays(path):
    with Labeller(make_folder(path, 3), 'anna') as labeller:
        labeller.answer(labeller.next_question(), 0, 1, uuid='line 1')
        labeller.undo('line 1')
        labeller.answer(labeller.next_question(), 0, 1, uuid='line 3')
        labeller.answer(labeller.next_question(), 0, 1, uuid='line 4')
        used = [{'answers': {'anna': 3, 'bob': 9}}, {'answers': {'bob': 9}}, {'trained': 1}]
        write_lines(path / 'used.jsonl', used)
        with pytest.raises(Refused, match='the reward model has learned from it'):
            labeller.undo('line 3')
        assert labeller.undo().uuid == 'line 4'
        with pytest.raises(Refused):
            labeller.undo()
        assert [answer.uuid for answer in labeller.folder.counted()] == ['line 3']


def test_nobody_is_asked_twice_and_repeated_questions_are_asked_of_as_many_as_wanted(path):
    make_folder(path, 3)
    make_folder(path, 2, seed=1, labellers=3)
    counts = [answer_all(path, name) for name in ('anna', 'bob', 'carl', 'dora')]
    assert counts == [5, 2, 2, 0]
    opened = LabelFolder(str(path))
    assert len(opened.counted()) == 3 + 2 * 3
    assert len(opened.counted(without=['anna'])) == 2 * 2
    with pytest.raises(UserError, match=r"no answers of a labeller 'eve': anna, bob, carl, dora"):
        opened.counted(without=['eve'])


def skip(path, name):
    with Labeller(LabelFolder(str(path)), name) as labeller:
        question = labeller.next_question()
        labeller.answer(question, None, 1, reason='cannot tell')
        assert labeller.next_question() is None
        return question


def test_a_question_that_two_have_skipped_is_retired(path):
    make_folder(path, 1, labellers=5)
    skipped = [skip(path, name) for name in ('anna', 'bob')]
    opened = LabelFolder(str(path))
    assert skipped[0] == skipped[1] and collection.count_answered(opened) == (0, 1)
    with Labeller(opened, 'carl') as carl, Labeller(opened, 'bob') as bob:
        assert carl.next_question() is None
        bob.undo()
        assert carl.next_question() is not None


def test_gold_answers_are_for_the_owner_of_a_folder(tmp_path):
    before = os.umask(0)
    try:
        make_folder(tmp_path / 'parent/f', 2, kind='gold', gold=1)
        make_folder(tmp_path / 'parent/f', 2, seed=1)
    finally:
        os.umask(before)
    questions = tmp_path / 'parent/f/questions.jsonl'
    assert questions.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / 'parent/f').stat().st_mode & 0o777 == 0o700


def test_gold_questions_are_asked_of_everybody_however_many_skip_them(path):
    make_folder(path, 1, kind='gold', labellers=EVERYBODY, gold=2)
    for name in ('anna', 'bob', 'carl'):
        question = skip(path, name)
        assert question.gold == 2
    assert not question.is_retired(LabelFolder(str(path)).answers_to(question))


def test_what_is_no_folder(tmp_path):
    with pytest.raises(UserError, match='is not a folder of labels: there is no local file'):
        LabelFolder(str(tmp_path))
    for change, told in (
        ({'format': 2}, 'or of another version'),
        ({'task': {'query_length': '3', 'response_length': 4}}, 'or of another version'),
        ({'label_type': 'scalar_rating', 'scale': [4, 0]}, 'cannot have scale'),
        ({'scale': [0, 4]}, 'best_of_4 cannot have scale'),
    ):
        (tmp_path / 'task.json').write_text(json.dumps({'format': 1, **TASK, **change}))
        with pytest.raises(UserError, match=f'task.json is damaged.* {told}'):
            LabelFolder(str(tmp_path))


GOOD = {'answer': 'u', 'best': 1, 'order': [0, 1, 2, 3], 'seconds': 1, 'time': 1}


@pytest.mark.parametrize(
    'change, message',
    [
        ({'best': 4}, 'best must be a whole number from 0 to 3, not 4'),
        ({'best': None}, 'best or skip is missing'),
        ({'seconds': 10**400}, 'another field has the wrong type'),
        ({'undo': 'x'}, 'takes back an unknown answer, x'),
        ({'question': 'x\x1b[2J'}, r'answers the question x\\x1b\[2J, which is not in'),
    ],
)
def test_damaged_answers_are_named_by_file_and_line(path, change, message):
    question = next(iter(make_folder(path, 1).questions))
    record = {**GOOD, 'question': question, **change}
    (path / 'answers/anna.jsonl').write_text(json.dumps(record) + '\n')
    with pytest.raises(UserError, match=message) as error:
        LabelFolder(str(path))
    assert 'anna.jsonl' in str(error.value)


@pytest.mark.parametrize(
    'change, message',
    [
        ({'gold': 'x'}, 'gold must be a whole number from 0 to 3'),
        ({'weights': ['abc']}, 'a field is missing, or has the wrong type'),
        ({'sample1': [1, 2, 3, 5]}, "the value of the field 'id' does not match the token ids"),
    ],
)
def test_damaged_questions_are_named_by_file_and_line(path, change, message):
    make_folder(path, 1)
    file = path / 'questions.jsonl'
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}) + '\n')
    with pytest.raises(UserError, match=f'questions.jsonl, line 1 is not a question: {message}'):
        LabelFolder(str(path))


def test_nothing_is_acknowledged_once_somebody_has_moved_the_file(path):
    make_folder(path, 2)
    with Labeller(LabelFolder(str(path)), 'anna') as labeller:
        labeller.answer(labeller.next_question(), 1, 1)
        file = path / 'answers/anna.jsonl'
        file.with_name('new').write_bytes(file.read_bytes())
        file.with_name('new').replace(file)  # as rsync does, and editors
        with pytest.raises(UserError, match='written: it was replaced'):
            labeller.answer(labeller.next_question(), 2, 1)
        assert len(labeller.log.kept) == 1


def test_a_link_is_not_written_through(tmp_path):
    make_folder(tmp_path / 'f')
    (tmp_path / 'f/answers/anna.jsonl').symlink_to(tmp_path / 'elsewhere')
    with pytest.raises(UserError, match='anna.jsonl cannot be .*: it is a symbolic link: put'):
        Labeller(LabelFolder(str(tmp_path / 'f')), 'anna')
    assert not (tmp_path / 'elsewhere').exists()
