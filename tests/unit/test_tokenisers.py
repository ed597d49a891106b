"""language/tokenisers: the tokeniser of a directory as an encoding."""

import json
import shutil

import pytest
import torch
from golden_data import require_bpe
from tiny_tokenisers import END, SENTENCES, write_byte_level, write_sentencepiece, write_words
from tokenizers import Tokenizer

from lm_human_preferences.errors import UserError
from lm_human_preferences.language import encodings, tokenisers
from lm_human_preferences.language.trained_models import TrainedModel

TEXTS = [*SENTENCES, ' he said', "'s", '', ' ', '\n\n', f'a{END}b', '<s>the']


def write_config(directory, **config):
    (directory / 'config.json').write_text(json.dumps(config))
    return TrainedModel(str(directory))


@pytest.mark.parametrize('write', [write_byte_level, write_sentencepiece])
def test_a_text_comes_back_as_it_was(tmp_path, write):
    """Also where its first word has a space before it, or none; and what looks special is text."""
    encoding = tokenisers.read(write(tmp_path))
    encoder = encoding.get_encoder()
    for text in TEXTS:
        tokens = encoder.encode(text)
        assert encoding.eot_token not in tokens
        padded = torch.tensor([*tokens, encoder.padding_token, encoder.padding_token])
        assert encoder.decode(padded) == text


def test_texts_that_are_encoded_one_by_one_make_the_whole(tmp_path):
    encoder = tokenisers.read(write_sentencepiece(tmp_path)).get_encoder()
    parts = ['the cat', ' a dog', '.']
    tokens = [token for part in parts for token in encoder.encode(part)]
    assert tokens == encoder.encode(''.join(parts))


def test_ids_of_an_encoding(tmp_path):
    words = ['the', 'film', 'was', 'good']
    encoding = tokenisers.read(write_words(tmp_path, words))
    encoder = encoding.get_encoder()
    assert (encoding.n_vocab, encoding.eot_token, encoder.padding_token) == (5, 4, 5)
    assert encoder.encode('the film was good') == [0, 1, 2, 3]
    assert encoder.decode([0, 4, 5, 5]) == f'the {END}'
    with pytest.raises(KeyError):
        encoder.decode([6])
    with pytest.raises(UserError, match="cannot encode 'bad film'"):
        encoder.encode('bad film')
    assert (encoding.fits(5), encoding.fits(64), encoding.fits(4)) == (True, True, False)


def test_the_tokens_that_hold_a_text(tmp_path):
    words = ['was', 'wash', "was'", '.', 'was.', '..."', '3.5', '\u3002']
    encoder = tokenisers.read(write_words(tmp_path, words)).get_encoder()
    assert encoder.tokens_holding('.') == {3, 4, 5, 6}
    assert encoder.tokens_holding('was') == {0, 2, 4}
    with pytest.raises(UserError, match=r"^'\\n' is in no token of the tokeniser of the model$"):
        encoder.tokens_holding('\n')
    pieces = tokenisers.read(write_sentencepiece(tmp_path)).get_encoder()
    assert [pieces.decode([token]) for token in pieces.tokens_holding('\n')] == ['\n']  # <0x0A>
    found = map(pieces.decode, [[token] for token in pieces.tokens_holding('.')])
    assert sorted(found) == [' .', '.', '.', '..']  # a letter, and <0x2E>


def test_a_token_that_was_added_last_counts(tmp_path):
    path = tmp_path / 'tokenizer.json'
    write_words(tmp_path, ['a', 'b'])
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(['<pad>'])
    tokenizer.save(str(path))
    assert tokenisers.read(str(tmp_path)).n_vocab == 4


@pytest.mark.parametrize(
    'files, expected',
    [
        ({'tokenizer_config.json': {'eos_token': 'b'}, 'config.json': {'eos_token_id': 0}}, 1),
        ({'tokenizer_config.json': {'eos_token': {'content': 'b'}}}, 1),
        ({'tokenizer_config.json': {'eos_token': 'elsewhere'}}, None),
        ({'config.json': {'eos_token_id': 0}, 'generation_config.json': {'eos_token_id': 1}}, 0),
        ({'config.json': {'eos_token_id': None}, 'generation_config.json': {'eos_token_id': 1}}, 1),
        ({'generation_config.json': {'eos_token_id': [2, 1]}}, 2),
        ({'config.json': {'eos_token_id': 3}}, None),  # no token of the tokeniser
        ({}, None),
    ],
)
def test_the_token_that_ends_a_text(tmp_path, files, expected):
    write_words(tmp_path, ['a', 'b'])
    (tmp_path / 'tokenizer_config.json').unlink()
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert tokenisers.read(str(tmp_path)).eot_token == expected


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
    assert tokenisers.read(str(tmp_path / 'a')).get_encoder().encode('a a b') == [0, 0, 1]
    assert name_with(pre_tokenizer={'type': 'Whitespace'}) != name
    assert tokenisers.read(write_words(tmp_path / 'b', ['b', 'a'])).name != name


def test_pairs_that_merge_are_written_in_two_ways(tmp_path):
    path = tmp_path / 'tokenizer.json'
    name = tokenisers.read(write_byte_level(tmp_path)).name
    rules = json.loads(path.read_text())
    rules['model']['merges'] = [' '.join(pair) for pair in rules['model']['merges']]
    path.write_text(json.dumps(rules))
    assert tokenisers.read(str(tmp_path)).name == name


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
    assert (moved.name, moved.n_vocab, moved.eot_token) == (
        encoding.name,
        encoding.n_vocab,
        encoding.eot_token,
    )
    assert moved.get_encoder().decode(moved.get_encoder().encode('dog.')) == 'dog.'
    write_words(run, ['a'])
    with pytest.raises(UserError, match=f'is tokenizer-.*, not {encoding.name}: put the file back'):
        TrainedModel(str(run)).encoding  # noqa: B018


def test_which_directories_have_the_encoding_of_gpt2(tmp_path, monkeypatch):
    write_byte_level(tmp_path)
    assert write_config(tmp_path, model_type='llama').encoding.name.startswith('tokenizer-')
    assert write_config(tmp_path, model_type='gpt2', vocab_size=400).encoding.n_vocab <= 400
    # as many tokens as GPT-2 has, but others
    assert write_config(tmp_path, model_type='gpt2').encoding.name.startswith('tokenizer-')
    (tmp_path / 'tokenizer.json').unlink()
    assert write_config(tmp_path, model_type='gpt2').encoding is encodings.Main
    with pytest.raises(UserError, match=f'^{tmp_path} has no tokenizer.json: make one with'):
        write_config(tmp_path, model_type='llama').encoding  # noqa: B018


def test_a_tokeniser_with_the_vocabulary_of_gpt2_is_main(tmp_path):
    vocab = json.loads((require_bpe() / 'encoder.json').read_text())
    rules = {'model': {'type': 'BPE', 'vocab': vocab, 'merges': []}}
    (tmp_path / 'tokenizer.json').write_text(json.dumps(rules))
    assert write_config(tmp_path, model_type='gpt2', vocab_size=50257).encoding is encodings.Main
    assert write_config(tmp_path, model_type='gpt2').encoding is encodings.Main
    own = write_config(tmp_path, model_type='llama', vocab_size=50257).encoding
    assert own.name.startswith('tokenizer-')


@pytest.mark.parametrize(
    'content',
    [
        '[]',
        '{}',
        '{"model": {"vocab": {}}}',
        '{"model": {"vocab": {"a": 0}}}',
        '{"model": {"vocab": {"a": 0}, "merges": [1]}}',
        '{',
    ],
)
def test_damaged_files_are_told(tmp_path, content):
    (tmp_path / 'tokenizer.json').write_text(content)
    with pytest.raises(UserError, match=rf'^{tmp_path}/tokenizer.json is not (a tokeniser|JSON)'):
        tokenisers.read(str(tmp_path)).get_encoder()


def test_a_token_that_the_settings_alone_add_is_refused(tmp_path):
    """transformers would add it; here its text would be letters."""
    write_byte_level(tmp_path)
    settings = json.loads((tmp_path / 'tokenizer_config.json').read_text())
    rules = json.loads((tmp_path / 'tokenizer.json').read_text())
    known = {str(each['id']): {'content': each['content']} for each in rules['added_tokens']}
    for added, is_known in ((known, True), ({**known, '9999': {'content': '<think>'}}, False)):
        text = json.dumps({**settings, 'added_tokens_decoder': added})
        (tmp_path / 'tokenizer_config.json').write_text(text)
        if is_known:
            tokenisers.read(str(tmp_path))
            continue
        with pytest.raises(UserError, match=r"adds the token '<think>' as 9999, which tokenizer"):
            tokenisers.read(str(tmp_path))
