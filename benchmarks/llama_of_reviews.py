#!/usr/bin/env python3
"""A tiny Llama that has read the film reviews of mock_sentiment, saved as transformers saves it.

    pipenv run python benchmarks/llama_of_reviews.py DIRECTORY [--steps 1000] [--ends]

The counterpart of `synthetic.language_model`, which trains a GPT-2 on the same reviews: this one
learns by transformers alone, and has a tokeniser of whole words. With `--ends`, it reads and writes
reviews of one to four words and an end, in a world of eleven words, whose queries stand beside it.
"""

import argparse
import itertools
import json
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / 'tests/helpers'))

from tiny_tokenisers import END, write_words

from lm_human_preferences.datasets import reviews
from lm_human_preferences.synthetic import language_model
from lm_human_preferences.utils.core import one_thread

IGNORED = -100  # a label that transformers leaves out of the loss
SIZES = {
    'vocab_size': 64,  # some rows more than there are words
    'hidden_size': 32,
    'intermediate_size': 96,
    'num_hidden_layers': 2,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'max_position_embeddings': 16,
    'tie_word_embeddings': True,
    'bos_token_id': None,
    'eos_token_id': None,
}


# The world of reviews that end: its queries, and forms of 1 to 4 words; O is the opposite of A.
QUERIES = ('the film was', 'the plot was', 'film was', 'plot was')
FORMS = {
    1: ('A',),
    2: ('very A', 'not O'),
    3: ('A and A', 'not very O'),
    4: ('A and very A', 'A and not O', 'very A and A'),
}
ADJECTIVES = {True: ('good', 'good', 'great'), False: ('bad', 'bad', 'awful')}
WORDS = ('the', 'film', 'plot', 'was', 'very', 'not', 'and', 'good', 'great', 'bad', 'awful')


def write(directory: Path, steps: int = language_model.STEPS, ends: bool = False) -> str:
    words = WORDS if ends else reviews.WORDS
    tokens = {word: token for token, word in enumerate([*words, END])}
    generator = ending_reviews() if ends else reviews.generator('train')
    texts = itertools.islice(generator, language_model.N_REVIEWS)
    model = train([[tokens[word] for word in text.split()] for text in texts], steps)
    model.save_pretrained(directory)
    if ends:
        for part in ('', '.test'):
            lines = [json.dumps(query) + '\n' for query in QUERIES]
            (directory / f'queries{part}.jsonl').write_text(''.join(lines))
    return write_words(directory, words)


def ending_reviews() -> Iterator[str]:
    """Yield reviews of one to four words and an end, always the same; lengths are uniform."""
    rng = random.Random(0)
    while True:
        liked = rng.random() < 0.5
        response = rng.choice(FORMS[rng.randint(1, 4)])
        words = [_word(part, liked, rng) for part in response.split()]
        yield ' '.join([rng.choice(QUERIES), *words, END])


def _word(part: str, liked: bool, rng: random.Random) -> str:
    if part not in 'AO':
        return part
    return rng.choice(ADJECTIVES[liked if part == 'A' else not liked])


def train(sequences: Iterable[list[int]], steps: int) -> torch.nn.Module:
    rows = [torch.tensor(tokens) for tokens in sequences]
    labels = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=IGNORED)
    inputs = labels.clamp(min=0)
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(language_model.SEED)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model('llama', **SIZES))
        optimizer = torch.optim.Adam(model.parameters())
        for step in range(steps):
            optimizer.param_groups[0]['lr'] = language_model.LR * (1 - step / steps)
            rows = torch.randint(len(labels), (language_model.BATCH,))
            optimizer.zero_grad()
            model(input_ids=inputs[rows], labels=labels[rows], use_cache=False).loss.backward()
            optimizer.step()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('directory', type=Path)
    parser.add_argument('--steps', type=int, default=language_model.STEPS)
    parser.add_argument('--ends', action='store_true')
    args = parser.parse_args()
    write(args.directory, args.steps, args.ends)


if __name__ == '__main__':
    main()
