"""Tokeniser of a reward model for transformers, which gives texts the tokens they have here.

It has no token around a text, no space before it (see language/tokenisers.py), and a padding token
of its own: transformers reads the last token that is not padding, so no token of a text may be the
padding token, not the end of a text either. A chat template is left out: only policies see it.
"""

import json
import os
import random
from typing import Any

import tokenizers

from lm_human_preferences import storage
from lm_human_preferences.datasets.letters import LETTERS
from lm_human_preferences.errors import no_panics
from lm_human_preferences.language import tokeniser_rules, tokenisers
from lm_human_preferences.language.encodings import (
    BYTE_PAIR_FILES,
    END_OF_TEXT,
    Encoding,
    WordEncoder,
)
from lm_human_preferences.language.tokenisers import TokeniserEncoding

PADDING = '<|pad|>'
_TRIED_TEXTS, _TRIED_TOKENS = 20, 12
_NAMED = ('bos_token', 'eos_token', 'unk_token')


def write_tokeniser(encoding: Encoding, longest: int, directory: str, *, pads: bool = True) -> None:
    """Write tokenizer.json and tokenizer_config.json. longest: most tokens of the model.

    pads: whether the model has a row for one more token, of padding.
    """
    settings: dict[str, Any] = {}
    if isinstance(encoding, TokeniserEncoding):
        rules = encoding.rules()
        known = tokeniser_rules.tokens_of(rules)
        for name, text in tokenisers.special_tokens(
            encoding.file(tokenisers.SETTINGS), _NAMED
        ).items():
            if text in known:
                settings[name] = text
    else:
        rules = json.loads(_of_own(encoding).to_str())
    rules |= {'truncation': None, 'padding': None, 'post_processor': None}
    if pads:
        padding = PADDING
        while padding in tokeniser_rules.tokens_of(rules):
            padding = f'<{padding}>'
        flags = dict.fromkeys(('single_word', 'lstrip', 'rstrip', 'normalized'), False)
        token = {'id': encoding.n_vocab, 'content': padding, **flags, 'special': True}
        rules['added_tokens'] = [*(rules.get('added_tokens') or []), token]
        settings['pad_token'] = padding
    settings |= {
        # The file as it is: other classes make rules of their own.
        'tokenizer_class': 'PreTrainedTokenizerFast',
        'padding_side': 'right',
        'model_max_length': longest,
        'clean_up_tokenization_spaces': False,
        'split_special_tokens': True,  # what looks like a special token is text
    }
    for name, content in (tokenisers.TOKENISER, rules), (tokenisers.SETTINGS, settings):
        text = json.dumps(content, indent=2, ensure_ascii=False)
        storage.write_bytes(os.path.join(directory, name), text.encode())


def is_read_as_written(encoding: Encoding, directory: str) -> bool:
    """Return whether AutoTokenizer makes the encoding's tokens; some families change rules."""
    from transformers import AutoTokenizer

    encoder = encoding.get_encoder()
    rng = random.Random(0)
    tokens = [rng.choices(range(encoding.n_vocab), k=_TRIED_TOKENS) for _ in range(_TRIED_TEXTS)]
    texts = [encoder.decode(each) for each in tokens]
    try:
        # Whatever the model takes: it does not see these texts.
        found = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, model_max_length=_TRIED_TOKENS**2
        )
        with no_panics():
            return found(texts)['input_ids'] == [encoder.encode(text) for text in texts]
    except Exception:  # of any kind: it is code for other tokenisers
        return False


def _of_own(encoding: Encoding) -> tokenizers.Tokenizer:
    """Make a tokeniser of one of the program's own encodings; UserError for damaged files."""
    if encoding.base_path is not None:
        encoding.get_encoder()  # which says what is wrong with the files
        vocab, merges = (storage.cached_path(encoding.path(name)) for name in BYTE_PAIR_FILES)
        byte_pairs = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(vocab, merges))
        byte_pairs.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        byte_pairs.decoder = tokenizers.decoders.ByteLevel()
        byte_pairs.add_special_tokens([END_OF_TEXT])
        return byte_pairs
    if encoding.name == 'reviews':
        words = tokenizers.Tokenizer(tokenizers.models.WordLevel(WordEncoder.token_of))
        words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        return words
    letters = tokenizers.models.WordLevel(
        {letter: token for token, letter in enumerate(LETTERS)}, unk_token=LETTERS[-1]
    )
    tokenizer = tokenizers.Tokenizer(letters)
    each = tokenizers.Regex(r'[\s\S]')
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(each, 'isolated')
    tokenizer.decoder = tokenizers.decoders.Fuse()
    return tokenizer
