#!/usr/bin/env python3
"""A tiny DistilBERT that tells whether a film review is praise, saved as transformers saves it.

    pipenv run python benchmarks/classifier_of_reviews.py DIRECTORY [--steps 2000]

It learns from the labelled reviews to which the known reward is fitted, by transformers alone: the
sentiment classifier of the paper's section 3.1.1. Its classes are NEGATIVE and POSITIVE.
"""

import argparse
import itertools
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / 'tests/helpers'))

from tiny_tokenisers import write_alone

from lm_human_preferences.datasets import reviews
from lm_human_preferences.language import encodings
from lm_human_preferences.synthetic.known_reward import N_REVIEWS
from lm_human_preferences.utils.core import one_thread

SIZES = {
    'vocab_size': 64,  # some rows more than there are words
    'dim': 32,
    'hidden_dim': 96,
    'n_layers': 2,
    'n_heads': 4,
    'max_position_embeddings': 32,
    'dropout': 0.0,
    'attention_dropout': 0.0,
    'seq_classif_dropout': 0.0,
}
CLASSES = ('NEGATIVE', 'POSITIVE')
STEPS, BATCH, LR = 2000, 64, 3e-3


def write(directory: Path, steps: int = STEPS) -> str:
    model = train(steps)
    model.save_pretrained(directory)
    return write_alone(directory, reviews.WORDS)


def train(steps: int) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    encoder = encodings.Reviews.get_encoder()  # whose token ids are those of the words in order
    texts, shares = zip(*itertools.islice(reviews.labelled_reviews('train'), N_REVIEWS))
    rows = [encoder.encode(text) for text in texts]
    praise = torch.tensor(shares)
    by_length: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        by_length.setdefault(len(row), []).append(number)
    groups = [torch.tensor(numbers) for numbers in by_length.values()]
    weights = torch.tensor([len(group) for group in groups], dtype=torch.float)
    config = AutoConfig.for_model(
        'distilbert',
        **SIZES,
        id2label=dict(enumerate(CLASSES)),
        label2id={name: number for number, name in enumerate(CLASSES)},
    )
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(config)
        optimizer = torch.optim.Adam(model.parameters())
        for step in range(steps):
            optimizer.param_groups[0]['lr'] = LR * (1 - step / steps)
            # Texts of one length need no padding.
            group = groups[int(torch.multinomial(weights, 1))]
            numbers = group[torch.randint(len(group), (BATCH,))]
            inputs = torch.tensor([rows[number] for number in numbers])
            negative, positive = model(input_ids=inputs).logits.unbind(1)
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(positive - negative, praise[numbers]).backward()
            optimizer.step()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('directory', type=Path)
    parser.add_argument('--steps', type=int, default=STEPS)
    args = parser.parse_args()
    write(args.directory, args.steps)


if __name__ == '__main__':
    main()
