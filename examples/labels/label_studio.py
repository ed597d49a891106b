"""Convert the JSON export of a Label Studio project with pairwise comparisons.

python examples/labels/label_studio.py project-1.json pw > labels.jsonl

`pw` is the name of the <Pairwise> control whose answers are taken. Labels are of the type
best_of_2; cancelled annotations and those without an answer are left out, and counted.
"""

import json
import sys


def annotator(annotation):
    """Return a name of who answered; some exports have the whole user, or nobody."""
    user = annotation['completed_by']
    number = user['id'] if isinstance(user, dict) else user
    return None if number is None else f'annotator-{number}'


path, control = sys.argv[1:]
with open(path, encoding='utf-8') as file:
    tasks = json.load(file)
if any('data' not in task for task in tasks):
    sys.exit(f'{path} is a JSON-MIN export: export the project as JSON')
left_out = 0
for task in tasks:
    data = task['data']
    for annotation in sorted(task['annotations'], key=lambda each: each['updated_at']):
        results = [each for each in annotation['result'] if each['from_name'] == control]
        if annotation['was_cancelled'] or not results:
            left_out += 1
            continue
        left, right = results[0]['to_name'].split(',')  # the fields with the two texts
        label = {'id': task['id'], 'query': data['prompt']}
        label |= {'sample0': data[left], 'sample1': data[right]}
        label['best'] = ['left', 'right'].index(results[0]['value']['selected'])
        label['labeller'] = annotator(annotation)
        print(json.dumps(label))
print(f'{left_out} annotations without an answer of {control} were left out', file=sys.stderr)
