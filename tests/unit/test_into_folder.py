"""Import into a folder of labels: one question for a pair in any order, and no vote overwritten."""

import json
import shutil
import time

import pytest
from command_line import error_of, invoke, succeed
from label_folders import make_folder
from label_page import press
from sample_files import label_hparams, write_lines

from lm_human_preferences import label_types
from lm_human_preferences.errors import UserError
from lm_human_preferences.label_types import TIE
from lm_human_preferences.labels.folder import LabelFolder, QuestionWriter
from lm_human_preferences.labels.labeller import Labeller
from lm_human_preferences.labels.report.label_report import report
from lm_human_preferences.labels.texts import into_folder, tokenise
from lm_human_preferences.language import encodings

QUERIES = ('abc', 'abd', 'abe', 'abf')
LENGTHS = {'query_length': 3, 'response_length': 2}
GOOD, BAD, OTHER = 'go', 'ba', 'ot'


def bring(path, records, labeller='imported', label_type='best_of_2'):
    """Import records of texts, as the command does; returns what is said and the folder."""
    hparams = label_hparams('x', **{'labels.type': label_type})
    found = [(f'f, line {number}', record) for number, record in enumerate(records, start=1)]
    labels, _ = tokenise.tokenise(found, hparams, encodings.Test)
    task = {'label_type': label_type, 'encoding': 'test', 'instructions': '', 'task': LENGTHS}
    if label_types.get(label_type).can_tie:
        task['ties'] = True
    with QuestionWriter(str(path), task, encodings.Test) as writer:
        said = into_folder.add_labels(labels, writer, labeller)
    return said, LabelFolder(str(path))


def preference(query, best, worst):
    return {'prompt': query, 'chosen': best, 'rejected': worst}


def swapped_texts(query, best, worst):
    return {'query': query, 'sample0': worst, 'sample1': best, 'best': 1}


def compared(query, best, worst):
    return {'query': query, 'sample0': best, 'sample1': worst, 'difference': -2.0}


@pytest.mark.parametrize(
    'of_anna, of_bob, label_type',
    [(preference, swapped_texts, 'best_of_2'), (compared, compared, 'scalar_compare')],
)
def test_two_who_disagree_about_a_pair_disagree(tmp_path, of_anna, of_bob, label_type):
    """One prefers the good ones in four questions, the other the bad ones in three of them."""
    by_anna = [of_anna(query, GOOD, BAD) for query in QUERIES]
    by_bob = [of_bob(query, BAD, GOOD) for query in QUERIES[:3]]
    by_bob.append(of_bob(QUERIES[3], GOOD, BAD))
    bring(tmp_path / 'f', by_anna, 'anna', label_type)
    said, folder = bring(tmp_path / 'f', by_bob, 'bob', label_type)
    assert said[0].endswith(': 0 questions added, 4 in all')
    found = report(folder)
    assert len(found['disagreements']) == 3
    assert (found['agreement']['pairs'], found['training_labels']) == (4, 8)
    assert found['agreement']['raw'] == (None if label_type == 'scalar_compare' else 0.25)
    before = contents(tmp_path / 'f')
    bring(tmp_path / 'f', by_bob, 'bob', label_type)
    assert contents(tmp_path / 'f') == before


def contents(path):
    return {file: file.read_bytes() for file in path.rglob('*.jsonl')}


def test_what_was_chosen_is_not_always_the_first_sample(tmp_path):
    """A reward that tells nothing apart would seem to know the answers, and an order be learned."""
    letters = [chr(ord('a') + number) for number in range(26)]
    records = [preference(query + more, GOOD, BAD) for query in letters for more in 'abcd']
    encoder = encodings.Test.get_encoder()
    _, folder = bring(tmp_path / 'f', records)
    best = [answer.value for answer in folder.counted()]
    assert len(best) == 104 and 30 < sum(best) < 74
    for answer in folder.counted():
        tokens = folder.questions[answer.question].tokens()
        text = encoder.decode([each for each in tokens[f'sample{answer.value}'] if each < 26])
        assert text == GOOD


def test_imported_labels_keep_their_order(tmp_path):
    records = []
    for number, letter in enumerate('gbcafde'):
        records.append({**preference(letter * 3, GOOD, BAD), 'labeller': f'p{number % 3}'})
    before = time.time()
    _, folder = bring(tmp_path / 'f', records)
    counted = folder.counted()
    asked = [folder.questions[each.question].tokens()['query'] for each in counted]
    assert asked == [encodings.Test.get_encoder().encode(record['prompt']) for record in records]
    times = [answer.time for answer in counted]
    assert times == sorted(set(times)) and before <= times[0] and times[-1] <= time.time() + 1


def test_rows_without_a_name_that_are_the_same_count_once(tmp_path):
    records = [preference(query, GOOD, BAD) for query in QUERIES] * 2
    records += [swapped_texts('abc', GOOD, BAD), {**preference('abc', GOOD, BAD), 'id': 7}]
    said, folder = bring(tmp_path / 'f', records)
    assert said[1:3] == ['4 answers of imported added', '1 answers of imported-2 added']
    assert said[-1].startswith('5 rows without a name are the same as an earlier one, and')
    before = contents(tmp_path / 'f')
    bring(tmp_path / 'f', records)
    assert contents(tmp_path / 'f') == before
    said, folder = bring(tmp_path / 'g', records, 'anna')
    assert not any('the same as' in line for line in said) and list(folder.logs) == ['anna']


def test_people_without_a_name_have_no_agreement(tmp_path):
    given = {'query': 'abc', 'sample0': GOOD, 'sample1': BAD}
    votes = [{**given, 'best': best} for best in (0, 1)]
    _, folder = bring(tmp_path / 'f', votes)
    assert list(folder.logs) == ['imported', 'imported-2']
    assert [answer.value for answer in folder.counted()] == [0, 1]
    bring(tmp_path / 'f', votes[:1], 'anna')
    _, folder = bring(tmp_path / 'f', votes[:1], 'bob')
    found = report(folder)
    assert (found['agreement']['pairs'], found['agreement']['raw']) == (1, 1)
    pairs = {name: row['agreement'] for name, row in found['labellers'].items()}
    assert pairs == {'anna': '1 of 1', 'bob': '1 of 1', 'imported': None, 'imported-2': None}


def test_the_last_answer_of_an_import_counts(tmp_path):
    for best, worst in ((GOOD, BAD), (BAD, GOOD)):
        records = [preference('abc', best, worst), preference('bca', GOOD, BAD)]
        said, folder = bring(tmp_path / 'f', records, 'anna')
    assert said[1] == '1 answers of anna added' and len(folder.counted()) == 2
    both = [preference('abc', best, worst) for best, worst in ((GOOD, BAD), (BAD, GOOD))]
    one = bring(tmp_path / 'one', both, 'anna')[1].counted()
    assert [answer.value for answer in one] == [folder.counted()[-1].value]
    tie = {'query': 'abc', 'sample0': GOOD, 'sample1': BAD, 'best': TIE}
    for more in ({}, {'bad': True}):
        _, folder = bring(tmp_path / 'bad', [{**tie, **more}], 'anna')
    assert folder.counted()[0].is_bad


@pytest.fixture
def answered(tmp_path):
    """Four questions that anna and bob answered; anna has changed an answer since the export."""
    path = tmp_path / 'f'
    bring(path, [preference(query, GOOD, BAD) for query in QUERIES])
    shutil.rmtree(path / 'answers')
    folder = LabelFolder(str(path))
    questions = list(folder.questions.values())
    for name, best in (('anna', 1), ('bob', 0)):
        with Labeller(folder, name) as labeller:
            for question in questions:
                labeller.answer(question, best, 7.5)
    bring(path, [preference('abc', best, worst) for best, worst in ((OTHER, BAD), (BAD, OTHER))])
    succeed(f'labels {path} --export {tmp_path}/own.jsonl --export_as text')
    with Labeller(folder, 'anna') as labeller:
        labeller.undo(labeller.log.last.get(questions[0].id).uuid)
        labeller.answer(questions[0], 0, 3.0)
    return path


def test_an_export_that_comes_back_changes_nothing(answered, tmp_path):
    before = contents(answered), report(LabelFolder(str(answered)))
    records = [json.loads(line) for line in (tmp_path / 'own.jsonl').read_text().splitlines()]
    said, folder = bring(answered, records)
    assert (contents(answered), report(folder)) == before
    assert '4 answers of anna were left out: those given here count' in said


def test_labellers_and_ids_come_back_and_nothing_else(tmp_path):
    """An id is that of a label: also one that somebody gives later to an imported question."""
    texts = {'query': 'a', 'sample0': 'ab', 'sample1': 'b'}
    records = [
        {**texts, 'best': 1, 'id': 7, 'labeller': 'anna'},
        {**texts, 'best': 0, 'id': 'b-7', 'labeller': 'bob'},
    ]
    bring(tmp_path / 'f', [{**record, 'margin': 1} for record in records])
    folder = LabelFolder(str(tmp_path / 'f'))
    (question,) = folder.questions.values()
    with Labeller(folder, 'carl') as carl:
        carl.answer(question, 1, 1.0)
    read = {}
    for form in ('text', 'tokens', 'preferences'):
        succeed(f'labels {tmp_path}/f --export {tmp_path}/{form}.json --export_as {form}')
        read[form] = json.loads((tmp_path / f'{form}.json').read_text())
    assert read['text'] == [*records, {**texts, 'best': 1, 'id': 7, 'labeller': 'carl'}]
    fields = {
        'tokens': {*texts, 'best', 'id'},
        'preferences': {'prompt', 'chosen', 'rejected', 'id'},
    }
    for form, names in fields.items():
        assert [label['id'] for label in read[form]] == [7, 'b-7', 7]
        assert all(label.keys() == names for label in read[form])


@pytest.mark.parametrize('is_skipped', [False, True])
def test_an_answer_that_was_taken_back_or_is_a_skip_blocks_no_import(
    answered, tmp_path, is_skipped
):
    folder = LabelFolder(str(answered))
    question = list(folder.questions.values())[3]
    answer = folder.logs['anna'].last.get(question.id)
    with Labeller(folder, 'anna') as labeller:
        labeller.undo(answer.uuid)
        if is_skipped:
            labeller.answer(question, None, 1.0, reason='other')
    records = [json.loads(line) for line in (tmp_path / 'own.jsonl').read_text().splitlines()]
    _, folder = bring(answered, records)
    assert folder.logs['anna'].last.get(question.id).value == answer.value


def test_nothing_is_imported_while_one_of_the_labellers_is_at_work(answered):
    records = []
    for name in ('anna', 'bob', 'new'):
        texts = {'query': 'zzz', 'sample0': GOOD, 'sample1': BAD}
        records.append({**texts, 'best': 0, 'labeller': name})
    before = contents(answered)
    with (
        Labeller(LabelFolder(str(answered)), 'bob'),
        pytest.raises(UserError, match='bob is labelling already; .* try again when'),
    ):
        bring(answered, records)
    assert contents(answered) == before
    said, folder = bring(answered, records)
    assert len(said) == 4 and len(folder.questions) == 6


def test_a_copy_of_a_labellers_file_is_refused(tmp_path):
    copy = 'a-copy-of-anna'
    folder = make_folder(tmp_path / 'f', 3, labellers=2)
    with Labeller(folder, 'anna') as labeller:
        labeller.answer(labeller.next_question(), 1, 2.0)
    file = tmp_path / 'f/answers/anna.jsonl'
    shutil.copy(file, file.with_name(f'{copy}.jsonl'))
    for read in (lambda: LabelFolder(folder.path), folder.refresh):
        with pytest.raises(UserError, match=f'{copy}.jsonl, line 1 repeats an answer of anna: one'):
            read()


def test_a_folder_has_one_scale(tmp_path):
    path, file = tmp_path / 'f', tmp_path / 'ratings.jsonl'
    scores = zip('abc', (0, 2.5, 4), strict=True)
    records = [{'query': 'q', 'sample': sample, 'score': score} for sample, score in scores]
    write_lines(file, records)
    words = '--labels.type scalar_rating'
    succeed(f'import_labels test {file} {path} {words}')
    assert json.loads((path / 'task.json').read_text())['scale'] == [0, 4]
    with pytest.raises(
        UserError, match=r"f, line 1, field 'score': 0 is not on the scale .* 1 to 9"
    ):
        bring(tmp_path / 'asked', records, label_type='scalar_rating')
    assert not list((tmp_path / 'asked/answers').iterdir())
    file.write_text(json.dumps({**records[0], 'score': 5}))
    refused = error_of(invoke(f'import_labels test {file} {path} {words}'))
    assert '5 is not on the scale' in refused and '0 to 4: use another folder' in refused
    file.write_text(json.dumps({'query': 'q', 'sample': 'd'}))
    succeed(f'ask test {path} --questions {file} {words}')
    assert '0-4 answer' in press(path, '50')
    assert LabelFolder(str(path)).counted()[-1].value == 0


@pytest.mark.parametrize(
    'name, values, scale',
    [
        ('scalar_rating', [3, 3], (3, 4)),
        ('scalar_compare', [-1.5, 0], (-2, 2)),
    ],
)
def test_scales_of_imports(name, values, scale):
    label_type = label_types.get(name)
    assert label_type.scale_of(values) == scale
    label_type.set_scale(*scale)
    control = label_type.control
    numbers = range(control.first, control.last + 1)
    order = range(len(label_type.samples))
    assert [label_type.answer_of([number], order) for number in numbers] == [
        *range(scale[0], scale[1] + 1)
    ]


def test_answers_to_gold_questions_train_nothing(tmp_path):
    labels = [preference(QUERIES[0], GOOD, BAD)]
    _, folder = bring(tmp_path / 'f', [])
    found, _ = tokenise.tokenise([('f', labels[0])], label_hparams('x'), encodings.Test)
    with QuestionWriter(folder.path, folder.task, encodings.Test) as writer:
        gold = into_folder.as_asked(found, writer.folder)
        into_folder.add_questions(gold, writer, 'gold', kind='gold', labellers=lambda number: 9)
    said, folder = bring(tmp_path / 'f', labels)
    assert said[-1] == '1 questions are gold: answers to them check labellers, and train nothing'
    assert folder.counted() == []
