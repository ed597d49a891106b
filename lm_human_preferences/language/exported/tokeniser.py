"""A tokeniser that makes transformers encode texts for a reward model as this program does.

It puts no tokens around a text, and no space before it (see language/texts/tokenisers.py). Its
padding token occurs in no text, since transformers reads the score at the last token that is not
padding. There is no chat template, as only policies use one.
"""

import json
from typing import Any

import tokenizers

from lm_human_preferences import storage
from lm_human_preferences.datasets.registry import LETTERS
from lm_human_preferences.language.encodings import (
    BYTE_PAIR_FILES,
    END_OF_TEXT,
    Encoding,
    WordEncoder,
)
from lm_human_preferences.language.texts.tokenisers import TokeniserEncoding, tokenizer_of

PADDING = '<|pad|>'
_NAMED = ('bos_token', 'eos_token', 'unk_token')


def write_tokeniser(encoding: Encoding, longest: int, directory: str, *, pads: bool = True) -> None:
    """Write a tokeniser in transformers' format. longest: the model's context, in tokens.

    pads: whether to add a padding token, for which the model has a row in its embedding.
    """
    from transformers import TokenizersBackend  # importing transformers takes seconds

    if isinstance(encoding, TokeniserEncoding):
        encoder = encoding.encoder
        rules = dict(encoder.rules)
        special = {name: getattr(encoder.own, name) for name in _NAMED}
    else:
        rules = json.loads(_of_own(encoding).to_str())
        special: dict[str, Any] = {}
    if pads:
        padding, known = PADDING, tokenizer_of(rules).get_vocab()
        while padding in known:
            padding = f'<{padding}>'
        flags = dict.fromkeys(('single_word', 'lstrip', 'rstrip', 'normalized'), False)
        token = {'id': encoding.n_vocab, 'content': padding, **flags, 'special': True}
        rules['added_tokens'] = [*rules['added_tokens'], token]
        special['pad_token'] = padding
    TokenizersBackend(
        tokenizer_object=tokenizer_of(rules),
        **{name: text for name, text in special.items() if text is not None},
        padding_side='right',
        model_max_length=longest,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,  # text that spells a special token stays text
    ).save_pretrained(directory)


def _of_own(encoding: Encoding) -> tokenizers.Tokenizer:
    """Return a tokeniser for a built-in encoding; UserError if its files are damaged."""
    if encoding.base_path is not None:
        encoding.get_encoder()  # raises UserError for damaged files
        vocab, merges = (storage.cached_path(encoding.path(name)) for name in BYTE_PAIR_FILES)
        byte_pairs = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(vocab, merges))
        byte_pairs.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        byte_pairs.decoder = tokenizers.decoders.ByteLevel()
        byte_pairs.add_special_tokens([END_OF_TEXT])
        return byte_pairs
    is_words = encoding.name == 'reviews'
    tokens = WordEncoder.token_of if is_words else {letter: i for i, letter in enumerate(LETTERS)}
    unknown = None if is_words else LETTERS[-1]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(tokens, unk_token=unknown))
    if is_words:
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        return tokenizer
    letter = tokenizers.Regex(r'[\s\S]')
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(letter, 'isolated')
    tokenizer.decoder = tokenizers.decoders.Fuse()
    return tokenizer
