"""File task.json of a folder: label type, encoding, instructions and task of its questions."""

import os
from collections.abc import Mapping
from typing import Any

from lm_human_preferences import label_types, storage
from lm_human_preferences.errors import UserError, about_option
from lm_human_preferences.label_types import LabelType
from lm_human_preferences.runs.run_files import TASK
from lm_human_preferences.storage.schema import COUNT, matches_schema

FORMAT = 1
LENGTHS = {'query_length': COUNT, 'response_length': COUNT}
SCHEMA = {
    'format': range(FORMAT, FORMAT + 1),
    'label_type': str,
    'encoding': str,
    'instructions': str,
    'task': LENGTHS,
}
EXPERIMENT = 'experiment'  # optional field of task.json: name of the experiment
TIES = 'ties'  # optional field of task.json: true if labellers may answer "no preference"
SCALE = 'scale'  # optional field of task.json: [lowest, highest number] that labellers may give


def read_task(path: str) -> dict[str, Any]:
    """Read a folder's task.json; UserError if it is damaged."""
    file = os.path.join(path, TASK)
    task = storage.read_json(file)
    if not matches_schema(task, SCHEMA):
        raise UserError(f'{file} is damaged, or of another version of this program')
    name, scale = task['label_type'], task.get(SCALE)
    with about_option(file):
        label_type = label_types.get(name)
    if scale is not None:
        is_pair = label_type.scale is not None and matches_schema(scale, (int, int))
        if not is_pair or tuple(scale) != label_type.scale_of(scale):
            raise UserError(f'{file} is damaged: {name} cannot have scale {scale!r:.80}')
    return task


def new_task(
    label_type: str,
    task: Mapping[str, Any],
    instructions: str | None,
    ties: bool,
    experiment: str | None = None,
) -> dict[str, Any]:
    """Return the content of a new folder's task.json, without the fields format and encoding."""
    asked = label_types.get(label_type)
    if not asked.instructions:
        asked.lacks('answer_of')
    record: dict[str, Any] = {'label_type': label_type, 'task': task}
    record['instructions'] = asked.instructions if instructions is None else instructions
    if experiment is not None:
        record[EXPERIMENT] = experiment
    if ties:
        record[TIES] = True
    if asked.scale is not None:
        record[SCALE] = list(asked.scale)
    return record


def label_type_of(task: Mapping[str, Any]) -> LabelType:
    """Return the label type of a folder. task: content of its task.json."""
    label_type = label_types.get(task['label_type'])
    if task.get(SCALE) is not None:
        label_type.set_scale(*task[SCALE])
    return label_type.allow_ties() if task.get(TIES) else label_type


def check_same_task(path: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise UserError unless a folder's task equals `here`, except for data set and policy."""
    if here.get(TIES) and not there.get(TIES):
        raise UserError(
            f'{path} does not allow ties, so its labellers had to choose: omit the option for ties,'
            ' or use another folder'
        )
    pairs = {name: (there[name], here[name]) for name in ('label_type', 'encoding') if name in here}
    for name, value in here['task'].items():
        if name not in ('query_dataset', 'policy'):
            pairs[f'--task.{name}'] = there['task'].get(name), value
    for name, (other, value) in pairs.items():
        if other != value:
            raise UserError(
                f'{path} is a folder of another task: its {name} is {other!r:.80}, not'
                f' {value!r:.80}; use another folder'
            )
