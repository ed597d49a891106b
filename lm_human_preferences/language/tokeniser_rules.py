"""A model's tokeniser as transformers loads it, and its rules changed to encode parts of texts."""

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
# Settings with which a text is not cut or padded, and gets no special tokens around it.
_PLAIN = {'truncation': None, 'padding': None, 'post_processor': None}
# Texts that decode(encode(text)) must not change. Every real vocabulary has the letters of _TEXTS;
# those in _OTHER_TEXTS may change if the vocabulary lacks one of their letters.
_TEXTS = ('The fox, 12 times. It is.', ' a', 'a', 'a ', '  a  b', 'a\n\nb\n', '\n\na', "don't !")
_OTHER_TEXTS = ('', '<s> </s>', 'A\tb\r\n', 'Bär, nai\u0308ve', '東京 ﬁ ①', 'x' * 40, '🙂')


@dataclasses.dataclass(frozen=True, eq=False)
class Tokeniser:
    """A tokeniser as transformers loads it (`own`), and its `rules` without a space before texts.

    digest: SHA-256 of its vocabulary and of the tokens of some texts, together.
    """

    own: Any
    rules: dict[str, Any]
    digest: str

    @functools.cached_property
    def n_vocab(self) -> int:
        return max(self.own.get_vocab().values()) + 1


def load(files: Mapping[str, str]) -> Tokeniser:
    """Load the tokeniser in files {name: path or URL}; UserError if it fails or changes texts."""
    try:
        with no_panics():
            own = _own({name: storage.cached_path(path) for name, path in files.items()})
            rules = without_prefix_space(json.loads(own.backend_tokenizer.to_str()) | _PLAIN)
            tokens = _tokens_of_texts(tokenizer_of(rules), own)
            return Tokeniser(own, rules, digest([own.get_vocab(), tokens]))
    except Exception as e:  # any type: transformers has code for many tokenisers
        reason = ' '.join(str(e).split()) or repr(e)
        raise UserError(f'{files[run_files.TOKENISER]} cannot be used: {reason:.300}') from e


def _own(files: Mapping[str, str]) -> Any:
    """Return transformers' tokeniser from files {name: path}; it may raise any exception."""
    from transformers import AutoTokenizer, TokenizersBackend  # it takes seconds to import

    # The class, which decides the rules, is named in the config of the model or the tokeniser.
    is_said = CONFIG in files or run_files.TOKENISER_SETTINGS in files
    kind: Any = AutoTokenizer if is_said else TokenizersBackend
    with tempfile.TemporaryDirectory() as folder:
        os.mkdir(os.path.join(folder, run_files.MORE_TEMPLATES))
        for name, path in files.items():
            if name != CONFIG:
                os.symlink(os.path.abspath(path), os.path.join(folder, name))
        if CONFIG in files:  # only the settings needed, as others may be damaged
            content = read_object(files[CONFIG])
            kinds = ('model_type', 'tokenizer_class')
            content = {name: content[name] for name in kinds if name in content}
            storage.write_json(os.path.join(folder, CONFIG), content)
        own = kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not isinstance(own, TokenizersBackend):
        raise TypeError(f'it is read by {type(own).__name__}, which is not a fast tokeniser')
    own.backend_tokenizer.no_truncation()
    own.backend_tokenizer.no_padding()
    if not own.get_vocab():
        raise ValueError('it has no tokens')
    return own


def read_object(path: str) -> dict[str, Any]:
    """Return the object in a JSON file; {} if there is no file or no object in it."""
    value = storage.read_json(path) if storage.exists(path) else {}
    return value if isinstance(value, dict) else {}


def tokenizer_of(rules: Mapping[str, Any]) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(rules))


def _tokens_of_texts(parts: tokenizers.Tokenizer, own: Any) -> list[list[int]]:
    """Return the tokens of some texts; ValueError unless they decode to these and can be joined."""
    parts.encode_special_tokens = True
    rules = f'{type(parts.model).__name__}, {parts.normalizer}, {parts.pre_tokenizer}'
    source = f'{type(own).__name__}: {rules}'
    found = []
    for text in _TEXTS + _OTHER_TEXTS:
        tokens = parts.encode(text, add_special_tokens=False).ids
        found.append(tokens)
        if text in _OTHER_TEXTS and own.unk_token_id in tokens:
            continue
        back = parts.decode(tokens, skip_special_tokens=False)
        # Texts with the same Unicode normal form count as equal: Qwen's rules compose accents.
        if len({unicodedata.normalize('NFKC', each) for each in (back, text)}) > 1:
            raise ValueError(f'{text!r} comes back from its tokens as {back!r} ({source})')
    both = [parts.encode(text, add_special_tokens=False).ids for text in ('The fox', 'es ran.')]
    joined = parts.decode(both[0] + both[1], skip_special_tokens=False)
    if joined != 'The foxes ran.':
        raise ValueError(f"'The fox' and 'es ran.' are joined as {joined!r} ({source})")
    return found


def digest(value: Any) -> str:
    """Return the SHA-256 of a value written as JSON, as hex digits."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(',', ':'))
    return hashlib.sha256(text.encode()).hexdigest()


def without_prefix_space(rules: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rules without the space that SentencePiece puts before a text."""
    parts = ('normalizer', 'pre_tokenizer', 'decoder')
    return {**rules, **{name: _bare(rules.get(name)) for name in parts}}


def _bare(rule: Any) -> Any:
    """Return a rule, or a sequence of rules, that adds no space before a text; None: no rule."""
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
