"""Conversion of labels from token ids to texts; a label may name the `encoding` of its ids."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lm_human_preferences.errors import UserError
from lm_human_preferences.label_types import LabelType
from lm_human_preferences.labels.answers import ID
from lm_human_preferences.language import encodings
from lm_human_preferences.language.encodings import Encoder, Encoding
from lm_human_preferences.language.texts import tokenisers

FIELD = 'encoding'
TOKENS, TEXT, PREFERENCES = 'tokens', 'text', 'preferences'  # values of --export_as


def encoding_of(objects: Sequence[dict[str, Any]], encoding: Encoding, source: str) -> Encoding:
    """Return the encoding of the token ids in labels; UserError if it is unknown or varies."""
    is_of_gpt2 = tokenisers.unnamed_ids_are_of_gpt2(encoding)
    unnamed = encodings.Main.name if is_of_gpt2 else encoding.name
    names = {str(label.get(FIELD, unnamed)) for label in objects}
    for known in (encoding, encodings.Main, encodings.Test, encodings.Reviews):
        if names == {known.name}:
            return known
    raise UserError(
        f'{source} holds token ids of encoding {" and ".join(sorted(names)):.160}, not'
        f' {encoding.name}: export these labels as texts (--export_as text)'
    )


def are_ids(value: Any, encoding: Encoding) -> bool:
    """Return whether a JSON value is a list of an encoding's token ids, perhaps with padding."""
    if not isinstance(value, list) or not all(type(each) is int for each in value):
        return False
    real = encoding.get_encoder().without_padding(value)
    return all(0 <= token < encoding.n_vocab for token in real)


def check_ids(value: Any, encoding: Encoding, where: str) -> None:
    """Raise UserError, which names `where`, unless `value` is a list of an encoding's token ids."""
    if not are_ids(value, encoding):
        raise UserError(
            f'{where} must be token ids 0 to {encoding.n_vocab - 1}, or'
            f' {encoding.get_encoder().padding_token} for padding'
        )


def as_texts(
    label: dict[str, Any], label_type: LabelType, encoding: Encoding, where: str
) -> dict[str, Any]:
    """Return a label with its token ids decoded to texts; UserError if the ids are not valid."""
    texts = {}
    for field in ('query', *label_type.samples):
        check_ids(label.get(field), encoding, f'{where}, field {field!r}')
        texts[field] = text_of(label[field], field, encoding.get_encoder())
    return {**label, **texts}


def text_of(tokens: Sequence[int], field: str, encoder: Encoder) -> str:
    """Return the text of a field's tokens; '' for a query of the end-of-text token alone."""
    real = encoder.without_padding(tokens)
    return '' if field == 'query' and real == [encoder.eot_token] else encoder.decode(real)


def preferences(
    labels: Iterable[dict[str, Any]], label_type: LabelType
) -> Iterator[dict[str, Any]]:
    """Yield a record with prompt, chosen and rejected for each pair of samples that a label orders.

    A label's id is kept. UserError for ratings, which compare no samples.
    """
    if len(label_type.samples) < 2:
        raise UserError(
            '--export_as preferences: ratings hold no preferences; give --export_as text'
        )
    for label in labels:
        same = {name: label[name] for name in (ID,) if name in label}
        samples = [label[name] for name in label_type.samples]
        for better, worse in label_type.pairs(label[label_type.field]):
            pair = {'chosen': samples[better], 'rejected': samples[worse]}
            yield {'prompt': label['query'], **pair, **same}
