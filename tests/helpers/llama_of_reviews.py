#!/usr/bin/env python3
"""A tiny Llama that has read the film reviews of mock_sentiment, saved as transformers saves it.

    pipenv run python tests/helpers/llama_of_reviews.py DIRECTORY [--steps 1000]

The counterpart of `synthetic.language_model`, which trains a GPT-2 on the same reviews: this one
learns by transformers alone, and has a tokeniser of whole words.
"""

import argparse
import itertools
import sys
from pathlib import Path

import torch
from tiny_tokenisers import write_words
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lm_human_preferences.datasets import reviews
from lm_human_preferences.language import encodings
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


def write(directory: Path, steps: int = language_model.STEPS) -> str:
    """Train the model and save it with its tokeniser; returns the directory as a string."""
    model = train(steps)
    model.save_pretrained(directory)
    return write_words(directory, reviews.WORDS)


def train(steps: int) -> torch.nn.Module:
    """The model after so many batches of reviews, which is always the same."""
    encoder = encodings.Reviews.get_encoder()  # whose token ids are those of the words in order
    texts = language_model.as_batch(
        encoder, itertools.islice(reviews.reviews_generator('train'), language_model.N_REVIEWS)
    )
    is_padding = texts == encoder.padding_token
    inputs, labels = texts.masked_fill(is_padding, 0), texts.masked_fill(is_padding, IGNORED)
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(language_model.SEED)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model('llama', **SIZES))
        optimizer = torch.optim.Adam(model.parameters())
        for step in range(steps):
            optimizer.param_groups[0]['lr'] = language_model.LR * (1 - step / steps)
            rows = torch.randint(len(texts), (language_model.BATCH,))
            optimizer.zero_grad()
            model(input_ids=inputs[rows], labels=labels[rows], use_cache=False).loss.backward()
            optimizer.step()
    return model


def main() -> None:
    """Write the model to the directory that is given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('directory', type=Path)
    parser.add_argument('--steps', type=int, default=language_model.STEPS)
    args = parser.parse_args()
    write(args.directory, args.steps)


if __name__ == '__main__':
    main()
