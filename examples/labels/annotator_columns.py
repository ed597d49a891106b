"""Convert a table with one column for each annotator.

python examples/labels/annotator_columns.py table.csv > labels.jsonl

The columns prompt, response_a and response_b have the texts; each other column is called after an
annotator, and has A, B, tie or nothing. Labels are of the type best_of_2; with ties, import them
with --ties on.
"""

import csv
import json
import sys

TEXTS = ('prompt', 'response_a', 'response_b')
BEST = {'a': 0, 'b': 1, 'tie': 'tie'}

csv.field_size_limit(sys.maxsize)
with open(sys.argv[1], encoding='utf-8-sig', newline='') as file:
    for row in csv.DictReader(file, restval=''):
        query, first, second = (row.pop(name) for name in TEXTS)
        for annotator, answer in row.items():
            if not answer.strip():
                continue  # who was not asked
            label = {'query': query, 'sample0': first, 'sample1': second}
            label |= {'best': BEST[answer.strip().lower()], 'labeller': annotator}
            print(json.dumps(label))
