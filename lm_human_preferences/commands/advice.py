"""Options recommended to train on a given number of labels, from benchmarks/labels.md."""

import os

from lm_human_preferences import errors
from lm_human_preferences.hparams.policy_options import NEW_MODEL, Experiments, task_options
from lm_human_preferences.hparams.task_options import TaskHParams
from lm_human_preferences.labels.folder import LabelFolder
from lm_human_preferences.labels.task_file import EXPERIMENT
from lm_human_preferences.runs.run_files import POLICY, usual_directory

# With few labels, a head on a large model's frozen hidden states beats a trained network.
# Fewer epochs than recommended here underfit; more epochs overfit the labellers' errors.
FEW, MANY = 512, 4096  # numbers of labels that count as few and as many
MEMBERS = 4  # number of reward models; their mean is the reward


def training_options(labels: int, *, is_large: bool) -> list[str]:
    """Return options for training on `labels` labels. is_large: whether the network is large."""
    if is_large and labels <= FEW:
        return [f'--{NEW_MODEL}.features', 'frozen']
    epochs = 1
    if labels <= MANY:
        epochs = 16 if labels <= FEW else 4
    return [f'--{NEW_MODEL}.epochs', str(epochs), '--rewards.ensemble', str(MEMBERS)]


def training_command(
    folder: LabelFolder, experiments: Experiments, labels: int, without: str | None = None
) -> str:
    """Return the train_policy command for a folder's labels. without: labellers to leave out."""
    experiment, content = folder.task.get(EXPERIMENT), folder.task['task']
    if f'{POLICY.command}/{experiment}' not in experiments:
        experiment = 'chat'  # any experiment will do, as the options below set the task
    task = TaskHParams()
    task.override_from_nested_dict(content, keep_unknown=True)
    path = os.path.abspath(folder.path)
    name, number = os.path.basename(path), 1
    while os.path.exists(usual_directory(POLICY.command, name)):
        number += 1
        name = f'{os.path.basename(path)}-{number}'
    words = [experiment, name]
    binds = experiments[f'{POLICY.command}/{experiment}']
    for option, value in task_options(task, binds).items():
        words += errors.option_words(option, value)
    words += [f'--{NEW_MODEL}.labels.source', path]
    words += [f'--{NEW_MODEL}.labels.type', folder.task['label_type']]
    words += [f'--{NEW_MODEL}.labels.num_train', 'None']
    if without:
        words += [f'--{NEW_MODEL}.labels.without', without]
    # A model is assumed to be large if it is trained by adapters.
    is_large = content.get('policy', {}).get('lora') is not None
    words += training_options(labels, is_large=is_large)
    return errors.typed('./launch.py train_policy', *words)
