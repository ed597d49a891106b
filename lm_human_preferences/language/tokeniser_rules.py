"""A model's tokeniser: transformers' own, and its rules for texts that are parts of longer ones."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import tempfile
import unicodedata
from collections.abc import Mapping
from typing import Any

import tokenizers

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError, no_panics
from lm_human_preferences.runs import run_files

CONFIG = 'config.json'
# Nothing is cut, padded or put around a text.
_PLAIN = {'truncation': None, 'padding': None, 'post_processor': None}
# Letters that a small vocabulary lacks are no reason to refuse it; these are in every real one.
_TEXTS = ('The fox, 12 times. It is.', ' a', 'a', 'a ', '  a  b', 'a\n\nb\n', '\n\na', "don't !")
_OTHER_TEXTS = ('', '<s> </s>', 'A\tb\r\n', 'Bär, nai\u0308ve', '東京 ﬁ ①', 'x' * 40, '🙂')


@dataclasses.dataclass(frozen=True, eq=False)
class Tokeniser:
    """A tokeniser as transformers reads it (`own`), and its `rules` without the space before texts.

    digest: of all that decides how a text is encoded.
    """

    own: Any
    rules: dict[str, Any]
    digest: str


def load(files: Mapping[str, str]) -> Tokeniser:
    """Read the tokeniser in files {name: path}, here or cached; UserError where texts are lost."""
    local = {name: os.path.abspath(storage.cached_path(path)) for name, path in files.items()}
    found = _load(tuple((name, path, storage.md5(path)) for name, path in local.items()))
    if isinstance(found, str):
        raise UserError(f'{files[run_files.TOKENISER]} {found}')
    return found


@functools.lru_cache(maxsize=8)
def _load(files: tuple[tuple[str, str, str], ...]) -> Tokeniser | str:
    """Return the tokeniser in files (name, path, MD5), or why it cannot be taken."""
    try:
        with no_panics():
            return _loaded({name: path for name, path, _ in files})
    except Exception as e:  # of any kind: it is code for many tokenisers
        return f'is not a tokeniser: {" ".join(str(e).split()) or repr(e):.200}'


def _loaded(files: Mapping[str, str]) -> Tokeniser | str:
    """Return what _load does; raises whatever transformers does."""
    from transformers import AutoTokenizer, TokenizersBackend  # it takes seconds to import

    # Its class, so its rules, are said by the model's config or its own.
    is_said = CONFIG in files or run_files.TOKENISER_SETTINGS in files
    kind: Any = AutoTokenizer if is_said else TokenizersBackend
    with tempfile.TemporaryDirectory() as folder:
        for name, path in files.items():
            if name != CONFIG:
                os.symlink(path, os.path.join(folder, name))
        if CONFIG in files:  # of which no more is of interest, and might be damaged
            storage.write_json(os.path.join(folder, CONFIG), _kind_in(files[CONFIG]))
        own = kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not isinstance(own, TokenizersBackend):
        return f'is read by {type(own).__name__} of transformers, which is not a fast tokeniser'
    own.backend_tokenizer.no_truncation()
    own.backend_tokenizer.no_padding()
    if not own.get_vocab():
        return 'is not a tokeniser: it has no tokens'
    rules = without_prefix_space(json.loads(own.backend_tokenizer.to_str()) | _PLAIN)
    parts = tokenizer_of(rules)
    problem = _problem(parts, own.unk_token_id)
    if problem:
        kinds = [rules['model']['type']]
        for name in ('normalizer', 'pre_tokenizer'):
            kinds += _types(rules[name])
        return f'cannot be used: {problem} ({type(own).__name__}: {", ".join(kinds)})'
    stored = storage.read_json(files[run_files.TOKENISER])
    is_as_stored = _are_alike(parts, tokenizer_of(without_prefix_space(stored) | _PLAIN))
    return Tokeniser(own, rules, digest(encoding_rules(stored if is_as_stored else rules)))


def _kind_in(config: str) -> dict[str, Any]:
    """Return what decides the class of a tokeniser, of a model's config.json."""
    content = storage.read_json(config)
    found = {}
    for name in ('model_type', 'tokenizer_class'):
        if isinstance(content, dict) and name in content:
            found[name] = content[name]
    return found


def tokenizer_of(rules: Mapping[str, Any]) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(rules))


def _problem(parts: tokenizers.Tokenizer, unknown: Any) -> str:
    """Return why texts cannot be encoded one by one, put together and read again, or ''."""
    parts.encode_special_tokens = True
    for text in _TEXTS + _OTHER_TEXTS:
        tokens = parts.encode(text, add_special_tokens=False).ids
        if text in _OTHER_TEXTS and unknown in tokens:
            continue
        back = parts.decode(tokens, skip_special_tokens=False)
        # Unicode's normal forms are read as the same text: Qwen's rules compose accents.
        if len({unicodedata.normalize('NFKC', each) for each in (back, text)}) > 1:
            return f'{text!r} comes back from its tokens as {back!r}'
    both = [parts.encode(text, add_special_tokens=False).ids for text in ('The fox', 'es ran.')]
    joined = parts.decode(both[0] + both[1], skip_special_tokens=False)
    return '' if joined == 'The foxes ran.' else f"'The fox' and 'es ran.' give {joined!r}"


def _are_alike(one: tokenizers.Tokenizer, other: tokenizers.Tokenizer) -> bool:
    """Return whether two tokenisers have the same tokens, and make the same of texts."""
    one.encode_special_tokens = other.encode_special_tokens = True
    for text in (*_TEXTS, *_OTHER_TEXTS):
        first = one.encode(text, add_special_tokens=False)
        second = other.encode(text, add_special_tokens=False)
        if first.ids != second.ids:
            return False
    return one.get_vocab() == other.get_vocab()


def encoding_rules(rules: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a tokenizer.json that affect encoding, with merges as 'a b'."""
    names = ('added_tokens', 'normalizer', 'pre_tokenizer', 'decoder', 'model')
    parts = {name: rules.get(name) for name in names}
    model = parts['model']
    assert isinstance(model, dict)  # it has a vocabulary
    merges = model.get('merges') or []
    spelled = [pair if isinstance(pair, str) else ' '.join(pair) for pair in merges]
    return {**parts, 'model': {**model, 'merges': spelled}}


def digest(value: Any) -> str:
    """Return the SHA-256 of a value as JSON."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(',', ':'))
    return hashlib.sha256(text.encode()).hexdigest()


def without_prefix_space(rules: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rules without the space that SentencePiece puts before a text."""
    parts = ('normalizer', 'pre_tokenizer', 'decoder')
    return {**rules, **{name: _bare(rules.get(name)) for name in parts}}


def _bare(rule: Any) -> Any:
    """Return a rule, or a sequence of rules, without the space before a text."""
    if not isinstance(rule, dict):
        return rule
    bare = dict(rule)
    kind = rule.get('type')
    if kind == 'Prepend' or (kind == 'Strip' and rule.get('content') == ' '):
        return None
    if kind in ('Metaspace', 'ByteLevel'):
        bare['add_prefix_space'] = False
    if kind == 'Metaspace':
        bare['prepend_scheme'] = 'never'
    if kind == 'Sequence':
        for name, value in rule.items():
            if isinstance(value, list):
                bare[name] = [part for part in map(_bare, value) if part is not None]
    return bare


def _types(rule: Any) -> list[str]:
    """Return the types of a rule, or of a sequence of rules."""
    if not isinstance(rule, dict):
        return []
    inner = rule.get('normalizers') or rule.get('pretokenizers')
    if not inner:
        return [rule['type']]
    kinds = []
    for each in inner:
        kinds += _types(each)
    return kinds
