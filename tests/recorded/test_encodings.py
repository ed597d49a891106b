"""language/encodings against the recorded tokens, and against byte pair encoding spelled out."""

import functools
import itertools
import json
import shutil

import numpy as np
import pytest
import torch
from golden_data import json_if_there, require_bpe
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_human_preferences.language import encodings

RECORDED = json_if_there('encoding.json', default={})


def encoder_of(name):
    if name == 'main':
        require_bpe()
    return encodings.by_name(name).get_encoder()


@pytest.mark.parametrize('name', RECORDED)
def test_attributes_are_the_recorded_ones(name):
    recorded, encoding = RECORDED[name], encodings.by_name(name)
    assert (encoding.name, encoding.n_vocab) == (name, recorded['n_vocab'])
    assert encoding.eot_token == recorded['eot_token']
    encoder = encoder_of(name)
    assert encoder.eot_token == recorded['encoder_eot_token']
    assert encoder.padding_token == recorded['padding_token']


@pytest.mark.parametrize('name', RECORDED)
def test_texts_are_encoded_as_recorded(name):
    encoder = encoder_of(name)
    for case in RECORDED[name]['texts']:
        assert encoder.encode(case['text']) == case['tokens'], case['text']
        assert encoder.decode(case['tokens']) == case['decoded'], case['text']


@pytest.mark.parametrize('name', RECORDED)
@pytest.mark.parametrize('convert', [list, np.array, torch.tensor], ids=['list', 'numpy', 'torch'])
def test_tokens_are_decoded_as_recorded(name, convert):
    encoder = encoder_of(name)
    for case in RECORDED[name]['decode']:
        tokens = convert(case['tokens'])
        if 'ok' in case:
            assert encoder.decode(tokens) == case['ok'], case
        else:
            assert case['error'] == 'KeyError'
            with pytest.raises(KeyError):
                encoder.decode(tokens)


def test_encoders_are_made_once():
    assert encoder_of('main') is encoder_of('main')


@functools.cache
def merge_ranks():
    lines = (require_bpe() / 'vocab.bpe').read_text(encoding='utf-8').split('\n')[1:-1]
    return {tuple(line.split(' ')): rank for rank, line in enumerate(lines)}


@functools.cache
def vocabulary():
    return json.loads((require_bpe() / 'encoder.json').read_text(encoding='utf-8'))


def byte_pairs(word):
    """Merge the pair of lowest rank until none can be merged (Sennrich et al., 2016)."""
    letters = {byte: letter for letter, byte in encodings._byte_of().items()}
    pieces = [letters[byte] for byte in word.encode()]
    while True:
        rank, pair = min(
            ((merge_ranks().get(pair, np.inf), pair) for pair in itertools.pairwise(pieces)),
            default=(np.inf, None),
        )
        if rank == np.inf:
            return [vocabulary()[piece] for piece in pieces]
        merged, i = [], 0
        while i < len(pieces):
            step = 2 if tuple(pieces[i : i + 2]) == pair else 1
            merged.append(''.join(pieces[i : i + step]))
            i += step
        pieces = merged


PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
ODD = st.text(
    st.sampled_from(" \n\t\r'’stdmlrveaAB12.,!éß中😀\u200b\xa0\x1c\x1f\x85\u3000<|>"), max_size=40
)


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(), ODD))
def test_any_text_is_encoded_as_defined(text):
    regex = pytest.importorskip('regex')
    encoder = encoder_of('main')
    tokens = encoder.encode(text)
    assert tokens == [token for word in regex.findall(PATTERN, text) for token in byte_pairs(word)]
    assert encoder.decode(tokens) == text


def test_half_a_character_is_replaced():
    encoder = encoder_of('main')
    assert encoder.decode(encoder.encode('a\ud83d!')) == 'a\ufffd!'


@pytest.fixture
def copy(tmp_path, monkeypatch):
    for name in ('encoder.json', 'vocab.bpe'):
        shutil.copy(require_bpe() / name, tmp_path / name)
        (tmp_path / name).chmod(0o644)
    monkeypatch.setenv('LMHP_GPT2_ENCODINGS', str(tmp_path))
    return tmp_path


def test_files_are_fetched_where_no_folder_is_given(copy, tmp_path, monkeypatch):
    place = tmp_path / 'openaipublic' / 'gpt-2' / 'encodings' / 'main'
    place.mkdir(parents=True)
    for name in ('encoder.json', 'vocab.bpe'):
        (copy / name).rename(place / name)
    monkeypatch.delenv('LMHP_GPT2_ENCODINGS')
    monkeypatch.setenv('LMHP_CACHE', str(tmp_path))
    monkeypatch.setenv('LMHP_OFFLINE', '1')
    encodings._byte_pair_encoder.cache_clear()
    encoder = encodings.Main.get_encoder()
    assert encoder.decode(encoder.encode('Hello')) == 'Hello'
    encodings._byte_pair_encoder.cache_clear()
