"""Tables, as spreadsheets write them, and columns: of queries, labels, samples and scores."""

import json

import pytest

from lm_human_preferences import label_types, storage
from lm_human_preferences.datasets import jsonl
from lm_human_preferences.errors import UserError
from lm_human_preferences.labels.texts import records
from lm_human_preferences.language import datasets


def write(path, text, **settings):
    path.write_text(text, newline='', **settings)
    return str(path)


@pytest.mark.parametrize('separator, name', [(',', 'x.csv'), (';', 'x.CSV'), ('\t', 'x.tsv')])
def test_a_table_of_a_spreadsheet(tmp_path, separator, name):
    """With a byte order mark, line ends of Windows, quotes, empty lines and cells."""
    rows = ['query, id ', 'one,1', '"a, b; c","2"', '', '"two\r\nlines ""q""\u2028",', 'last,4']
    text = '\r\n'.join(rows)
    if separator != ',':
        text = text.replace('a, b', 'a# b').replace(',', separator).replace('#', ',')
    path = write(tmp_path / name, text, encoding='utf-8-sig')
    assert storage.read_table(path) == [
        (f'{path}, line 2', {'query': 'one', 'id': '1'}),
        (f'{path}, line 3', {'query': 'a, b; c', 'id': '2'}),
        (f'{path}, line 5', {'query': 'two\nlines "q"\u2028', 'id': ''}),
        (f'{path}, line 7', {'query': 'last', 'id': '4'}),
    ]


@pytest.mark.parametrize(
    'text, message',
    [
        ('a,b\n1,2\n1,2,3\n', 'line 3 has 3 values for 2 columns: put values with a comma'),
        ('a,b\n1\n', 'line 2 has 1 values for 2 columns'),
        ('a,a\n1,2\n', 'line 1: a header must give each column a name'),
        ('sep=;\na;b\n1;2\n', 'line 1 is no header but names the separator: delete'),
        ('a,b\n1,"2\n', 'line 2 is not a row of a table'),
    ],
)
def test_what_is_no_table(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        storage.read_table(write(tmp_path / 'x.csv', text))


@pytest.mark.parametrize(
    'text',
    [
        'a,"b; c; d"\n1,2\n',
        'a;"b; c, d, e"\n1;2\n',
        '\n\na\t"b;\n c, d"\n1\t2\n',
        'a;b\n;\n1;2\n;\n;\n',
    ],
)
def test_one_row_is_read(tmp_path, text):
    """Not separators in quotes, nor rows of empty cells, which spreadsheets leave."""
    ((_, row),) = storage.read_table(write(tmp_path / 'x.csv', text))
    assert list(row.values()) == ['1', '2']


def test_a_long_text_is_one_value(tmp_path):
    text = 'word ' * 40_000
    ((_, row),) = storage.read_table(write(tmp_path / 'x.csv', f'query\n{text}\n'))
    assert row == {'query': text}


@pytest.mark.parametrize('name', ['query', 'prompt'])
def test_queries_of_tables_and_records(tmp_path, name):
    table = write(tmp_path / 'q.csv', f'id;{name}\n7;abc\n')
    write(tmp_path / 'q.test.csv', f'{name}\nxyz\n')
    lines = write(tmp_path / 'q.jsonl', json.dumps({name: 'abc', 'id': '7', 'system': ''}))
    for path in (table, lines):
        ((_, text, columns),) = jsonl.read_queries(path)
        assert (text, columns) == ('abc', {'id': '7'})
    assert list(datasets.get_dataset(table).generator('train')) == ['abc']
    assert list(datasets.get_dataset(table).generator('test')) == ['xyz']


def test_queries_of_records_are_messages_too(tmp_path):
    said = {'prompt': [{'role': 'user', 'content': 'Hi'}], 'system': 'Be brief.'}
    ((_, text, _),) = jsonl.read_queries(write(tmp_path / 'q.jsonl', json.dumps(said)))
    assert text == 'system: Be brief.\n\nuser: Hi'
    parts = [{'role': 'user', 'content': [{'type': 'text', 'text': 'Hi'}]}]
    ((_, text, _),) = jsonl.read_queries(write(tmp_path / 'parts.jsonl', json.dumps(parts)))
    assert text == 'Hi'
    written = write(tmp_path / 'q.csv', f'prompt\n"{said["prompt"]}"\n')
    with pytest.raises(UserError, match="line 2, field 'prompt' is a list of messages that was"):
        jsonl.read_queries(written)
    for path, text in (('q.jsonl', '{"Prompt": "Hi"}'), ('q.csv', 'Prompt\nHi\n')):
        with pytest.raises(
            UserError, match='no field prompt or query.*in lower case: its fields are Prompt'
        ):
            jsonl.read_queries(write(tmp_path / path, text))


@pytest.mark.parametrize(
    'label_type, header, row, answer',
    [
        ('best_of_2', 'prompt,sample0,sample1,best', 'q,a,b,1', 1),
        ('best_of_2', 'query,sample0,sample1,best,bad', 'q,a,b,tie,True', 'tie'),
        ('best_of_2', 'prompt,chosen,rejected', 'q,a,b', 0),
        ('scalar_rating', 'query,sample,score', 'q,a,4.5', 4.5),
        ('scalar_compare', 'query,sample0,sample1,difference', 'q,a,b,-2', -2),
    ],
)
def test_labels_of_tables(tmp_path, label_type, header, row, answer):
    path = write(tmp_path / 'x.csv', f'id,labeller,{header}\n7,anna,{row}\n')
    ((where, record),) = records.read(path)
    kind = label_types.get(label_type).allow_ties()
    assert not records.unread(record, kind)
    label = records.parse(record, where, kind)
    assert (label.query, label.answer, label.is_bad) == ('q', answer, 'bad' in header)
    assert sorted(label.samples) == ['a', 'b'][: len(kind.samples)]
    assert (label.labeller, label.id) == ('anna', '7')


def test_columns_without_a_name(tmp_path):
    """As pandas writes the number of each row, and spreadsheets what is empty."""
    rows = storage.read_table(write(tmp_path / 'x.csv', ',query, \n0,a,\n1,b,\n'))
    assert [row for _, row in rows] == [
        {'column 1': number, 'query': text, 'column 3': ''} for number, text in ('0a', '1b')
    ]
