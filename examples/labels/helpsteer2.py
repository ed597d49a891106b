"""Convert the ratings of HelpSteer2, two responses to each prompt, to preferences.

python examples/labels/helpsteer2.py train.jsonl > labels.jsonl

The more helpful response is chosen; pairs that are equally helpful are left out, and counted. Data:
https://huggingface.co/datasets/nvidia/HelpSteer2
"""

import itertools
import json
import sys

ATTRIBUTE = 'helpfulness'

with open(sys.argv[1], encoding='utf-8') as file:
    records = [json.loads(line) for line in file]
equal = 0
for prompt, group in itertools.groupby(records, key=lambda record: record['prompt']):
    for first, second in itertools.combinations(group, 2):
        if first[ATTRIBUTE] == second[ATTRIBUTE]:
            equal += 1
            continue
        rejected, chosen = sorted((first, second), key=lambda record: record[ATTRIBUTE])
        label = {'prompt': prompt}
        label |= {'chosen': chosen['response'], 'rejected': rejected['response']}
        print(json.dumps(label))
print(f'{equal} pairs of the same {ATTRIBUTE} were left out', file=sys.stderr)
