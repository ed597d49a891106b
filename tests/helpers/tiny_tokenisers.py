"""Tiny tokenisers as transformers saves them: tokenizer.json and tokenizer_config.json."""

import json

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

SENTENCES = (
    'The quick brown fox jumps over the lazy dog. It was late.',
    '"Never mind the weather." She said so twice, and then...\n\nNobody answered.\n',
    'user system assistant <s> Bär, naïve, 東京.',
)
END = '<|end|>'


def write_byte_level(directory, sentences=SENTENCES, size=400, **settings):
    """Byte pairs, as of GPT-2 and most others, trained on `sentences`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[END, '<s>'],
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences, trainer)
    return _save(tokenizer, directory, settings)


def write_words(directory, words, **settings):
    """A token for each of `words`, and for each with a space before it; bytes for all else."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = {letter: token for token, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    spelled = [space + word for word in words for space in ('', ' ')]
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in spelled])
    tokenizer.add_special_tokens([END])
    return _save(tokenizer, directory, settings)


def write_alone(directory, words, **settings):
    """A token for each of `words`, which white space separates: other texts do not come back."""
    vocab = {word: token for token, word in enumerate([*words, END])}
    tokenizer = Tokenizer(models.WordLevel(vocab))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _save(tokenizer, directory, settings)


def write_sentencepiece(directory, **settings):
    """Byte pairs with the rules of a tokeniser that comes from SentencePiece, as Llama 2's."""
    pieces = ['<s>', END, '<unk>', *(f'<0x{byte:02X}>' for byte in range(256))]
    letters = ['▁', *'abcdefghijklmnopqrstuvwxyz.']
    merges = [('▁', 'a'), ('▁', 't'), ('h', 'e'), ('▁t', 'he'), ('▁', '.'), ('.', '.')]
    pieces += letters + [left + right for left, right in merges]
    vocab = {piece: token for token, piece in enumerate(pieces)}
    unknown = {'unk_token': '<unk>', 'fuse_unk': True, 'byte_fallback': True}
    tokenizer = Tokenizer(models.BPE(vocab, merges, **unknown))
    spaces = [normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')]
    tokenizer.normalizer = normalizers.Sequence(spaces)
    parts = [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(' ', 1, 0)])
    tokenizer.add_special_tokens(['<s>', END])
    template = {'single': '<s> $A', 'special_tokens': [('<s>', 0)]}
    tokenizer.post_processor = processors.TemplateProcessing(**template)
    return _save(tokenizer, directory, settings)


def _save(tokenizer, directory, settings):
    """Returns the directory as a string. settings: more of tokenizer_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / 'tokenizer.json'))
    config = {'eos_token': END, 'tokenizer_class': 'PreTrainedTokenizerFast', **settings}
    (directory / 'tokenizer_config.json').write_text(json.dumps(config))
    return str(directory)
