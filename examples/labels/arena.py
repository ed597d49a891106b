"""Convert conversations of the Chatbot Arena: two models' answers, and a vote.

python examples/labels/arena.py chatbot_arena.json > labels.jsonl

Labels are of the type best_of_2, some of them ties: import them with --ties on. Only the first
answers can be compared: conversations of several turns are left out, and counted. Data, from
Parquet by pandas.read_parquet(FILE).to_json('chatbot_arena.json', orient='records'):
https://huggingface.co/datasets/lmsys/chatbot_arena_conversations
"""

import json
import sys

BEST = {'model_a': 0, 'model_b': 1, 'tie': 'tie', 'tie (bothbad)': 'tie'}

with open(sys.argv[1], encoding='utf-8') as file:
    records = json.load(file)
left_out = 0
for record in records:
    if record['turn'] != 1:
        left_out += 1
        continue
    question, answer_a = record['conversation_a']
    _, answer_b = record['conversation_b']
    label = {
        'id': record['question_id'],
        'query': question['content'],
        'sample0': answer_a['content'],
        'sample1': answer_b['content'],
        'best': BEST[record['winner']],
        'labeller': record['judge'],
    }
    print(json.dumps(label))
print(f'{left_out} conversations of several turns were left out', file=sys.stderr)
