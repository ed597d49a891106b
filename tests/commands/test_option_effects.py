"""Each option that a training accepts is read somewhere, and refused where nothing heeds it."""

import ast

import pytest
from command_line import NEW, error_of, invoke, succeed
from launched import REPOSITORY

from lm_human_preferences.cli.user_settings import settable
from lm_human_preferences.hparams import policy_options, reward_options

OPTIONS = settable(reward_options.CommandHParams) | settable(policy_options.HParams)
# What code calls settings, or a group of them, where it is not their own name.
USUAL_NAMES = {'hparams', 'settings', 'options', 'self', 'adaptive', 'policy', 'new_reward_model'}
CHECKS = {'problems', 'validate', 'check_ranks'}  # do not heed what they refuse


class Reads(ast.NodeVisitor):
    """found: (GROUP, NAME) of each attribute GROUP.NAME that code reads, but for checks."""

    def __init__(self):
        self.found = set()
        for path in (REPOSITORY / 'lm_human_preferences').rglob('*.py'):
            self.visit(ast.parse(path.read_text(encoding='utf-8')))

    def visit_FunctionDef(self, node):
        if node.name not in CHECKS:
            self.generic_visit(node)

    def visit_Attribute(self, node):
        group = getattr(node.value, 'attr', getattr(node.value, 'id', None))
        if isinstance(node.ctx, ast.Load):
            self.found.add((group, node.attr))
        self.generic_visit(node)


def test_every_option_is_read():
    found = Reads().found
    for option in OPTIONS:
        *groups, name = option.split('.')
        assert any((group, name) in found for group in {*groups[-1:], *USUAL_NAMES}), option


ONLINE = (
    '--rewards.online.labels 16 --rewards.online.initial 16 --rewards.online.retrainings 0'
    ' --rewards.online.source test'
)


def test_all_labels_may_be_asked_for_while_they_are_collected():
    """As the error says of a number from the experiment that batches do not divide."""
    words = f'train_policy mock_sentiment run --mpi 1 --dry_run --save_dir None {ONLINE}'
    words += f' --{NEW}.batch_size 5 --{NEW}.rollout_batch_size 5'
    assert error_of(invoke(words)).endswith('or None for all labels')
    succeed(f'{words} --{NEW}.labels.num_train None')


@pytest.mark.parametrize('option', ['run.resume true', 'run.evaluate true', 'run.stop_timeout 60'])
def test_options_of_the_command_are_no_options_of_the_reward_model_in_it(option):
    name = option.split()[0]
    error = error_of(invoke(f'train_policy test run --{NEW}.{option}'))
    assert error.startswith(f"No such option '--{NEW}.{name}'.")
