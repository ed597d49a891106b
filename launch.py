#!/usr/bin/env python3
"""Fine-tune language models from human preferences.

\b
Seconds on any machine, without network:
  ./launch.py train_policy test first --mpi 1
  ./sample.py sample --save_dir /tmp/save/train_policy/first --nsamples 8
\b
A reward model from the published labels, then a policy that follows it:
  ./launch.py train_reward descriptiveness my-reward --mpi 1
  ./launch.py train_policy descriptiveness my-policy --mpi 1 --rewards.train_new_model off \\
      --rewards.trained_model /tmp/save/train_reward/my-reward

Every hyperparameter is an option of its command: `./launch.py train_policy --help` lists them.
"""
import click

from lm_human_preferences.hparams import train_policy, train_reward
from lm_human_preferences.utils import launch
from lm_human_preferences.utils.combos import bind, bind_nested, combos

PUBLIC = 'https://openaipublic.blob.core.windows.net/lm-human-preferences'

books_task = combos(
    bind('query_length', 64),
    bind('query_dataset', 'books'),
    bind('response_length', 24),
    bind('start_text', '.'),  # a query begins after the end of a sentence
    bind('end_text', '.'),  # and ends with a whole one
    bind('truncate_token', 13),  # '.': so does a response,
    bind('truncate_after', 16),  # of 16 tokens at least
    bind('policy.temperature', 0.7),
    bind('policy.initial_model', '124M'),
)


def summarize_task(dataset, temperature, *texts):
    return combos(
        *texts,
        bind('query_dataset', dataset),
        bind('query_length', 500),
        bind('response_length', 75),
        bind('start_text', None),
        bind('truncate_after', 55),
        bind('truncate_token', 198),  # '\n'
        bind('policy.temperature', temperature),
        bind('policy.initial_model', '124M'),
    )


ask_for_summary = bind('query_suffix', '\n\nTL;DR:')
cnndm_task = summarize_task(
    'cnndm', 0.5, bind('query_prefix', 'Article:\n\n'), ask_for_summary, bind('end_text', '\n'))
tldr_task = summarize_task('tldr', 0.7, ask_for_summary)

# 27 letters, two tiny layers, made-up queries and labels.
test_task = combos(
    bind('query_length', 3),
    bind('query_dataset', 'test'),
    bind('response_length', 4),
    bind('start_text', None),
    bind('policy.initial_model', 'test'),
)


def reward_experiment(task, *settings):
    """The best of four responses; the reward normalised before and after training."""
    return combos(
        bind_nested('task', task),
        bind('labels.type', 'best_of_4'),
        bind('normalize_after', True),
        bind('normalize_before', True),
        bind('normalize_samples', 256),
        *settings,
        bind('run.seed', 1),
    )


def books_reward(labels):
    return reward_experiment(
        books_task,
        bind('batch_size', 32),
        bind('lr', 5e-5),
        bind('rollout_batch_size', 512),
        bind('labels.source', f'{PUBLIC}/labels/{labels}/offline_5k.json'),
        bind('labels.num_train', 4_992),
    )


def summarize_reward(task, labels):
    return reward_experiment(
        task,
        bind('labels.source', f'{PUBLIC}/labels/{labels}/online_45k.json'),
        bind('labels.num_train', 46_000),
        bind('batch_size', 2 * 8),
        bind('lr', 2.5e-5),
        bind('rollout_batch_size', 128),
    )


reward_experiments = {
    'sentiment': books_reward('sentiment'),
    'descriptiveness': books_reward('descriptiveness'),
    'cnndm': summarize_reward(cnndm_task, 'cnndm'),
    'tldr': summarize_reward(tldr_task, 'tldr'),
    'test': reward_experiment(
        test_task,
        bind('labels.source', 'test'),
        bind('labels.num_train', 1024),
        bind('batch_size', 32),
        bind('lr', 1e-3),
    ),
}


def new_reward_model(experiment):
    return combos(
        bind('rewards.train_new_model', 'on'),
        bind_nested('rewards.train_new_model', reward_experiments[experiment]),
    )


def adaptive_kl_policy(experiment, task, *ppo):
    return combos(
        bind_nested('task', task),
        *ppo,
        bind('rewards.kl_coef', 0.15),
        bind('rewards.adaptive_kl', 'on'),
        bind('rewards.adaptive_kl.target', 6.0),
        new_reward_model(experiment),
        bind('run.seed', 1),
    )


def summarize_policy(experiment, task, kl_coef):
    return combos(
        bind_nested('task', task),
        new_reward_model(experiment),
        bind('ppo.total_episodes', 1_000_000),
        bind('ppo.lr', 2e-6),
        bind('rewards.kl_coef', kl_coef),
        bind('ppo.batch_size', 32),
        bind('ppo.whiten_rewards', False),
        bind('run.seed', 1),
    )


books_ppo = bind('ppo.lr', 1e-5), bind('ppo.total_episodes', 1_000_000), bind('ppo.batch_size', 512)
test_ppo = bind('ppo.lr', 1e-2), bind('ppo.total_episodes', 100 * 64), bind('ppo.batch_size', 64)
policy_experiments = {
    'sentiment': adaptive_kl_policy('sentiment', books_task, *books_ppo),
    'descriptiveness': adaptive_kl_policy('descriptiveness', books_task, *books_ppo),
    'cnndm': summarize_policy('cnndm', cnndm_task, kl_coef=0.01),
    'tldr': summarize_policy('tldr', tldr_task, kl_coef=0.03),  # 0.01 is too low
    'test': adaptive_kl_policy('test', test_task, *test_ppo),
}


def export(settings, model_dir, output_dir):
    launch.run('lm_human_preferences.export:export', {'model_dir': model_dir, 'output_dir': output_dir}, mpi=1)


cli = launch.Program(help=__doc__, commands=[
    launch.experiment_command(
        'train_reward', 'lm_human_preferences.train_reward:train', train_reward.HParams, reward_experiments,
        help='Train a reward model from human labels.'),
    launch.experiment_command(
        'train_policy', 'lm_human_preferences.train_policy:train', train_policy.HParams, policy_experiments,
        complete=train_policy.complete, help='Train a policy by PPO against a reward model, new or trained before.'),
    launch.Command(
        'export', export, {}, [click.Argument(['model_dir']), click.Argument(['output_dir'])],
        help='Save the language model of MODEL_DIR, a run or a released name, as a Hugging Face directory.'),
])

if __name__ == '__main__':
    cli()
