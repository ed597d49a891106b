"""Labels as texts: the formats that are read, what does not fit, and the way back to texts."""

import contextlib
import hashlib
import json
import math
import random
import types

import pytest
from fuzzing import changed
from sample_files import label_hparams, write_lines
from tiny_tokenisers import write_byte_level

from lm_human_preferences import label_types
from lm_human_preferences.commands.texts import score
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.task_options import TaskHParams
from lm_human_preferences.labels import training_data
from lm_human_preferences.labels.texts import records, tokenise
from lm_human_preferences.labels.texts.records import TextLabel
from lm_human_preferences.labels.texts.token_ids import preferences
from lm_human_preferences.language import encodings
from lm_human_preferences.language.texts import tokenisers
from lm_human_preferences.runs.run_files import LABELLER

PAIRS = label_types.get('best_of_2')
USER = {'role': 'user', 'content': 'Why?'}
GOOD, BAD = ({'role': 'assistant', 'content': text} for text in ('Because.', 'No.'))
HELLO = [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello'}]
DIALOGUE = '\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Why?\n\nAssistant:'
MORE = '\n\nHuman: And?\n\nAssistant:'
WHOLE = {'chosen': f'{DIALOGUE} Because.', 'rejected': f'{DIALOGUE} No.'}
ANSWERS = {'chosen': 'The answer is 4.', 'rejected': 'The answer is 5.'}


def pair(query, chosen='Because.', rejected='No.'):
    """Return what is read of a preference: (query, chosen response, rejected response)."""
    return query, chosen, rejected


def parsed(record):
    label = records.parse(record, 'here', PAIRS)
    if not label.is_pair:
        return label
    return label.query, label.samples[label.answer], label.samples[1 - label.answer]


@pytest.mark.parametrize(
    'record, expected',
    [
        (
            {'query': 'a', 'sample0': 'b', 'sample1': 'c', 'best': 1, 'more': None},
            TextLabel('a', ('b', 'c'), 1),
        ),
        # an explicit prompt is the prompt, whatever responses begin with
        ({'prompt': 'Be', 'chosen': 'Because.', 'rejected': 'Best.'}, pair('Be', rejected='Best.')),
        # chat messages: with the prompt apart, in both dialogues, or both
        ({'prompt': 'Why?', 'chosen': [USER, GOOD], 'rejected': [USER, BAD]}, pair('Why?')),
        # one dialogue goes on: no response begins with a role, which would give it away
        (
            {'chosen': [USER, GOOD], 'rejected': [USER, BAD, *HELLO]},
            pair('Why?', rejected='No.\n\nuser: Hi\n\nassistant: Hello'),
        ),
        # one string each, without a prompt, as in hh-rlhf
        (WHOLE, pair(DIALOGUE, ' Because.', ' No.')),
    ],
)
def test_formats_of_preferences(record, expected):
    assert records.is_text(record)
    assert parsed(record) == expected


SYSTEM = {'role': 'system', 'content': 'Be short.'}
ASKED = 'system: Be short.\n\nuser: Why?'
IN_MESSAGES = {'chosen': [USER, GOOD], 'rejected': [USER, BAD]}
PARTS = [{'type': 'text', 'text': 'Be'}, {'type': 'text', 'text': 'cause.'}]


@pytest.mark.parametrize(
    'record, expected',
    [
        # a message of the system in a column of its own
        ({'system': 'Be short.', 'prompt': 'Why?', 'chosen': 'Because.', 'rejected': 'No.'}, ASKED),
        (
            {'system': 'Be short.', 'prompt': [SYSTEM, USER], 'chosen': [GOOD], 'rejected': [BAD]},
            ASKED,
        ),
        # the prompt, or its last turns, once more
        ({'prompt': [SYSTEM, USER], 'chosen': [USER, GOOD], 'rejected': [USER, BAD]}, ASKED),
        ({**IN_MESSAGES, 'prompt': [{**USER, 'content': 'Why? '}]}, 'Why? '),
        # contents in parts, a message that is not a list, and roles of ShareGPT
        ({'prompt': USER, 'chosen': {**GOOD, 'content': PARTS}, 'rejected': BAD}, 'Why?'),
        ({'prompt': {**USER, 'role': 'Human'}, 'chosen': [GOOD], 'rejected': [BAD]}, 'Why?'),
    ],
)
def test_what_belongs_to_the_query_is_there_once(record, expected):
    assert parsed(record) == pair(expected)


@pytest.mark.parametrize('name', ['prompt', 'input'])
def test_a_query_may_have_the_names_that_people_use(name):
    others = {'prompt': None, 'question': ' \n', 'input': ''}
    for query in ('what is 2+2', [{'role': 'user', 'content': 'what is 2+2'}]):
        record = {**others, **ANSWERS, name: query}
        expected = pair('what is 2+2', *ANSWERS.values())
        assert parsed(record) == expected
        assert not records.unread(record, PAIRS)
        assert score.texts_of(record, 'here')[0] == 'what is 2+2'
    own = {**others, 'sample0': 'a', 'sample1': 'b', 'best': 1, name: 'what is 2+2'}
    assert parsed(own) == TextLabel('what is 2+2', ('a', 'b'), 1)


@pytest.mark.parametrize(
    'record, message',
    [
        ({**ANSWERS, 'instruction': 'Add.', 'input': '2+2'}, "'instruction' and 'input'"),
        ({**WHOLE, 'prompt': 'Why?'}, 'whole transcripts, which hold the query: remove the field'),
        ({**IN_MESSAGES, 'prompt': 'Who?'}, "a query that differs from the field 'prompt'"),
        ({'chosen': [USER, GOOD], 'rejected': [USER, GOOD, USER]}, 'ends with a turn of the user'),
        ({'prompt': 'a', 'chosen': [{**GOOD, 'role': 'bot'}], 'rejected': [BAD]}, "role 'bot'"),
        # a message of the system would be lost, or a text of the user would be another's turn
        ({**ANSWERS, 'prompt': 'a', 'system': PARTS}, "'system' is a list: it must be a text"),
        ({**ANSWERS, 'prompt': 'a', 'system': 'b', 'system_prompt': 'c'}, 'two system messages'),
        # lists of messages as libraries write them into tables
        (
            {'prompt': 'a', 'chosen': str([USER, GOOD]), 'rejected': str([USER, BAD])},
            "'chosen' is a",
        ),
    ],
)
def test_a_query_that_is_not_understood_is_refused(record, message):
    """Else what two answers happen to begin with would be the query."""
    for read in (lambda: records.parse(record, 'here', PAIRS), lambda: score.texts_of(record, 'x')):
        with pytest.raises(UserError) as error:
            read()
        assert message in str(error.value)


@pytest.mark.parametrize(
    'labeller, name',
    [
        *((' ', None), (math.nan, None), (1.0, '1'), ('1.0', '1'), (' anna', 'anna')),
        ('a@b.c', f'a-b-c-{hashlib.sha256(b"a@b.c").hexdigest()[:8]}'),
    ],
)
def test_a_labeller_has_one_name_or_none(labeller, name):
    record = {'query': 'a', 'sample0': 'b', 'sample1': 'c', 'best': 0, 'labeller': labeller}
    label = records.parse(record, 'here', PAIRS)
    assert label.labeller == name and (name is None or LABELLER.fullmatch(name))


def test_a_label_may_have_an_id():
    record = {'prompt': 'a', 'chosen': 'b', 'rejected': 'c'}
    for id, read in ((7, 7), ('a-7', 'a-7'), ('', None), (math.nan, None)):
        assert records.parse({**record, 'id': id}, 'here', PAIRS).id == read
    with pytest.raises(UserError, match="^here, field 'id' must be a whole number or a text"):
        records.parse({**record, 'id': 1.5}, 'here', PAIRS)


def bytes_of(tmp_path):
    return tokenisers.read(write_byte_level(tmp_path))


CALL = {'role': 'assistant', 'content': 'a', 'tool_calls': [{'function': {'name': 'f'}}]}
IMAGE = {**GOOD, 'content': [*PARTS, {'type': 'image_url', 'image_url': {'url': 'x'}}]}
OTHER = {**USER, 'content': 'Who?'}
LEFT_OUT = [
    {'chosen': f'{DIALOGUE} a{MORE} b', 'rejected': f'{DIALOGUE} a\n\nHuman: x'},
    {'chosen': [USER, GOOD], 'rejected': [OTHER, BAD]},
    {'prompt': 'a', 'chosen': [GOOD], 'rejected': [CALL]},
    {'prompt': 'a', 'chosen': [IMAGE], 'rejected': [BAD]},
    {'prompt': 'a', 'chosen': '\u200b', 'rejected': 'b'},
    {'query': 'a', 'sample0': 'b', 'sample1': 'c', 'best': ''},  # in a table
    {'prompt': 'a', 'chosen': f'{"b" * 90}c', 'rejected': f'{"b" * 90}d'},  # once they are cut
]


@pytest.mark.parametrize('record', LEFT_OUT)
def test_what_cannot_be_used_is_left_out_and_counted(record, tmp_path):
    last_differs = {'chosen': [*HELLO, USER, GOOD], 'rejected': [*HELLO, USER, BAD, USER, GOOD]}
    settings = hparams(query=90, response=90, too_long='cut')
    found = [('here', record), ('there', last_differs)]
    labels, notes = tokenise.tokenise(found, settings, bytes_of(tmp_path))
    assert [label.samples[label.answer] for label in labels] == ['Because.']
    assert (
        'Left out: 1 records with an empty text or answer, two equal responses, a call of a tool, a'
        ' part that is not text, or answers to different queries'
    ) in notes


def test_fields_that_are_not_read_are_named_once_with_their_records(tmp_path):
    plain = {'prompt': 'Why?', 'chosen': 'Because.', 'rejected': 'No.'}
    found = [
        ('here', {**plain, 'margin': 1.5, 'images': [], 'tools': [{'name': 'f'}]}),
        ('here', {**plain, 'margin': 0, 'weight': None, 'score': math.nan, 'id': 3}),
    ]
    _, notes = tokenise.tokenise(found, hparams(query=40, response=40), bytes_of(tmp_path))
    assert notes[-1] == 'Not read, with the number of records that have it: margin (2), tools (1)'


@pytest.mark.parametrize(
    'record, message',
    [
        (
            {'text': 'a', 'more': 1},
            'it has the fields text, more, but needs query, sample0, sample1 and best, or else',
        ),
        ({'query': 'a', 'sample0': 'b', 'sample1': 2, 'best': 0}, "field 'sample1' is a int"),
        ({'query': 'a', 'sample0': 'b', 'sample1': 'c', 'best': 2}, 'from 0 to 1, not 2'),
        ({'query': 'a', 'sample0': 'b', 'sample1': 'c', 'best': 'tie'}, 'for ties, give --ties on'),
    ],
)
def test_what_is_no_record(record, message):
    with pytest.raises(UserError, match='^here') as error:
        records.parse(record, 'here', PAIRS)
    assert message in str(error.value)


@pytest.mark.parametrize('score', [10**400, True, 'nan'])
def test_what_is_no_score(score):
    record = {'query': 'a', 'sample': 'b', 'score': score}
    with pytest.raises(UserError, match="^here, field 'score' must be a number"):
        records.parse(record, 'here', label_types.get('scalar_rating'))


def hparams(source='x', too_long='refuse', label_type='best_of_2', query=3, response=2):
    lengths = {'task.query_length': query, 'task.response_length': response}
    settings = {'labels.type': label_type, 'labels.too_long': too_long, 'batch_size': 1}
    return label_hparams(source, **settings, **lengths)


LONG = {'prompt': 'abcde', 'chosen': 'x', 'rejected': 'wxyz'}
SHORT = {'prompt': 'ab', 'chosen': 'x', 'rejected': 'y'}


@pytest.mark.parametrize(
    'too_long, queries, samples, note',
    [
        ('cut', ['abc', 'ab'], ['wx', 'y'], 'Cut: 1 queries, to --task.query_length'),
        ('skip', ['ab'], ['y'], 'Skipped: 1 records with longer texts'),
    ],
)
def test_texts_that_are_too_long(tmp_path, too_long, queries, samples, note):
    path = write_lines(tmp_path / 'pairs.jsonl', [LONG, SHORT])
    labels, notes, _ = training_data.load_labels(hparams(path, too_long), encodings.Test)
    encoder = encodings.Test.get_encoder()

    def text(tokens):
        return encoder.decode([t for t in tokens.tolist() if t != encoder.padding_token])

    rejected = [labels[f'sample{1 - best}'][row] for row, best in enumerate(labels['best'])]
    assert [*map(text, labels['query'])] == queries and [*map(text, rejected)] == samples
    assert note in notes and notes[0] == f'Num labels found in source: {len(queries)}'


class Letters:
    eot_token, padding_token = 50, 53
    encode = staticmethod(lambda text: [ord(letter) for letter in text])


def tokeniser_of(encoder):
    encoding, task = types.SimpleNamespace(get_encoder=encoder), TaskHParams()
    task.query_length, task.response_length = 3, 2
    return tokenise.Tokeniser(encoding, task, 'cut', '--too_long')


def test_an_empty_query_is_the_end_of_a_text_where_there_is_one():
    found = [('here', {'query': '', 'sample0': 'good', 'sample1': 'bad', 'best': 0})]
    for encoding in (encodings.Test, encodings.Reviews):
        with pytest.raises(UserError, match='here has an empty query'):
            tokenise.tokenise(found, hparams(response=4), encoding)

    assert tokeniser_of(Letters).fitted('query', '', 'here') == [50]


@pytest.mark.parametrize('text', ['a banana', '\ud800'])
def test_what_cannot_be_encoded_is_named(text):
    encoding = encodings.Reviews
    found = [('here', {'prompt': text, 'chosen': 'good', 'rejected': 'bad'})]
    with pytest.raises(UserError, match='^here'):
        tokenise.tokenise(found, hparams(), encoding)


def test_the_content_says_whether_a_file_has_lines(tmp_path):
    lines = f'\ufeff\n{json.dumps(SHORT)}\r\n\r\n{json.dumps(LONG)}\n\n'
    for text in (lines, f'\ufeff{json.dumps([SHORT, LONG], indent=2)}'):
        (tmp_path / 'labels').write_text(text, newline='')
        assert [record for _, record in records.read(str(tmp_path / 'labels'))] == [SHORT, LONG]
    (tmp_path / 'labels').write_text(lines, newline='')
    places = [where.rpartition(', ')[2] for where, _ in records.read(str(tmp_path / 'labels'))]
    assert places == ['line 2', 'line 4']
    for content, message in (
        (b'{', 'line 1 is not JSON'),
        (b'[3]', 'label 0 is a int, not an object'),
        (b'\xff', 'UTF-8'),
        ('prompt'.encode('utf-16'), 'or `iconv -t UTF-8 -f UTF-16`'),
        ('prompt'.encode('utf-16-le'), 'or `iconv -t UTF-8 -f UTF-16`'),
        ('prompt'.encode('utf-16-be'), 'or `iconv -t UTF-8 -f UTF-16`'),
        (b'{"best": 0, "best": 1}', "an object has the field 'best' twice"),
    ):
        (tmp_path / 'labels').write_bytes(content)
        with pytest.raises(UserError, match=f'labels.* {message}'):
            records.read(str(tmp_path / 'labels'))


def test_preferences_are_the_best_with_each_of_the_others():
    label = {'query': 'a', 'sample0': 'b', 'sample1': 'c', 'sample2': 'd', 'best': 1}
    assert list(preferences([label], label_types.get('best_of_3'))) == [
        {'prompt': 'a', 'chosen': 'c', 'rejected': 'b'},
        {'prompt': 'a', 'chosen': 'c', 'rejected': 'd'},
    ]
    compared = [{**label, 'difference': difference} for difference in (-2.0, 0, 0.5)]
    found = preferences(compared, label_types.get('scalar_compare'))
    assert [each['chosen'] for each in found] == ['b', 'c']
    with pytest.raises(UserError, match='ratings hold no preferences'):
        list(preferences([], label_types.get('scalar_rating')))


RECORDS = [
    {'prompt': [USER], 'chosen': [GOOD], 'rejected': [BAD]},
    {'query': 'a', 'sample0': 'b', 'sample1': 'c', 'sample': 'd', 'best': 1},
    {'query': 'a', 'sample': 'b', 'score': 1.5, 'response': 'c'},
]


@pytest.mark.parametrize('label_type', ['best_of_2', 'scalar_rating', 'scalar_compare'])
def test_any_record_is_read_or_refused(label_type):
    rng, kind = random.Random(label_type), label_types.get(label_type)
    for _ in range(1000):
        record = changed(rng, rng.choice(RECORDS))
        record = changed(rng, record) if rng.random() < 0.5 else record
        if not isinstance(record, dict):
            continue
        with contextlib.suppress(UserError):
            label = records.parse(record, 'here', kind)
            assert isinstance(label.query, str) and label.answer is not None
            assert len(label.samples) == len(kind.samples)
            assert all(isinstance(sample, str) for sample in label.samples)
            assert label.labeller is None or LABELLER.fullmatch(label.labeller)
            records.unread(record, kind)


def test_a_dialogue_that_is_too_long_keeps_its_end():
    tokeniser = tokeniser_of(Letters)
    for query in ('user: a\n\nassistant: b\n\nuser: cde', f'{DIALOGUE[:-11]}cde'):
        assert tokeniser.fitted('query', query, 'here') == [ord(letter) for letter in 'cde']
