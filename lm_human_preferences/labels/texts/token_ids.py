"""Labels of token ids of another encoding than the model's, read as the texts that they are.

The published labels are token ids of GPT-2. A label may say in its field `encoding` which one its
ids are of; what this program writes does so where it is a tokeniser of a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lm_human_preferences.errors import UserError
from lm_human_preferences.label_types import LabelType
from lm_human_preferences.language import encodings, tokenisers
from lm_human_preferences.language.encodings import Encoder, Encoding

FIELD = 'encoding'


def marked(label: dict[str, Any], encoding: str) -> dict[str, Any]:
    """A label of token ids as it is written to a file; encoding: the name of theirs.

    Those of the original's encodings are not marked, as its own were not.
    """
    return {**label, FIELD: encoding} if encoding.startswith(tokenisers.PREFIX) else label


def encoding_of(objects: Sequence[Any], encoding: Encoding, source: str) -> Encoding:
    """The encoding of labels of token ids, for a model of `encoding`.

    Labels that do not name theirs have that of `tokenisers.of_unmarked_labels`.
    UserError where they name several, or one whose tokeniser is not at hand.
    """
    unsaid = tokenisers.of_unmarked_labels(encoding).name
    names = [label.get(FIELD, unsaid) for label in objects if isinstance(label, dict)]
    for index, name in enumerate(names):
        if name != names[0]:
            where = f'{source}, label {index}'
            raise UserError(f'{where} is of encoding {name!r:.80}, not {names[0]!r:.80} as before')
    if not names or names[0] == encoding.name:
        return encoding
    try:
        return encodings.by_name(names[0])
    except UserError as e:
        raise UserError(
            f'{source} holds token ids of encoding {names[0]!r:.80}, not {encoding.name!r}: export'
            ' these labels as texts (--export_as text)'
        ) from e


def of_text(tokens: Any, text: str, encoder: Encoder, n_vocab: int) -> list[int] | None:
    """`tokens` without padding, where they are token ids that `encoder` decodes to this text; else
    None.

    A model may write a text in other tokens than it is encoded as. A record of them need not name
    the encoding: ids of another one have another text. n_vocab: tokens of the encoding.
    """
    if not _are_integers(tokens):
        return None
    real = _without_padding(tokens, encoder, n_vocab)
    if real is None or encoder.decode(real) != text:
        return None
    return real


def as_texts(
    objects: Sequence[Any], label_type: LabelType, encoding: Encoding, source: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where it is, the label with texts in place of token ids of `encoding`).

    UserError, which says where, for what are no token ids.
    """
    encoder = encoding.get_encoder()
    for index, label in enumerate(objects):
        where = f'{source}, label {index}'
        if not isinstance(label, dict):
            raise UserError(f'{where} is a {type(label).__name__}, not an object')
        texts = {
            field: _text(label, field, encoder, encoding.n_vocab, where)
            for field in ('query', *label_type.samples)
        }
        yield where, {**label, **texts}


def _text(label: dict[str, Any], field: str, encoder: Encoder, n_vocab: int, where: str) -> str:
    """The text of a field; that of an empty query is empty, see tokenise.Tokeniser."""
    if field not in label:
        raise UserError(f'{where} has no field {field!r}')
    tokens = label[field]
    if not _are_integers(tokens):
        raise UserError(f'{where}, field {field!r} must be token ids')
    real = _without_padding(tokens, encoder, n_vocab)
    if real is None:
        raise UserError(
            f'{where}, field {field!r} must be token ids 0 to {n_vocab - 1}, or'
            f' {encoder.padding_token} for padding'
        )
    return '' if field == 'query' and real == [encoder.eot_token] else encoder.decode(real)


def _without_padding(tokens: list[int], encoder: Encoder, n_vocab: int) -> list[int] | None:
    """Those that are no padding; None where one is no token."""
    real = [token for token in tokens if token != encoder.padding_token]
    return real if all(0 <= token < n_vocab for token in real) else None


def _are_integers(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int for each in value)
