"""lm_tasks and make_score_fn against the recordings in tasks.npz and tasks.json."""

import json
from types import SimpleNamespace

import pytest
import torch
from compare import assert_close, assert_equal, tokens
from golden_data import json_if_there, load_npz, require_bpe, under
from sample_files import write_lines
from tiny_tokenisers import write_words

from lm_human_preferences import lm_tasks
from lm_human_preferences.distributed import comm as comms
from lm_human_preferences.errors import UserError
from lm_human_preferences.language import datasets, encodings
from lm_human_preferences.language.texts import tokenisers
from lm_human_preferences.train_policy import make_score_fn
from lm_human_preferences.utils import core

CASES = json_if_there('tasks.json', default={})


def by_id(kind):
    return pytest.mark.parametrize('case', CASES.get(kind, ()), ids=lambda case: case['id'])


def truncating(case):
    names = ('truncate_token', 'truncate_after', 'penalty_reward_value')
    return lm_tasks.TaskHParams(**{name: case[name] for name in names})


@by_id('truncate')
def test_postprocess_and_filter(case):
    recorded = under(load_npz('tasks.npz'), case['id'] + '/')
    hparams, responses = truncating(case), tokens(recorded['responses'])
    postprocess = lm_tasks.postprocess_fn_from_hparams(hparams, case['padding_token'])
    is_valid = lm_tasks.filter_fn_from_hparams(hparams)
    assert_equal(postprocess(responses), recorded['postprocessed'])
    assert_equal(responses, recorded['responses'], name='the argument was changed')
    assert_equal(is_valid(responses), recorded['filter_raw'])
    assert_equal(is_valid(postprocess(responses)), recorded['filter_postprocessed'])


@by_id('truncate')
def test_score(case):
    recorded = under(load_npz('tasks.npz'), case['id'] + '/')
    reward = SimpleNamespace(
        encoder=None,
        padding_token=case['padding_token'],
        score=lambda queries, responses: 0.1 * queries.float().sum(1) + 0.001 * responses.sum(1),
    )
    score_fn = make_score_fn(truncating(case), reward)
    scores, responses, stats = score_fn(tokens(recorded['queries']), tokens(recorded['responses']))
    assert_close(scores, recorded['score'], rtol=1e-5)
    assert_equal(responses, recorded['postprocessed'])
    assert list(stats) == ['score'] and stats['score'] is scores


@by_id('formatters')
def test_query_formatter(case):
    if case['encoding'] == 'main':
        require_bpe()
    encoder = encodings.by_name(case['encoding']).get_encoder()
    assert encoder.encode(case['query_prefix']) == case['prefix_tokens']
    assert encoder.encode(case['query_suffix']) == case['suffix_tokens']
    affixes = {name: case[name] for name in ('query_prefix', 'query_suffix')}
    embed_queries = lm_tasks.query_formatter(lm_tasks.TaskHParams(**affixes), encoder)
    recorded = under(load_npz('tasks.npz'), case['id'] + '/')
    assert_equal(embed_queries(tokens(recorded['queries'])), recorded['contexts'])


def test_a_text_ends_a_response_at_its_token(tmp_path):
    """It goes before a token, and other tokens that hold it do not count."""
    words = ['a', 'a.', '.', '."', 'b']
    encoder = tokenisers.read(write_words(tmp_path, words)).get_encoder()
    hparams = lm_tasks.TaskHParams(truncate_token=0, truncate_text='.', truncate_after=1)
    padding = encoder.padding_token
    truncate = lm_tasks.postprocess_fn_from_hparams(hparams, padding, encoder)
    is_valid = lm_tasks.filter_fn_from_hparams(hparams, encoder)
    token = [encoder.encode(word)[0] for word in words]
    rows = [[1, 3, 4, 2], [1, 0, 2, 1], [2, 0, 4, 1], [2, 0, 4, 4]]
    responses = torch.tensor([[token[number] for number in row] for row in rows])
    expected = responses.clone()
    expected[1, 3:] = padding
    assert truncate(responses).tolist() == expected.tolist()
    assert is_valid(responses).tolist() == [True, True, False, False]
    letters = encodings.Test.get_encoder()
    assert lm_tasks.truncate_tokens(hparams, letters) == set(letters.encode('.'))


@pytest.mark.parametrize('option', ['start_text', 'end_text'])
def test_texts_that_begin_and_end_queries_are_single_tokens(option):
    texts = {'start_text': None, option: 'ab'}
    hparams = lm_tasks.TaskHParams(query_length=3, query_dataset='test', **texts)
    with pytest.raises(UserError, match=rf"^--task.{option} 'ab' must be a single token, not 2$"):
        encoder = encodings.Test.get_encoder()
        lm_tasks.make_query_sampler(hparams, encoder=encoder, batch_size=1)


def notes_of(path, mode='test', **settings):
    hparams = lm_tasks.TaskHParams(query_length=4, query_dataset=str(path), **settings)
    return lm_tasks.query_notes(hparams, encodings.Test.get_encoder(), mode)


def test_what_becomes_of_the_texts_of_a_file_is_told(tmp_path, monkeypatch):
    path, tests = tmp_path / 'x.jsonl', tmp_path / 'x.test.jsonl'
    path.write_text('"a"\n' * 3)
    texts = ['ab', 'a.bc', 'a.bcdefg', 'a.b.cdefg', 'a.bcde.', '.', 'x.b', '']
    tests.write_text(''.join(f'"{text}"\n' for text in texts))
    part = f'Queries are from {tests}, the test split'
    assert notes_of(path, end_text='.') == [
        f'{part}: 2 of 8 texts are used',
        '  cut by --task.start_text, --task.end_text or --task.query_length: 1',
        "  left out, without --task.start_text '.': 2",
        "  left out, without --task.end_text '.' in --task.query_length 4: 4",
    ]
    assert notes_of(path)[0] == f'{part}: 6 of 8 texts are used'
    assert notes_of(path, start_text=None)[0] == f'{part}: 7 of 8 texts are used'
    assert notes_of(path, start_text=None)[-1] == '  left out, empty: 1'
    for affix in ('query_prefix', 'query_suffix'):  # a model can go on after that
        assert ': 8 of 8 texts' in notes_of(path, start_text=None, **{affix: 'a'})[0]
    assert notes_of(path, 'train', start_text=None) == [
        f'Queries are from all of {path}, the training split: 3 of 3 texts are used'
    ]
    # a large file is not read for this alone
    monkeypatch.setattr(datasets, 'COUNTED_CHARACTERS', 5)
    assert 'of its first ' in notes_of(path, start_text=None)[0]
    assert notes_of('test') == []
    tests.write_text('"ab"\n')
    with pytest.raises(UserError, match=r"no usable text: without --task.start_text '\.': 1$"):
        notes_of(path)


def drawn_queries(seed, batch_size, comm=None):
    hparams = lm_tasks.TaskHParams(query_length=5, query_dataset='test', start_text=None)
    core.set_seed(seed, comm.rank if comm else 0)
    sampler = lm_tasks.make_query_sampler(
        hparams=hparams, encoder=encodings.Test.get_encoder(), batch_size=batch_size, comm=comm
    )
    return torch.cat([sampler()['tokens'] for _ in range(3)])


def test_letters_follow_the_seed_of_the_run():
    """Defect 19: queries follow the seed, too."""
    assert torch.equal(drawn_queries(1, 4), drawn_queries(1, 4))
    assert not torch.equal(drawn_queries(1, 4), drawn_queries(2, 4))


@pytest.mark.parametrize(
    'source, stand_in',
    [(None, None), ('test', None), ('folder', None), ('labels.json', 'labels.json')],
)
def test_queries_of_labels_stand_in_where_they_are_a_file(tmp_path, monkeypatch, source, stand_in):
    (tmp_path / 'folder').mkdir()
    monkeypatch.chdir(tmp_path)
    asked = []
    get_dataset = datasets.get_dataset

    def note_labels(name, labels=None):
        asked.append(labels)
        return get_dataset(name)

    monkeypatch.setattr(datasets, 'get_dataset', note_labels)
    task = lm_tasks.TaskHParams(query_length=4, query_dataset='test', start_text=None)
    encoder = encodings.Test.get_encoder()
    lm_tasks.make_query_sampler(hparams=task, encoder=encoder, batch_size=1, labels=source)
    assert asked == [stand_in]


def test_ranks_take_turns_in_one_stream_of_letters():
    """Defect 19: in the original ranks could draw the same texts."""

    class Other(comms.Comm):
        rank, size = 1, 2

        def all_gather_object(self, value):
            return [first_of_rank_0, value]

    core.set_seed(1, 0)
    first_of_rank_0 = torch.randint(2**31, ()).item()
    assert torch.equal(drawn_queries(1, 2, Other()), drawn_queries(1, 4)[1::2])


@pytest.mark.parametrize('before, after, batches', [(1, 2, 4), (2, 1, 1), (2, 6, 4), (3, 3, 0)])
def test_samplers_go_on_from_a_position(tmp_path, before, after, batches):
    """Six queries at a time, at any number of ranks, in this epoch or a later one."""

    path = write_lines(tmp_path / 'x.jsonl', ['ab', '', 'cde', 'x', '', 'fx', 'ghi', 'jkl'])
    task = lm_tasks.TaskHParams(query_length=3, query_dataset=str(path), start_text=None)
    encoder = encodings.Test.get_encoder()

    def samplers(size):
        found = []
        for comm in (comms.Comm() for _ in range(size)):
            comm.rank, comm.size = len(found), size
            settings = {'encoder': encoder, 'batch_size': 6 // size, 'comm': comm}
            found.append(lm_tasks.make_query_sampler(task, **settings))
        return found

    def draw(ranks):
        return torch.stack([sampler()['tokens'] for sampler in ranks], dim=1).flatten(0, 1)

    alone, those_before, those_after = samplers(1), samplers(before), samplers(after)
    for _ in range(batches):
        assert torch.equal(draw(those_before), draw(alone))
    for sampler in those_after:
        sampler.seek(json.loads(json.dumps(those_before[0].position)))
        assert tuple(sampler.position) == those_before[0].position  # until something is drawn
    for _ in range(3):
        assert torch.equal(draw(those_after), draw(alone))
