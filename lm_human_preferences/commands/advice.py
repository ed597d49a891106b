"""Recommended reward training by number of labels, as measured in benchmarks/labels.md."""

import itertools
import os
from collections.abc import Mapping
from typing import Any

from lm_human_preferences import shell
from lm_human_preferences.hparams.differences import Experiments, task_options
from lm_human_preferences.hparams.task_options import TaskHParams
from lm_human_preferences.labels.folder import LabelFolder
from lm_human_preferences.labels.task_file import EXPERIMENT
from lm_human_preferences.runs.run_files import POLICY, usual_directory

# (most labels, epochs). With fewer epochs the reward model underfits; with more it overfits the
# labellers' errors, above all where there are many labels.
EPOCHS = ((512, 16), (4096, 4))
MEMBERS = 4
# Most labels from which a head on a large model's frozen hidden states learns more than a network
MOST_FOR_HEAD = 512


def training_options(labels: int, *, is_large: bool) -> list[str]:
    """Return options of a new reward model for so many labels; is_large: as its language model."""
    new_model = '--rewards.train_new_model'
    if is_large and labels <= MOST_FOR_HEAD:
        return [f'{new_model}.features', 'frozen']
    epochs, members = epochs_and_members(labels)
    return [f'{new_model}.epochs', str(epochs), '--rewards.ensemble', str(members)]


def epochs_and_members(labels: int) -> tuple[int, int]:
    """Return epochs, and reward models in an ensemble, for a training on so many labels."""
    for most, epochs in EPOCHS:
        if labels <= most:
            return epochs, MEMBERS
    return 1, MEMBERS


def training_command(
    folder: LabelFolder, experiments: Experiments, labels: int, without: str | None = None
) -> str:
    """Return the command that trains a policy on so many labels, all but those of `without`."""
    experiment, for_task = _experiment_and_task(folder.task, experiments)
    path = os.path.abspath(folder.path)
    new_model = '--rewards.train_new_model'
    name = os.path.basename(path)
    names = itertools.chain([name], (f'{name}-{number}' for number in itertools.count(2)))
    new = (each for each in names if not os.path.exists(usual_directory(POLICY.command, each)))
    words = [experiment, next(new)]
    for option, value in for_task.items():
        words += shell.option_words(option, value)
    words += [f'{new_model}.labels.source', path]
    words += [f'{new_model}.labels.type', folder.task['label_type']]
    words += [f'{new_model}.labels.num_train', 'None']
    if without:
        words += [f'{new_model}.labels.without', without]
    # Those that learn by adapters are large, and know more than a few labels can teach.
    is_large = folder.task['task'].get('policy', {}).get('lora') is not None
    words += training_options(labels, is_large=is_large)
    return shell.typed('./launch.py train_policy', *words)


def _experiment_and_task(
    content: Mapping[str, Any], experiments: Experiments
) -> tuple[str, dict[str, Any]]:
    """Return the experiment of a folder, and the options of its task that differ from that.

    content: of its task.json. One that names no experiment has the one whose task is most alike.
    """
    options = {}
    for key, binds in experiments.items():
        command, _, name = key.partition('/')
        if command == POLICY.command and name == content.get(EXPERIMENT, name):
            task = TaskHParams()
            task.override_from_nested_dict(content['task'])
            options[name] = task_options(task, binds)
    name = min(options, key=lambda each: len(options[each]))
    return name, options[name]
