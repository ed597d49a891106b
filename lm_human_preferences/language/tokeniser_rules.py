"""Rules of a tokenizer.json: its tokens, what affects encoding, and what is left out of it here."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def tokens_of(rules: Mapping[str, Any]) -> dict[str, int]:
    """Return {token as the file spells it: its id}, added tokens included."""
    vocab = rules['model']['vocab']
    if isinstance(vocab, list):  # of a unigram model: [token, score] in the order of the ids
        token_of = {token: number for number, (token, _) in enumerate(vocab)}
    else:
        token_of = {token: int(number) for token, number in vocab.items()}
    added = {token['content']: int(token['id']) for token in rules.get('added_tokens') or []}
    return {**token_of, **added}


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
