"""Options recommended to train on a given number of labels, from benchmarks/labels.md."""

import itertools
import os
from collections.abc import Mapping
from typing import Any

from lm_human_preferences import shell
from lm_human_preferences.hparams.differences import Experiments, task_options
from lm_human_preferences.hparams.policy_options import NEW_MODEL
from lm_human_preferences.hparams.task_options import TaskHParams
from lm_human_preferences.labels.folder import LabelFolder
from lm_human_preferences.labels.task_file import EXPERIMENT
from lm_human_preferences.runs.run_files import POLICY, usual_directory

# (largest number of labels, epochs). With fewer epochs the reward model underfits; with more it
# overfits the labellers' errors, above all where there are many labels.
EPOCHS = ((512, 16), (4096, 4))
MEMBERS = 4  # number of reward models; their mean is the reward
# Up to so many labels, a head on a large model's frozen hidden states beats a trained network.
MOST_FOR_HEAD = 512


def training_options(labels: int, *, is_large: bool) -> list[str]:
    """Return options to train a reward model. is_large: whether its language model is large."""
    if is_large and labels <= MOST_FOR_HEAD:
        return [f'--{NEW_MODEL}.features', 'frozen']
    epochs = str(epochs_for(labels))
    return [f'--{NEW_MODEL}.epochs', epochs, '--rewards.ensemble', str(MEMBERS)]


def epochs_for(labels: int) -> int:
    """Return the recommended number of epochs for so many labels."""
    for most, epochs in EPOCHS:
        if labels <= most:
            return epochs
    return 1


def training_command(
    folder: LabelFolder, experiments: Experiments, labels: int, without: str | None = None
) -> str:
    """Return the train_policy command for a folder's labels, except those by `without`."""
    experiment, for_task = _experiment_and_task(folder.task, experiments)
    path = os.path.abspath(folder.path)
    name = os.path.basename(path)
    names = itertools.chain([name], (f'{name}-{number}' for number in itertools.count(2)))
    new = (each for each in names if not os.path.exists(usual_directory(POLICY.command, each)))
    words = [experiment, next(new)]
    for option, value in for_task.items():
        words += shell.option_words(option, value)
    words += [f'--{NEW_MODEL}.labels.source', path]
    words += [f'--{NEW_MODEL}.labels.type', folder.task['label_type']]
    words += [f'--{NEW_MODEL}.labels.num_train', 'None']
    if without:
        words += [f'--{NEW_MODEL}.labels.without', without]
    # A model is assumed to be large if it is trained by adapters.
    is_large = folder.task['task'].get('policy', {}).get('lora') is not None
    words += training_options(labels, is_large=is_large)
    return shell.typed('./launch.py train_policy', *words)


def _experiment_and_task(
    content: Mapping[str, Any], experiments: Experiments
) -> tuple[str, dict[str, Any]]:
    """Return (experiment of a folder, {option: value} in which the folder's task differs from it).

    content: parsed task.json. If it names no experiment, take the one with the most similar task.
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
