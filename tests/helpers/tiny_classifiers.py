"""Tiny sequence classifiers of transformers with random weights, saved with a tokeniser."""

import json
from pathlib import Path

import torch
from tiny_causal_lms import OLDER, SIZES, WITHOUT_HEAD_DIM
from tiny_tokenisers import write_alone

from lm_human_preferences.datasets.reviews import WORDS

BERT = {**SIZES, 'num_key_value_heads': None, 'head_dim': None, 'pad_token_id': 1}
OF_FAMILY = {
    'gpt2': OLDER,
    'llama': SIZES,
    'mistral': SIZES,
    'gptj': {**OLDER, 'rotary_dim': 4},
    'gpt_neox': WITHOUT_HEAD_DIM,
    'bert': BERT,
    'roberta': {**BERT, 'max_position_embeddings': 66},
    'distilbert': {
        'vocab_size': 64, 'dim': 32, 'hidden_dim': 48, 'n_layers': 2, 'n_heads': 4,
        'max_position_embeddings': 64, 'pad_token_id': 1,
    },
}  # fmt: skip


def write_classifier(directory, family='gpt2', names=('reward',), seed=0, **settings):
    """A classifier of the words of reviews, `names` its classes; returns its directory."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    sizes = {key: value for key, value in OF_FAMILY[family].items() if value is not None}
    sizes |= {'pad_token_id': sizes.get('pad_token_id'), **settings}
    classes = {'id2label': dict(enumerate(names)), 'label2id': {n: i for i, n in enumerate(names)}}
    config = AutoConfig.for_model(family, **sizes, **classes, bos_token_id=None, eos_token_id=None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_config(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(directory)
    write_alone(Path(directory), WORDS)
    return str(directory)


def change_config(directory, **changes):
    """Change the config.json in a directory; a value of None takes the key out."""
    change_json(Path(directory, 'config.json'), **changes)


def change_json(path, **changes):
    """Change the object in a JSON file; a value of None takes the key out."""
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
