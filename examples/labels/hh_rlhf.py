"""Convert Anthropic's HH-RLHF to lists of messages, for a model with a chat template.

python examples/labels/hh_rlhf.py helpful-base/train.jsonl > labels.jsonl

The transcripts themselves are read, too, and are then texts. Data:
https://huggingface.co/datasets/Anthropic/hh-rlhf
"""

import json
import re
import sys

ROLES = {'Human': 'user', 'Assistant': 'assistant'}


def messages(transcript):
    """Return the turns of a transcript as messages."""
    _, *parts = re.split(r'\n\n(Human|Assistant):', transcript)
    turns = zip(parts[::2], parts[1::2], strict=True)
    return [{'role': ROLES[name], 'content': content.strip()} for name, content in turns]


with open(sys.argv[1], encoding='utf-8') as file:
    for line in file:
        record = json.loads(line)
        label = {name: messages(record[name]) for name in ('chosen', 'rejected')}
        print(json.dumps(label))
