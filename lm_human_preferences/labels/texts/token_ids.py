"""Conversion of labels from token ids to texts; a label may name the `encoding` of its ids."""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lm_human_preferences.errors import UserError
from lm_human_preferences.label_types import LabelType
from lm_human_preferences.labels.answers import ID
from lm_human_preferences.language import encodings, tokenisers
from lm_human_preferences.language.encodings import Encoder, Encoding

FIELD = 'encoding'
TOKENS, TEXT, PREFERENCES = 'tokens', 'text', 'preferences'  # values of --export_as
NO_TIES = 'note: {count} answers without a preference are left out: {form} has no place for them'


def marked(label: dict[str, Any], encoding: str) -> dict[str, Any]:
    """Return a label with its encoding as a field if that is a tokeniser; others are not named."""
    return {**label, FIELD: encoding} if encoding.startswith(tokenisers.PREFIX) else label


def as_file(objects: Iterable[dict[str, Any]], path: str) -> str:
    """Return the content of a file: JSON lines if `path` ends in .jsonl, else a JSON array."""
    lines = [json.dumps(value, ensure_ascii=False) for value in objects]
    if path.endswith('.jsonl'):
        return ''.join(f'{line}\n' for line in lines)
    return '[' + ',\n'.join(lines) + ']\n'


def encoding_of(objects: Sequence[Any], encoding: Encoding, source: str) -> Encoding:
    """Return the encoding of the token ids in labels; UserError if it is unknown, or several."""
    is_of_gpt2 = tokenisers.unnamed_ids_are_of_gpt2(encoding)
    unnamed = encodings.Main.name if is_of_gpt2 else encoding.name
    names = {str(label.get(FIELD, unnamed)) for label in objects if isinstance(label, dict)}
    if len(names) > 1:
        raise UserError(f'{source} holds token ids of several encodings: {sorted(names)!r:.160}')
    if names <= {encoding.name}:
        return encoding
    (name,) = names
    try:
        return encodings.by_name(name)
    except UserError as e:
        raise UserError(
            f'{source} holds token ids of encoding {name!r:.80}, not {encoding.name!r}: export'
            ' these labels as texts (--export_as text)'
        ) from e


def tokens_of(tokens: Any, text: str, encoder: Encoder, n_vocab: int) -> list[int] | None:
    """Return `tokens` without padding if they decode to `text`, else None."""
    if not _are_tokens(tokens, encoder, n_vocab):
        return None
    real = encoder.without_padding(tokens)
    return real if encoder.decode(real) == text else None


def as_texts(
    objects: Sequence[Any], label_type: LabelType, encoding: Encoding, source: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place for messages, label with texts instead of token ids) for each label."""
    encoder = encoding.get_encoder()
    for index, label in enumerate(objects):
        where = f'{source}, label {index}'
        if not isinstance(label, dict):
            raise UserError(f'{where} is a {type(label).__name__}, not an object')
        texts = {}
        for field in ('query', *label_type.samples):
            if not _are_tokens(label.get(field), encoder, encoding.n_vocab):
                raise UserError(
                    f'{where}, field {field!r} must be token ids 0 to {encoding.n_vocab - 1}, or'
                    f' {encoder.padding_token} for padding'
                )
            texts[field] = text_of(label[field], field, encoder)
        yield where, {**label, **texts}


def text_of(tokens: Sequence[int], field: str, encoder: Encoder) -> str:
    """Decode the tokens of a field; a query of only the end-of-text token is empty."""
    real = encoder.without_padding(tokens)
    return '' if field == 'query' and real == [encoder.eot_token] else encoder.decode(real)


def _are_tokens(value: Any, encoder: Encoder, n_vocab: int) -> bool:
    if not isinstance(value, list) or not all(type(each) is int for each in value):
        return False
    return all(0 <= token < n_vocab for token in encoder.without_padding(value))


def exported(
    labels: Iterable[dict[str, Any]], label_type: LabelType, encoder: Encoder
) -> tuple[list[dict[str, Any]], int]:
    """Return labels with texts, and how many of the texts would be encoded to other tokens."""
    written, inexact = [], 0
    for label in labels:
        texts = {}
        for field in ('query', *label_type.samples):
            text = texts[field] = text_of(label[field], field, encoder)
            is_empty_query = field == 'query' and not text
            real = encoder.without_padding(label[field])
            inexact += not is_empty_query and encoder.encode(text) != real
        written.append({**label, **texts})
    return written, inexact


def preferences(
    labels: Iterable[dict[str, Any]], label_type: LabelType
) -> Iterator[dict[str, Any]]:
    """Yield {prompt, chosen, rejected, any id} for each pair of samples that a label orders.

    UserError for ratings, which compare no samples.
    """
    if len(label_type.samples) < 2:
        raise UserError(
            '--export_as preferences: ratings of one response prefer none; give --export_as text'
        )
    for label in labels:
        same = {name: label[name] for name in (ID,) if name in label}
        samples = [label[name] for name in label_type.samples]
        for better, worse in label_type.pairs(label[label_type.field]):
            pair = {'chosen': samples[better], 'rejected': samples[worse]}
            yield {'prompt': label['query'], **pair, **same}
