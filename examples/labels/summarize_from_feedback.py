"""Convert comparisons of summarize-from-feedback: two summaries of a post, and a choice.

python examples/labels/summarize_from_feedback.py batch*.json > labels.jsonl

Labels are of the type best_of_2. Data: https://github.com/openai/summarize-from-feedback, where
the files of comparisons/ have one JSON object a line.
"""

import json
import sys

for name in sys.argv[1:]:
    with open(name, encoding='utf-8') as file:
        for line in file:
            record = json.loads(line)
            info = record['info']
            first, second = record['summaries']
            label = {
                'id': info['id'],
                'query': info.get('post') or info['article'],  # of Reddit, or of CNN
                'sample0': first['text'],
                'sample1': second['text'],
                'best': record['choice'],
                'labeller': record['worker'],
            }
            print(json.dumps(label))
