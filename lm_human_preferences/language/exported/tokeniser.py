"""The tokeniser of a reward model as transformers reads it: texts get the tokens they have here.

That is without a token before or after a text and without a space before it (see
language/tokenisers.py), with a padding token of its own. transformers takes as the last token of a
text the last one that is not padding, so no token of a text may be the padding token: not the end
of a text either, which many tokenisers pad with. A chat template is left out: only policies see it.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from typing import Any

import tokenizers

from lm_human_preferences import storage
from lm_human_preferences.datasets.letters import LETTERS
from lm_human_preferences.language import tokenisers
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


def write_tokeniser(encoding: Encoding, longest: int, directory: str) -> None:
    """Write tokenizer.json and tokenizer_config.json to a local directory.

    longest: how many tokens the model takes. The padding token is the id after those of the
    encoding.
    """
    settings: dict[str, Any] = {}
    if isinstance(encoding, TokeniserEncoding):
        rules = encoding.rules()
        settings |= _special_tokens(encoding, tokenisers.tokens_of(rules))
    else:
        rules = json.loads(_of_own(encoding).to_str())
    rules |= {'truncation': None, 'padding': None, 'post_processor': None}
    padding = _new_name(rules)
    added = rules.get('added_tokens') or []
    rules['added_tokens'] = [*added, _special(encoding.n_vocab, padding)]
    settings |= {
        # The file as it is: other classes make rules of their own.
        'tokenizer_class': 'PreTrainedTokenizerFast',
        'pad_token': padding,
        'padding_side': 'right',
        'model_max_length': longest,
        'clean_up_tokenization_spaces': False,
        'split_special_tokens': True,  # what looks like a special token is text
    }
    _write(directory, tokenisers.TOKENISER, json.dumps(rules, ensure_ascii=False))
    _write(directory, tokenisers.SETTINGS, json.dumps(settings, indent=2, ensure_ascii=False))


def is_read_as_written(encoding: Encoding, directory: str) -> bool:
    """Whether AutoTokenizer makes the tokens of the encoding, in the directory of a whole model.

    For some families it makes rules of its own, whatever the files say.
    """
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
        return found(texts)['input_ids'] == [encoder.encode(text) for text in texts]
    except Exception:  # of any kind: it is code for other tokenisers
        return False


def _special_tokens(encoding: TokeniserEncoding, known: Mapping[str, int]) -> dict[str, str]:
    """{name: text} of the special tokens that a model's tokeniser names, if they are `known`."""
    spelled = tokenisers.special_tokens(encoding.directory, tokenisers.SETTINGS, _NAMED)
    return {name: text for name, text in spelled.items() if text in known}


def _of_own(encoding: Encoding) -> tokenizers.Tokenizer:
    """One of the encodings that are no tokeniser of transformers."""
    if encoding.base_path is not None:
        return _byte_pairs(encoding)
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


def _byte_pairs(encoding: Encoding) -> tokenizers.Tokenizer:
    """GPT-2's; UserError where its files are damaged."""
    encoding.get_encoder()  # which says what is wrong with them
    vocab, merges = (storage.cached_path(encoding.path(name)) for name in BYTE_PAIR_FILES)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(vocab, merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def _new_name(rules: Mapping[str, Any]) -> str:
    """What the padding token is called: nothing that the tokeniser knows."""
    known = tokenisers.tokens_of(rules)
    name = PADDING
    while name in known:
        name = f'<{name}>'
    return name


def _special(token: int, text: str) -> dict[str, Any]:
    """A token that is no text, as tokenizer.json has it."""
    flags = dict.fromkeys(('single_word', 'lstrip', 'rstrip', 'normalized'), False)
    return {'id': token, 'content': text, **flags, 'special': True}


def _write(directory: str, name: str, text: str) -> None:
    storage.write_bytes(os.path.join(directory, name), text.encode())
