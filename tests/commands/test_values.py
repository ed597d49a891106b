"""Values that cannot work: one line with option and range, status 2, nothing written."""

import pytest
from command_line import invoke, last_error_of

NEW = '--rewards.train_new_model'


@pytest.mark.parametrize(
    'words, option, range_',
    [
        ('--ppo.gamma 5', '--ppo.gamma', 'from 0 to 1'),
        ('--task.policy.temperature 0', '--task.policy.temperature', 'above 0'),
        (f'{NEW}.labels.type best_of_1', f'{NEW}.labels.type', 'at least 2'),
        (
            '--rewards.online.labels 50 --rewards.online.validation -1',
            '--rewards.online.validation',
            'from 0 to 1',
        ),
        ('--task.truncate_token 999999', '--task.truncate_token', '0 to 26'),
        (
            '--task.truncate_token 5 --task.truncate_after 4',
            '--task.truncate_after',
            'below --task.response_length 4',
        ),
        (
            '--task.response_length 600',
            '--task.response_length',
            ' + 0 tokens of prefix and suffix are 603, more than the 8 of'
            ' --task.policy.initial_model test',
        ),
        (
            '--ppo.batch_size 1_000_000_000_000 --ppo.total_episodes 1_000_000_000_000',
            '--ppo.batch_size',
            'at most',
        ),
        (f'{NEW}.rollout_batch_size 1_000_000_000_000', f'{NEW}.rollout_batch_size', 'at most'),
        (f'{NEW}.labels.source mock', 'mock', 'set --task.policy.initial_model reviews'),
    ],
)
@pytest.mark.parametrize('more', ['', '--dry_run'])
def test_train_policy(words, option, range_, more, tmp_path):
    command = f'train_policy test first --mpi 1 --save_dir {tmp_path} {words} {more}'
    message = last_error_of(invoke(command))
    assert option.removeprefix(f'{NEW}.').strip('-') in message and range_ in message, message
    assert not list(tmp_path.iterdir())


def test_the_policy_is_checked_before_its_reward_model_is_trained(tmp_path, monkeypatch):
    """Memory for a batch of episodes is needed only hours later."""
    from lm_human_preferences import train_reward

    monkeypatch.setattr(
        train_reward, 'train_models', lambda *args: pytest.fail('training has begun')
    )
    command = f'train_policy test first --mpi 1 --save_dir {tmp_path}'
    message = last_error_of(invoke(f'{command} --ppo.batch_size 1_000_000_000_000'))
    assert message.startswith('--ppo.batch_size: what 1000000000000 of them hold')
