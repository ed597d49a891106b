"""Convert UltraFeedback: the best of four responses by their overall scores.

python examples/labels/ultrafeedback.py sharegpt.jsonl > labels.jsonl

Labels are of the type best_of_4. Records with fewer responses, or whose best two are equally good,
are left out, and counted. Data: https://huggingface.co/datasets/openbmb/UltraFeedback
"""

import json
import sys

left_out = 0
with open(sys.argv[1], encoding='utf-8') as file:
    for line in file:
        record = json.loads(line)
        scores = [float(each['overall_score']) for each in record['completions']]
        if len(scores) != 4 or scores.count(max(scores)) > 1:
            left_out += 1
            continue
        label = {'query': record['instruction']}
        for number, completion in enumerate(record['completions']):
            label[f'sample{number}'] = completion['response']
        label['best'] = scores.index(max(scores))
        print(json.dumps(label))
print(f'{left_out} records without one best of four were left out', file=sys.stderr)
