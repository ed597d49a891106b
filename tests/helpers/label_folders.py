"""Folders of labels that tests make, without a model."""

import itertools
import random

from lm_human_preferences.labels.folder import LabelFolder, QuestionWriter
from lm_human_preferences.labels.labeller import Labeller
from lm_human_preferences.language import encodings

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


def random_questions(seed=0, samples=4, task=TASK['task'], tokens=26):
    """Yield questions of random tokens, {field: token ids}, without end, no two of them alike."""
    rng = random.Random(seed)
    names = ['sample'] if samples == 1 else [f'sample{i}' for i in range(samples)]
    lengths = {'query': task['query_length'], **dict.fromkeys(names, task['response_length'])}
    while True:
        yield {name: rng.choices(range(tokens), k=length) for name, length in lengths.items()}


def questions(count, seed=0):
    return list(itertools.islice(random_questions(seed), count))


def make_folder(path, count=3, *, task=None, seed=0, samples=4, tokens=26, new=None, **header):
    """Add `count` questions, random ones or `new`, with differences from TASK and HEADER."""
    task = {**TASK, **(task or {})}
    header = {**HEADER, 'policies': ['initial'] * samples, **header}
    new = new or random_questions(seed, samples, task['task'], tokens)
    with QuestionWriter(str(path), task, encodings.by_name(task['encoding'])) as writer:
        writer.add(list(itertools.islice(new, count)), [header] * count)
        return writer.folder


def say(path, name, *values, **more):
    """Answer the questions of a folder in their order; None: a skip, ...: no answer."""
    folder = LabelFolder(str(path))
    with Labeller(folder, name) as labeller:
        for number, (question, value) in enumerate(zip(folder.questions.values(), values)):
            if value is not ...:
                reason = 'cannot tell' if value is None else None
                labeller.answer(question, value, 0.5 + number, reason=reason, **more)


def answer_all(path, name, value=0):
    """Answer all questions of a folder alike; return their number."""
    with Labeller(LabelFolder(str(path)), name) as labeller:
        while question := labeller.next_question():
            labeller.answer(question, value, 1.5)
        return labeller.done()
