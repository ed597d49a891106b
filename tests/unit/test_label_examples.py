"""Programs of examples/labels: files in the public formats, and the labels that are read."""

import json
import runpy
from pathlib import Path

import pytest

from lm_human_preferences import label_types
from lm_human_preferences.labels.texts import records

EXAMPLES = Path(__file__).resolve().parents[2] / 'examples/labels'


@pytest.fixture
def converted(tmp_path, monkeypatch, capsys):
    """Function that runs an example on the text of a file, and returns what is read and said."""

    def convert(name, text, *more, label_type='best_of_2'):
        path = tmp_path / 'file'
        path.write_text(text)
        monkeypatch.setattr('sys.argv', [name, str(path), *more])
        runpy.run_path(str(EXAMPLES / name), run_name='__main__')
        printed = capsys.readouterr()
        (tmp_path / 'labels.jsonl').write_text(printed.out)
        found = records.read(str(tmp_path / 'labels.jsonl'))
        kind = label_types.get(label_type)
        kind = kind.allow_ties() if 'tie' in printed.out else kind
        assert not any(records.unread(record, kind) for _, record in found)
        return [records.parse(record, where, kind) for where, record in found], printed.err

    return convert


def said_by(labels):
    return [(label.labeller, label.query, label.samples, label.answer) for label in labels]


def lines_of(*found):
    return ''.join(f'{json.dumps(each)}\n' for each in found)


def annotation(selected, user, updated, control='pw', **changes):
    names = {'from_name': control, 'to_name': 'answer2,answer1'}
    result = {'value': {'selected': selected}, **names, 'type': 'pairwise'}
    rest = {'id': 1, 'was_cancelled': False, 'lead_time': 4.1, 'updated_at': f'{updated}T11:30:00Z'}
    return {'completed_by': user, 'result': [result], **rest, **changes}


def test_label_studio(converted):
    """Sides by the names that are compared; of one annotator the last answer is the last line."""
    task = {
        'id': 12,
        'annotations': [
            annotation('right', {'id': 7, 'email': 'a@b.c'}, '2024-02-03'),
            annotation('left', 7, '2023-02-03'),
            annotation('left', 8, '2024-02-03', was_cancelled=True),
            annotation('left', 9, '2024-02-03', control='harmless'),
            annotation('right', None, '2024-02-04'),  # of an import
        ],
        'data': {'prompt': 'Why?', 'answer1': 'Because.', 'answer2': 'No.'},
        'meta': {},
    }
    labels, said = converted('label_studio.py', json.dumps([task]), 'pw')
    samples = ('No.', 'Because.')
    who = 'annotator-7'
    answers = [(who, 0), (who, 1), (None, 1)]
    assert said_by(labels) == [(name, 'Why?', samples, answer) for name, answer in answers]
    assert {label.id for label in labels} == {12}
    assert said == '2 annotations without an answer of pw were left out\n'


def test_hh_rlhf(converted):
    begin = '\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Why?\n\nAssistant:'
    record = {'chosen': f'{begin} Because.', 'rejected': f'{begin} No.'}
    labels, _ = converted('hh_rlhf.py', lines_of(record))
    query = 'user: Hi\n\nassistant: Hello\n\nuser: Why?'
    assert said_by(labels) == [(None, query, ('Because.', 'No.'), 0)]


def test_helpsteer2(converted):
    def rated(prompt, response, helpfulness):
        return {'prompt': prompt, 'response': response, 'helpfulness': helpfulness}

    found = [rated('c', 'x', 1), rated('c', 'y', 4), rated('d', 'x', 2), rated('d', 'y', 2)]
    labels, said = converted('helpsteer2.py', lines_of(*found))
    assert said_by(labels) == [(None, 'c', ('y', 'x'), 0)]
    assert said == '1 pairs of the same helpfulness were left out\n'


def test_ultrafeedback(converted):
    def scored(*scores):
        completions = [{'response': f'r{score}', 'overall_score': score} for score in scores]
        return {'instruction': 'Why?', 'completions': completions}

    found = lines_of(scored(6.5, 8.5, 7, 1), scored(8, 8, 1, 2), scored(1, 2))
    labels, said = converted('ultrafeedback.py', found, label_type='best_of_4')
    assert said_by(labels) == [(None, 'Why?', ('r6.5', 'r8.5', 'r7', 'r1'), 1)]
    assert said == '2 records without one best of four were left out\n'


def test_shp(converted):
    def voted(preferred, ratio):
        texts = {'history': 'Why?', 'human_ref_A': 'a', 'human_ref_B': 'b'}
        ids = {'c_root_id_A': 'x', 'c_root_id_B': 'y'}
        return {**ids, **texts, 'labels': preferred, 'score_ratio': ratio}

    labels, _ = converted('shp.py', lines_of(voted(1, 3.0), voted(0, 2.0), voted(0, 1.5)))
    assert said_by(labels) == [(None, 'Why?', ('a', 'b'), 0), (None, 'Why?', ('a', 'b'), 1)]
    assert labels[0].id == 'x-y'


def test_arena(converted):
    def voted(winner, turn=1):
        question = {'content': 'Why?', 'role': 'user'}
        answers = [{'content': text, 'role': 'assistant'} for text in 'ab']
        first, second = ([question, answer] * turn for answer in answers)
        rest = {'question_id': 'q', 'judge': 'arena_user_9', 'turn': turn, 'winner': winner}
        return {**rest, 'conversation_a': first, 'conversation_b': second}

    text = json.dumps([voted('model_b'), voted('tie (bothbad)'), voted('model_a', turn=2)])
    labels, said = converted('arena.py', text)
    judge = 'arena_user_9'
    assert said_by(labels) == [(judge, 'Why?', ('a', 'b'), 1), (judge, 'Why?', ('a', 'b'), 'tie')]
    assert said == '1 conversations of several turns were left out\n'


def test_annotator_columns(converted):
    table = 'prompt,response_a,response_b,anna,bob\nWhy?,x,y,A,B\nWho?,x,"y,z", ,tie\n'
    long = 'y' * 200_000
    table += f'Who?,x,{long},B\n'  # without a last cell
    labels, _ = converted('annotator_columns.py', table)
    assert said_by(labels) == [
        ('anna', 'Why?', ('x', 'y'), 0),
        ('bob', 'Why?', ('x', 'y'), 1),
        ('bob', 'Who?', ('x', 'y,z'), 'tie'),
        ('anna', 'Who?', ('x', long), 1),
    ]


def test_all_are_named_in_the_documentation():
    page = (EXAMPLES.parents[1] / 'docs/labelling.md').read_text(encoding='utf-8')
    for path in EXAMPLES.glob('*.py'):
        assert f'`{path.name}`' in page
        assert len(path.read_text(encoding='utf-8').splitlines()) <= 40


def test_summarize_from_feedback(converted):
    def compared(choice, **info):
        summaries = [{'text': ' One.', 'policy': 'ref'}, {'text': ' Two.', 'policy': 'sup1'}]
        about = {'info': {'id': 't3_1', **info}, 'split': 'train'}
        return {**about, 'summaries': summaries, 'choice': choice, 'worker': 'w1'}

    post = compared(1, post='I fell.', title='Fall', subreddit='tifu')
    article = compared(0, article='They won.', site='cnn')
    labels, _ = converted('summarize_from_feedback.py', lines_of(post, article))
    assert said_by(labels) == [
        ('w1', 'I fell.', (' One.', ' Two.'), 1),
        ('w1', 'They won.', (' One.', ' Two.'), 0),
    ]
    assert labels[0].id == 't3_1'
