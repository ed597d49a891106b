"""Convert the Stanford Human Preferences (SHP): votes on two comments to a post.

python examples/labels/shp.py askculinary/train.json > labels.jsonl

Labels are of the type best_of_2. Data: https://huggingface.co/datasets/stanfordnlp/SHP
"""

import json
import sys

LEAST_RATIO = 2.0  # of the votes: closer ones say little, as the data set's authors found

with open(sys.argv[1], encoding='utf-8') as file:
    for line in file:
        record = json.loads(line)
        if record['score_ratio'] < LEAST_RATIO:
            continue
        label = {
            'id': f'{record["c_root_id_A"]}-{record["c_root_id_B"]}',
            'query': record['history'],
            'sample0': record['human_ref_A'],
            'sample1': record['human_ref_B'],
            'best': 0 if record['labels'] == 1 else 1,  # 1 is for A
        }
        print(json.dumps(label))
