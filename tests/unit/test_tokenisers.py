"""language/texts/tokenisers: the tokeniser of a directory as an encoding."""

import json
import shutil

import pytest
import torch
from tiny_tokenisers import (
    END,
    SENTENCES,
    write_alone,
    write_byte_level,
    write_sentencepiece,
    write_words,
)

from lm_human_preferences import lm_tasks
from lm_human_preferences.errors import UserError
from lm_human_preferences.language import encodings
from lm_human_preferences.language.texts import tokenisers
from lm_human_preferences.language.trained_models import TrainedModel

TEXTS = [*SENTENCES, ' he said', "'s", '', ' ', '\n\n', f'a{END}b', '<s>the']


def write_config(directory, **config):
    (directory / 'config.json').write_text(json.dumps(config))
    return TrainedModel(str(directory))


@pytest.mark.parametrize('write', [write_byte_level, write_sentencepiece])
def test_a_text_comes_back_as_it_was(tmp_path, write):
    encoding = tokenisers.read(write(tmp_path))
    encoder = encoding.get_encoder()
    for text in TEXTS:
        tokens = encoder.encode(text)
        assert encoding.eot_token not in tokens
        padded = torch.tensor([*tokens, encoder.padding_token, encoder.padding_token])
        assert encoder.decode(padded) == text


def test_ids_of_an_encoding(tmp_path):
    """Its padding is the first id that is none of its own."""
    encoding = tokenisers.read(write_words(tmp_path, ['the', 'film', 'was', 'good']))
    encoder = encoding.get_encoder()
    (end,) = encoder.with_special_tokens().encode(END)
    assert (encoding.n_vocab, encoding.eot_token, encoder.padding_token) == (265, end, 265)
    assert encoder.encode('the film was good') == [256, 259, 261, 263]
    assert encoder.decode([256, end, 265, 265]) == f'the{END}'
    with pytest.raises(KeyError):
        encoder.decode([266])
    assert (encoding.fits(265), encoding.fits(300), encoding.fits(264)) == (True, True, False)


def test_the_token_of_a_text(tmp_path):
    encoder = tokenisers.read(write_words(tmp_path, ['was', '.', 'was.'])).get_encoder()
    for text in ('.', ' was', END):
        assert encoder.decode([encoder.single_token(text)]) == text
    with pytest.raises(UserError, match=r"^'dog' must be a single token, not 3$"):
        encoder.single_token('dog')
    pieces = tokenisers.read(write_sentencepiece(tmp_path)).get_encoder()
    assert pieces.decode([pieces.single_token('\n')]) == '\n'  # <0x0A>


def test_a_token_that_the_settings_alone_add_counts(tmp_path):
    write_byte_level(tmp_path)
    n_vocab = tokenisers.read(str(tmp_path)).n_vocab
    path = tmp_path / 'tokenizer_config.json'
    settings = {**json.loads(path.read_text()), 'additional_special_tokens': ['<think>']}
    path.write_text(json.dumps(settings))
    encoding = tokenisers.read(str(tmp_path))
    assert encoding.n_vocab == n_vocab + 1
    assert encoding.get_encoder().with_special_tokens().encode('<think>') == [n_vocab]


@pytest.mark.parametrize(
    'files, expected',
    [
        ({'tokenizer_config.json': {'eos_token': 'b'}, 'config.json': {'eos_token_id': 0}}, 'b'),
        ({'config.json': {'eos_token_id': 0}, 'generation_config.json': {'eos_token_id': 1}}, 0),
        ({'generation_config.json': {'eos_token_id': [2, 1]}}, 2),
        ({'config.json': {'eos_token_id': 999}}, None),  # no token of the tokeniser
    ],
)
def test_the_token_that_ends_a_text(tmp_path, files, expected):
    write_byte_level(tmp_path)
    settings = {'tokenizer_config.json': {'tokenizer_class': 'PreTrainedTokenizerFast'}}
    for name, content in {**settings, **files}.items():
        (tmp_path / name).write_text(json.dumps({**settings.get(name, {}), **content}))
    encoding = tokenisers.read(str(tmp_path))
    if expected == 'b':
        (expected,) = encoding.get_encoder().encode('b')
    assert encoding.eot_token == expected


def test_the_name_tells_tokenisers_apart_and_nothing_else(tmp_path):
    name = tokenisers.read(write_words(tmp_path / 'a', ['a', 'b'])).name
    assert name.startswith('tokenizer-')
    rules = json.loads((tmp_path / 'a' / 'tokenizer.json').read_text())

    def name_with(**changes):
        changed = {**rules, **changes}
        (tmp_path / 'a' / 'tokenizer.json').write_text(json.dumps(changed, indent=1))
        return tokenisers.read(str(tmp_path / 'a')).name

    truncation = {'direction': 'Right', 'max_length': 2, 'strategy': 'LongestFirst', 'stride': 0}
    assert name_with(truncation=truncation) == name
    assert len(tokenisers.read(str(tmp_path / 'a')).get_encoder().encode('a a b')) == 3
    assert name_with(normalizer={'type': 'NFC'}) != name
    assert tokenisers.read(write_words(tmp_path / 'b', ['b', 'a'])).name != name


def test_a_saved_model_has_its_tokeniser_with_it(tmp_path):
    original = tmp_path / 'original'
    write_byte_level(original, chat_template='x')
    (original / 'chat_template.jinja').write_text('y')
    (original / 'config.json').write_text('{"model_type": "llama"}')
    (original / 'code.py').write_text('raise SystemExit')
    encoding = TrainedModel(str(original)).encoding
    run = tmp_path / 'run'
    encoding.write_files(str(run))
    shutil.rmtree(original)
    names = {'encoding', 'tokenizer.json', 'tokenizer_config.json', 'chat_template.jinja'}
    assert {path.name for path in run.iterdir()} == names
    moved = TrainedModel(str(run)).encoding
    facts = (encoding.name, encoding.n_vocab, encoding.eot_token)
    assert (moved.name, moved.n_vocab, moved.eot_token) == facts
    assert moved.get_encoder().decode(moved.get_encoder().encode('dog.')) == 'dog.'
    assert moved.get_encoder().own.chat_template == 'y'
    write_words(run, ['a'])
    with pytest.raises(UserError, match=f'encoding tokenizer-.*, not {encoding.name}: restore'):
        TrainedModel(str(run)).encoding  # noqa: B018


def test_which_directories_have_the_encoding_of_gpt2(tmp_path, monkeypatch):
    write_byte_level(tmp_path)
    assert write_config(tmp_path, model_type='llama').encoding.name.startswith('tokenizer-')
    assert write_config(tmp_path, model_type='gpt2', vocab_size=400).encoding.n_vocab <= 400
    (tmp_path / 'tokenizer.json').unlink()
    assert write_config(tmp_path, model_type='gpt2').encoding is encodings.Main
    with pytest.raises(UserError, match=f'^{tmp_path} has no tokenizer.json: make one with'):
        write_config(tmp_path, model_type='llama').encoding  # noqa: B018


@pytest.mark.parametrize('content', ['{"model": {"vocab": {"a": 0}, "merges": [1]}}', '{'])
def test_damaged_files_are_told(tmp_path, content):
    (tmp_path / 'tokenizer.json').write_text(content)
    told = rf'^{tmp_path}/tokenizer.json (cannot be used|is not JSON)'
    with pytest.raises(UserError, match=told):
        tokenisers.read(str(tmp_path)).get_encoder()


CLASSES = {
    'of the file': {},
    'legacy': {'tokenizer_class': 'LlamaTokenizer', 'legacy': True},
    'not legacy': {'tokenizer_class': 'LlamaTokenizer', 'legacy': False},
}


@pytest.mark.parametrize('kind', CLASSES)
def test_contexts_are_as_transformers_reads_them_and_responses_go_on(tmp_path, kind):
    from transformers import AutoTokenizer

    write_sentencepiece(tmp_path / 'model', **CLASSES[kind])
    model = write_config(tmp_path / 'model', model_type='llama')
    own = AutoTokenizer.from_pretrained(tmp_path / 'model')
    encoder = model.encoding.get_encoder()
    (tmp_path / 'copy').mkdir()
    model.encoding.copy_files(str(tmp_path / 'copy'))
    copy = AutoTokenizer.from_pretrained(tmp_path / 'copy')
    assert tokenisers.read(str(tmp_path / 'copy')).name == model.encoding.name
    affixes = {'query_prefix': 'the ', 'query_suffix': '\n\nTL;DR:'}
    task = lm_tasks.TaskHParams(query_length=60, **affixes)
    for text in ('a cat', ' a dog.', 'Bär, 東京'):
        query = torch.tensor([encoder.encode(text)])
        (padded,) = lm_tasks.query_formatter(task, encoder)(query).tolist()
        context = [token for token in padded if token != encoder.padding_token]
        for each in (own, copy):
            found = each(f'the {text}\n\nTL;DR:', add_special_tokens=False)['input_ids']
            assert context == found
        begun = own('\n', add_special_tokens=False)['input_ids']
        going_on = own(f'\n{text}', add_special_tokens=False)['input_ids']
        assert going_on == begun + encoder.encode(text)


@pytest.mark.parametrize(
    'write, rules',
    [
        (write_alone, r'WordLevel, None, WhitespaceSplit\(\)'),
        (write_byte_level, r'BPE, Lowercase\(\), ByteLevel'),
    ],
)
def test_a_tokeniser_from_which_texts_do_not_come_back_is_refused_by_name(tmp_path, write, rules):
    directory = write(tmp_path) if write is write_byte_level else write(tmp_path, ['a', 'b'])
    path = tmp_path / 'tokenizer.json'
    if write is write_byte_level:
        rules_of_file = json.loads(path.read_text())
        path.write_text(json.dumps({**rules_of_file, 'normalizer': {'type': 'Lowercase'}}))
    with pytest.raises(UserError, match=rf'^{path} cannot be used: .*(Backend: {rules}|UNK)'):
        tokenisers.read(directory)
