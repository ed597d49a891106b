"""Recommendation for training on few labels, and the command that prints it."""

import pytest

from lm_human_preferences.commands import advice


@pytest.mark.parametrize(
    'labels, epochs', [(1, 16), (200, 16), (512, 16), (513, 4), (4096, 4), (4097, 1), (10**6, 1)]
)
def test_few_labels_are_learned_more_often(labels, epochs):
    assert advice.epochs_and_members(labels) == (epochs, 4)


def test_the_command_has_what_is_recommended():
    command = advice.training_command("anna's", 'best_of_2', 200, 'bob,carl')
    assert command.endswith(
        './launch.py train_policy EXPERIMENT NAME --rewards.train_new_model.labels.source'
        " 'anna'\"'\"'s' --rewards.train_new_model.labels.type best_of_2"
        ' --rewards.train_new_model.labels.num_train None'
        ' --rewards.train_new_model.labels.without bob,carl --rewards.train_new_model.epochs 16'
        ' --rewards.ensemble 4'
    )
    assert 'without' not in advice.training_command('f', 'best_of_4', 200)
