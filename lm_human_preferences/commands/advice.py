"""Recommended epochs and ensemble size by number of labels, from benchmarks/few_labels.py."""

from lm_human_preferences import shell

# (most labels, epochs). With fewer epochs the reward model underfits; with more it overfits the
# labellers' errors, above all where there are many labels.
EPOCHS = ((512, 16), (4096, 4))
MEMBERS = 4


def epochs_and_members(labels: int) -> tuple[int, int]:
    """Return epochs, and reward models in an ensemble, for a training on so many labels."""
    for most, epochs in EPOCHS:
        if labels <= most:
            return epochs, MEMBERS
    return 1, MEMBERS


def training_command(folder: str, label_type: str, labels: int, without: str | None = None) -> str:
    """Return the command that trains a policy on a folder's labels, without those of `without`."""
    epochs, members = epochs_and_members(labels)
    new_model = '--rewards.train_new_model'
    words = [f'{new_model}.labels.source', folder, f'{new_model}.labels.type', label_type]
    words += [f'{new_model}.labels.num_train', 'None']
    if without:
        words += [f'{new_model}.labels.without', without]
    words += [f'{new_model}.epochs', str(epochs), '--rewards.ensemble', str(members)]
    return shell.typed('./launch.py train_policy EXPERIMENT NAME', *words)
