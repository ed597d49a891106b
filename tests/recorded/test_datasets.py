"""datasets/ and language/datasets against recorded texts and tokens, and users' mistakes."""

import itertools
import json
import random
import types

import numpy as np
import pytest
from golden_data import json_if_there, load_json, load_npz, npz_keys, require, require_bpe
from query_sequences import sequences_of
from ranks import on_ranks
from sample_files import label_hparams

from lm_human_preferences import lm_tasks
from lm_human_preferences.datasets import books, cnndm, jsonl, registry
from lm_human_preferences.errors import UserError
from lm_human_preferences.labels import training_data
from lm_human_preferences.language import datasets, encodings

SETTINGS = json_if_there('datasets', 'settings.json')
TEXTS = json_if_there('datasets', 'generators.json', default={})


def name_of(setting):
    return f'{setting["id"]}/{setting["mode"]}'


# (what was recorded, over how many ranks)
KEYS = npz_keys('datasets', 'sequences.npz')
SHARDED = sorted({(key.rpartition('/')[0], int(key.rpartition('of')[2])) for key in KEYS})
SETTING = {name_of(setting): setting for setting in SETTINGS}


def of_rank(name, comm):
    return load_npz('datasets', 'sequences.npz')[f'{name}/rank{comm.rank}of{comm.size}']


@pytest.fixture
def recorded_files(cache, tmp_path, monkeypatch):
    (tmp_path / 'cache').mkdir()
    (tmp_path / 'cache' / 'openaipublic').symlink_to(require('datasets', 'input').resolve())
    monkeypatch.setenv('LMHP_OFFLINE', '1')
    books._passages.cache_clear()
    yield
    books._passages.cache_clear()


@pytest.fixture
def empty_store(cache, monkeypatch):
    monkeypatch.setenv('LMHP_OFFLINE', '1')
    books._passages.cache_clear()
    yield cache
    books._passages.cache_clear()


@pytest.fixture
def encoder():
    return encodings.Test.get_encoder()


def rank_of(rank, size):
    return types.SimpleNamespace(rank=rank, size=size)


def take(count, iterator):
    return list(itertools.islice(iterator, count))


@pytest.mark.parametrize('key', TEXTS)
def test_texts_are_the_recorded_ones(key, recorded_files):
    name, mode, shuffle, seed = key.split('/')
    generator = datasets.get_dataset(name).generator(
        mode,
        seed=int(seed.removeprefix('seed=')),
        shuffle=bool(int(shuffle.removeprefix('shuffle='))),
    )
    case = TEXTS[key]
    if 'texts' not in case:  # but where they are in another order
        case['texts'] = [TEXTS[case['of']]['texts'][i] for i in case['order_of_unshuffled']]
    assert list(generator) == case['texts']


def recorded_sequences(setting, **options):
    encoder = encodings.by_name(setting['enc']).get_encoder()
    assert encoder.padding_token == setting['padding_token']
    for token, text in (('start_token', 'start_text'), ('end_token', 'end_text')):
        expected = None if setting[text] is None else encoder.encode(setting[text])[0]
        assert setting[token] == expected
    names = ('mode', 'seed', 'shuffle', 'start_token', 'end_token')
    options |= {'encoder': encoder, **{name: setting[name] for name in names}}
    dataset = datasets.get_dataset(setting['dataset'])
    return sequences_of(dataset, setting['sequence_length'], **options)


def require_encoding(setting):
    """Skip where the files of a setting's encoding are missing: before ranks start as threads."""
    if setting['enc'] == 'main':
        require_bpe()


@pytest.mark.parametrize(('name', 'size'), [case for case in SHARDED if case[0] in SETTING])
def test_sequences_are_the_recorded_ones(name, size, recorded_files):
    setting = SETTING[name]
    require_encoding(setting)

    def work(comm):
        expected = of_rank(name, comm)
        ours = take(max(len(expected), 1), recorded_sequences(setting, comm=comm))
        np.testing.assert_array_equal(np.reshape(ours, (-1, setting['sequence_length'])), expected)

    on_ranks(size, work)


@pytest.mark.parametrize('setting', SETTINGS, ids=name_of)
def test_epochs_are_as_long_as_recorded(setting, recorded_files):
    require_encoding(setting)
    once = list(recorded_sequences(setting, repeat_count=1))
    assert len(once) == setting['sequences_per_epoch']
    assert list(recorded_sequences(setting, repeat_count=2)) == once + once


@pytest.mark.parametrize(
    ('name', 'size'), [case for case in SHARDED if case[0].startswith('query_sampler_')]
)
def test_batches_of_queries_are_the_recorded_ones(name, size, recorded_files):
    require_bpe()
    dataset = name.split('/')[0].removeprefix('query_sampler_')

    def work(comm):
        expected = of_rank(name, comm)
        length = expected.shape[2]
        (setting, *_) = (
            s for s in SETTINGS if (s['dataset'], s['sequence_length']) == (dataset, length)
        )
        texts = {name: setting[name] for name in ('start_text', 'end_text')}
        hparams = lm_tasks.TaskHParams(query_dataset=dataset, query_length=length, **texts)
        encoder = encodings.Main.get_encoder()
        sampler = lm_tasks.make_query_sampler(
            hparams=hparams, encoder=encoder, batch_size=expected.shape[1], comm=comm
        )
        np.testing.assert_array_equal([sampler()['tokens'].numpy() for _ in expected], expected)

    on_ranks(size, work)


def test_articles_are_cleaned_as_recorded():
    for case in load_json('datasets', 'clean_up_start.json'):
        assert cnndm.clean_up_start(case['text']) == case['cleaned'], case['text']


def test_stories_are_where_recorded():
    for case in load_json('datasets', 'path_of_url.json'):
        if 'ok' in case:
            assert cnndm.get_path_of_url(case['url']) == case['ok']
        else:
            with pytest.raises(UserError, match='of neither CNN nor the Daily Mail'):
                cnndm.get_path_of_url(case['url'])


@pytest.mark.parametrize(
    'text, start, end, expected, use',
    [
        ('ab.cd.ef', '.', '.', 'cd.', 'cut'),
        ('ab.cd.ef', '.', None, 'cd.ef', 'cut'),
        ('ab.cd.ef', None, '.', 'ab.cd.', 'cut'),
        ('ab.cdefghijkl.', '.', '.', '', 'no_end'),
        ('abcd', '.', None, '', 'no_start'),
        ('abcd', None, '.', '', 'no_end'),
        ('ab', None, None, 'ab', 'used'),
        ('abcdefghij', None, None, 'abcdefgh', 'cut'),
        ('abc.', '.', '.', 'abc.', 'used'),  # item 20 of original-defects.md
        ('ab..', '.', None, '.', 'cut'),
        ('', None, None, '', 'used'),
    ],
)
def test_how_texts_are_cut(encoder, text, start, end, expected, use):
    start, end = (x and encoder.encode(x)[0] for x in (start, end))
    rules = datasets.QueryRules(8, 'train', encoder, start_token=start, end_token=end)
    assert rules.query_of(text) == (encoder.encode(expected), use)


def test_the_test_data_set_is_reproducible_and_ranks_are_disjoint(encoder):
    def stream(count, **options):
        options = {'mode': 'train', 'encoder': encoder, **options}
        return take(count, sequences_of(datasets.get_dataset('test'), 40, **options))

    state = random.getstate()
    both = stream(20)
    assert random.getstate() == state and both == stream(20)
    assert stream(10, comm=rank_of(0, 2)) == both[::2]
    assert stream(10, comm=rank_of(1, 2)) == both[1::2]
    assert len({tuple(x) for x in both}) == 20 and {len(x) for x in both} == {40}
    assert both != stream(20, seed=1) and both != stream(20, mode='test')


def write(path, lines):
    path.write_text('\n'.join(lines), encoding='utf-8')
    return str(path)


def test_a_file_of_texts(tmp_path, encoder):
    # A line separator that is none in a .jsonl file.
    texts = [f'{letter}\u2028é' for letter in 'abcdefgh']
    lines = [json.dumps(text, ensure_ascii=False) for text in texts]
    path = write(tmp_path / 'x.jsonl', [*lines, '', ''])
    tests = write(tmp_path / 'x.test.jsonl', ['"t"', '"u"'])
    dataset = datasets.get_dataset(path)
    assert list(dataset.generator('train')) == texts
    assert list(dataset.generator('test')) == list(dataset.generator('valid')) == ['t', 'u']
    assert jsonl.part_of(path, 'train') == f'all of {path}, the training split'
    assert jsonl.part_of(path, 'test') == f'{tests}, the test split'
    shuffled = list(dataset.generator('train', seed=3, shuffle=True))
    random.seed(3)
    random.shuffle(texts)
    assert shuffled == texts
    first = take(1, sequences_of(dataset, 3, mode='train', encoder=encoder, seed=3))
    assert first == [encoder.encode(texts[0])]


def test_a_text_in_ten_is_a_test_text_and_stays_one(tmp_path):
    texts = [f'text {number}' for number in range(2000)] + ['\ud800']

    def part(mode, count):
        path = write(tmp_path / f'{count}.jsonl', map(json.dumps, texts[:count]))
        return list(datasets.get_dataset(path).generator(mode))

    train, test = part('train', 2001), part('test', 2001)
    assert sorted(train + test) == sorted(texts) and test == part('valid', 2001)
    assert 150 < len(test) < 250
    assert part('train', 500) == [text for text in train if text in texts[:500]]
    assert part('test', 500) == [text for text in test if text in texts[:500]]


@pytest.mark.parametrize('options', [{}, {'start_token': 25}, {'end_token': 24}])
def test_no_query_is_in_both_parts_though_many_texts_begin_alike(tmp_path, options):
    """Of 600 different texts of letters, of which the first four make 60 queries."""
    encoder = encodings.Test.get_encoder()
    texts = []
    for number in range(600):
        kind, other = divmod(number, 10)
        tail = chr(97 + other) * 4
        begin = f'{tail}z' if 'start_token' in options else ''
        texts.append(f'{begin}{chr(97 + kind % 8)}{chr(97 + kind // 8)}hy{tail}')
    path = write(tmp_path / 'x.jsonl', map(json.dumps, texts))
    parts = {}
    for mode in ('train', 'test'):
        found = sequences_of(
            datasets.get_dataset(path), 4, mode=mode, encoder=encoder, repeat_count=1, **options
        )
        parts[mode] = list(map(tuple, found))
        rules = datasets.QueryRules(4, mode, encoder, **options)
        usage, is_all = datasets.get_dataset(path).usage(rules)
        assert is_all and usage['used'] + usage['cut'] == usage['texts'] == len(parts[mode])
    assert len(parts['train']) + len(parts['test']) == 600
    assert 1 < len(set(parts['test'])) < 20 and not set(parts['train']) & set(parts['test'])


def test_a_part_without_texts_is_an_error_that_says_what_to_do(tmp_path):
    texts = {jsonl.is_test_text(letter): letter for letter in 'abcdefghijklmnopqrstuvwxyz'}
    for is_test, mode, part in ((True, 'train', 'all but one text in 10'), (False, 'test', 'one')):
        path = write(tmp_path / f'{mode}.jsonl', [json.dumps(texts[is_test])])
        message = f'--task.query_dataset {path}: there is no text in the .* split of {path}, {part}'
        message += f'.*{mode}.test.jsonl$'
        with pytest.raises(UserError, match=message):
            next(datasets.get_dataset(path).generator(mode))


def test_empty_lines_and_the_mark_of_windows_are_passed_over(tmp_path):
    (tmp_path / 'x.jsonl').write_text('\n"a"\n \n"b"\r\n\n', encoding='utf-8-sig')
    assert jsonl.read_queries(str(tmp_path / 'x.jsonl')) == [
        (f'{tmp_path}/x.jsonl, line 2', 'a', {}),
        (f'{tmp_path}/x.jsonl, line 4', 'b', {}),
    ]


def test_what_there_is_not(tmp_path):
    with pytest.raises(UserError) as e:
        datasets.get_dataset(f'{tmp_path}/none.jsonl')
    told = f'{tmp_path}/none.jsonl: no such file or directory'
    assert str(e.value) == f'--task.query_dataset cannot be read: {told}'
    for name in ('boks', None):
        with pytest.raises(UserError) as e:
            datasets.get_dataset(name)
        choices = f'choose {registry.choices()} or a .jsonl or .csv file of texts'
        assert str(e.value) == f'--task.query_dataset {name}: {choices}'


PUBLISHED = 'https://openaipublic.blob.core.windows.net/lm-human-preferences/labels'


@pytest.mark.parametrize(
    'path, mirror',
    [
        ('gs://lm-human-preferences/labels/descriptiveness/offline_5k.json', 'descriptiveness/'),
        (f'{PUBLISHED}/tldr/online_45k.json', None),
    ],
)
def test_published_labels_that_cannot_be_had_name_their_mirror(server, path, mirror):
    server.stop()
    with pytest.raises(UserError) as caught:
        training_data.load_labels(label_hparams(path), encodings.Main)
    told = '; or give the mirror hf://datasets/vwxyzjn/lm-human-preferences/'
    assert ('hf://' in str(caught.value)) == (mirror is not None)
    assert mirror is None or told + mirror in str(caught.value)


def label_file(tmp_path, queries):
    path = tmp_path / 'labels.json'
    labels = [{'query': query, 'sample0': [1], 'best': 0} for query in queries]
    path.write_text(json.dumps(labels))
    return str(path)


def test_queries_of_labels_stand_in_for_books(empty_store, tmp_path, encoder, capsys):
    padding, dot = encoder.padding_token, encoder.encode('.')[0]
    queries = [[i, dot, 7, dot] for i in range(12)]
    queries += [[20, dot, padding, padding], [0, dot, 7, dot]]
    path = label_file(tmp_path, queries)
    options = dict(mode='train', encoder=encoder, start_token=dot, end_token=dot, repeat_count=2)
    ours = list(sequences_of(datasets.get_dataset('books', labels=path), 4, **options))
    expected = queries[:13]
    random.Random(0).shuffle(expected)
    assert ours == expected + expected
    printed = capsys.readouterr().out
    assert printed.startswith('The data set books is not available (az://openaipublic/')
    used = f'Using the 13 queries of {path} instead, for training and for tests alike.\n'
    assert printed.endswith(used) and printed.count('\n') == 1
    shorter = sequences_of(datasets.get_dataset('books', labels=path), 3, **options)
    assert min(shorter) == [0, dot, padding]


def test_prompts_of_preferences_stand_in_for_books(empty_store, tmp_path, encoder):
    path = tmp_path / 'pairs.jsonl'
    prompts = ['a.bc.d', 'xyz', 'a.bc.d']
    path.write_text('\n'.join(json.dumps({'prompt': prompt}) for prompt in prompts))
    dot = encoder.encode('.')[0]
    options = dict(mode='train', encoder=encoder, start_token=dot, end_token=dot, repeat_count=1)
    dataset = datasets.get_dataset('books', labels=str(path))
    assert list(sequences_of(dataset, 3, **options)) == [encoder.encode('bc.')]


def test_books_themselves_come_first(recorded_files, tmp_path, capsys):
    path = label_file(tmp_path, [[1]])
    assert isinstance(next(datasets.get_dataset('books', labels=path).generator('train')), str)
    assert not capsys.readouterr().out
