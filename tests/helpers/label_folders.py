"""Folders of labels that tests make, without a model."""

import random

from lm_human_preferences.labels.folder import QuestionWriter

TASK = {
    'label_type': 'best_of_4',
    'encoding': 'test',
    'instructions': 'Choose.',
    'task': {'query_length': 3, 'response_length': 4, 'query_dataset': 'test'},
}
HEADER = {
    'kind': 'train',
    'labellers': 1,
    'policies': ['initial'] * 4,
    'part': 'train',
    'texts_read': 1,
}


def questions(count, seed=0, samples=4):
    """Questions of random tokens, {field: token ids}, no two of them alike."""
    rng = random.Random(seed)
    names = ['sample'] if samples == 1 else [f'sample{i}' for i in range(samples)]
    return [
        {
            'query': [rng.randrange(26) for _ in range(3)],
            **{name: [rng.randrange(26) for _ in range(4)] for name in names},
        }
        for _ in range(count)
    ]


def make_folder(path, count=3, *, task=None, seed=0, samples=4, **header):
    """A folder at `path` with `count` more questions; header: what differs from HEADER."""
    with QuestionWriter(str(path), {**TASK, **(task or {})}) as writer:
        given = {**HEADER, 'policies': ['initial'] * samples, **header}
        writer.add(questions(count, seed, samples), [given] * count)
        return writer.folder
