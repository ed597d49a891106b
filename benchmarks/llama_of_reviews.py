#!/usr/bin/env python3
"""A tiny Llama that has read the film reviews of mock_sentiment, saved as transformers saves it.

    pipenv run python benchmarks/llama_of_reviews.py DIRECTORY [--steps 1000]

The counterpart of `language.networks.reviews_model`, which trains a GPT-2 on the same reviews: this
one learns by transformers alone. Its encoding is the reviews' own.
"""

import argparse
import itertools
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lm_human_preferences.datasets import reviews
from lm_human_preferences.language import encodings
from lm_human_preferences.language.networks import reviews_model
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


def write(directory: Path, steps: int = reviews_model.STEPS) -> None:
    encoder = encodings.Reviews.get_encoder()
    texts = itertools.islice(reviews.generator('train'), reviews_model.N_REVIEWS)
    train([encoder.encode(text) for text in texts], steps).save_pretrained(directory)
    encodings.Reviews.write_files(str(directory))


def train(sequences: Iterable[list[int]], steps: int) -> torch.nn.Module:
    rows = [torch.tensor(tokens) for tokens in sequences]
    labels = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=IGNORED)
    inputs = labels.clamp(min=0)
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(reviews_model.SEED)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model('llama', **SIZES))
        optimizer = torch.optim.Adam(model.parameters())
        for step in range(steps):
            optimizer.param_groups[0]['lr'] = reviews_model.LR * (1 - step / steps)
            rows = torch.randint(len(labels), (reviews_model.BATCH,))
            optimizer.zero_grad()
            model(input_ids=inputs[rows], labels=labels[rows], use_cache=False).loss.backward()
            optimizer.step()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('directory', type=Path)
    parser.add_argument('--steps', type=int, default=reviews_model.STEPS)
    args = parser.parse_args()
    write(args.directory, args.steps)


if __name__ == '__main__':
    main()
