#!/usr/bin/env python3
"""Fine-tune language models from human preferences.

\b
A minute on any machine, without network:
  ./launch.py train_policy mock_sentiment first --mpi 1
  ./sample.py sample --save_dir /tmp/save/train_policy/first --nsamples 8

\b
Continue a run that was interrupted:
  ./launch.py resume /tmp/save/train_policy/first

\b
Train a reward model on the published labels, then a policy with it:
  ./launch.py train_reward descriptiveness my-reward --mpi 1
  ./launch.py train_policy descriptiveness my-policy --mpi 1 \\
      --rewards.train_new_model off \\
      --rewards.trained_model /tmp/save/train_reward/my-reward

Every hyperparameter is an option: `./launch.py train_policy --help` lists
them.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from lm_human_preferences import errors

errors.require('click')

import click

from lm_human_preferences import storage
from lm_human_preferences.cli import launch, user_settings
from lm_human_preferences.cli.labelling import label_commands
from lm_human_preferences.cli.launch import job_command
from lm_human_preferences.cli.program import Command, Program
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams import command_options, policy_options, reward_options
from lm_human_preferences.runs import run_dir, run_files, run_record, run_settings
from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.combos import Trial, bind, bind_all, bind_nested, combos

LABELS = 'https://openaipublic.blob.core.windows.net/lm-human-preferences/labels'

books_task = combos(
    bind_all(query_length=64, query_dataset='books', response_length=24),
    # A query begins after a full stop and ends with one, so it is made of whole sentences.
    bind_all(start_text='.', end_text='.'),
    # A response ends at the first full stop (token 13) after 16 tokens or more.
    bind_all(truncate_token=13, truncate_after=16),
    bind_all('policy', temperature=0.7, initial_model='124M'),
)


def summarize_task(temperature: float, **texts: str) -> list[Trial]:
    """Return the task of summarising 500 tokens of text in at most 75 tokens."""
    return combos(
        bind_all(**texts, query_length=500, response_length=75),
        bind_all(start_text=None, truncate_after=55, truncate_token=198),  # token 198 is '\n'
        bind_all('policy', temperature=temperature, initial_model='124M'),
    )


cnndm_task = summarize_task(
    0.5,
    query_prefix='Article:\n\n',
    query_suffix='\n\nTL;DR:',
    end_text='\n',
    query_dataset='cnndm',
)
tldr_task = summarize_task(0.7, query_suffix='\n\nTL;DR:', query_dataset='tldr')

# For tests: 27 letters as tokens, a model of two tiny layers, made-up queries and labels.
test_task = combos(
    bind_all(query_length=3, query_dataset='test', response_length=4, start_text=None),
    bind('policy.initial_model', 'test'),
)

# This task uses made-up film reviews, a tiny model trained on them, and a known reward.
mock_task = combos(
    bind_all(
        query_length=5, query_dataset='reviews', response_length=3, start_text=None, end_text='was'
    ),
    bind('policy.initial_model', 'reviews'),
)

# One turn of a chat. The user names the model, the queries and the reward.
chat_task = combos(
    bind_all(query_length=64, response_length=64, start_text=None, chat=True),
    bind_all('policy', temperature=0.7, lora='on'),
    bind('policy.lora.rank', 1),
)


def reward_experiment(task: Sequence[Trial], *settings: Sequence[Trial]) -> list[Trial]:
    """Return a best-of-four experiment; rewards are normalised before and after training."""
    return combos(
        bind_nested('task', task),
        bind('labels.type', 'best_of_4'),
        bind_all(normalize_after=True, normalize_before=True, normalize_samples=256),
        *settings,
        bind('run.seed', 1),
    )


def books_reward(labels: str) -> list[Trial]:
    """Return an experiment that trains a reward model of book continuations on 5,000 labels."""
    return reward_experiment(
        books_task,
        bind_all(batch_size=32, lr=5e-5, rollout_batch_size=512),
        bind_all('labels', source=f'{LABELS}/{labels}/offline_5k.json', num_train=4_992),
    )


def summarize_reward(task: Sequence[Trial], labels: str) -> list[Trial]:
    """Return an experiment that trains a reward model of summaries on labels collected online."""
    return reward_experiment(
        task,
        bind_all('labels', source=f'{LABELS}/{labels}/online_45k.json', num_train=46_000),
        bind_all(batch_size=2 * 8, lr=2.5e-5, rollout_batch_size=128),
    )


reward_experiments = {
    'sentiment': books_reward('sentiment'),
    'descriptiveness': books_reward('descriptiveness'),
    'cnndm': summarize_reward(cnndm_task, 'cnndm'),
    'tldr': summarize_reward(tldr_task, 'tldr'),
    'test': reward_experiment(
        test_task,
        bind_all('labels', source='test', num_train=1024),
        bind_all(batch_size=32, lr=1e-3),
    ),
    'mock_sentiment': reward_experiment(
        mock_task,
        bind_all('labels', source='mock', num_train=4096),
        bind_all(batch_size=32, lr=5e-3),
        bind('run.log_interval', 32),
    ),
    # No data set of queries is set, because the user's label files contain queries.
    'chat': combos(
        bind_nested('task', chat_task),
        bind('labels.type', 'best_of_2'),
        bind_all(normalize_after=True, normalize_before=True, normalize_samples=256),
        bind_all(batch_size=16, lr=3e-4, rollout_batch_size=64),
        bind('run.seed', 1),
    ),
}


def new_reward_model(experiment: str) -> list[Trial]:
    """Return settings with which a policy's run begins by training `experiment`'s reward model."""
    return combos(
        bind('rewards.train_new_model', 'on'),
        bind_nested('rewards.train_new_model', reward_experiments[experiment]),
    )


def adaptive_kl_policy(
    experiment: str,
    task: Sequence[Trial],
    kl_coef: float = 0.15,
    kl_target: float = 6.0,
    **ppo: Any,
) -> list[Trial]:
    """Return an experiment: train a reward model, then a policy to a KL near `kl_target` nats."""
    return combos(
        bind_nested('task', task),
        bind_all('ppo', **ppo),
        bind_all('rewards', kl_coef=kl_coef, adaptive_kl='on'),
        bind('rewards.adaptive_kl.target', kl_target),
        new_reward_model(experiment),
        bind('run.seed', 1),
    )


def summarize_policy(experiment: str, task: Sequence[Trial], kl_coef: float) -> list[Trial]:
    """Return an experiment: train a reward model, then a policy with a fixed KL coefficient."""
    return combos(
        bind_nested('task', task),
        new_reward_model(experiment),
        bind_all('ppo', total_episodes=1_000_000, lr=2e-6),
        bind('rewards.kl_coef', kl_coef),
        bind_all('ppo', batch_size=32, whiten_rewards=False),
        bind('run.seed', 1),
    )


books_ppo = dict(lr=1e-5, total_episodes=1_000_000, batch_size=512)
policy_experiments = {
    'sentiment': adaptive_kl_policy('sentiment', books_task, **books_ppo),
    'descriptiveness': adaptive_kl_policy('descriptiveness', books_task, **books_ppo),
    'cnndm': summarize_policy('cnndm', cnndm_task, kl_coef=0.01),
    # The kl_coef of cnndm, 0.01, is too low for tldr.
    'tldr': summarize_policy('tldr', tldr_task, kl_coef=0.03),
    'test': adaptive_kl_policy('test', test_task, lr=1e-2, total_episodes=100 * 64, batch_size=64),
    'mock_sentiment': combos(
        # kl_coef starts high, as a policy that strays far at first loses some words for good.
        adaptive_kl_policy(
            'mock_sentiment',
            mock_task,
            kl_coef=1.5,
            kl_target=2.0,
            lr=3e-3,
            total_episodes=200 * 256,
            batch_size=256,
        ),
        bind('rewards.adaptive_kl.horizon', 2500),
        bind('run.evaluate', True),
        bind('run.log_interval', 50),
    ),
    'chat': combos(
        bind_nested('task', chat_task),
        bind_all('ppo', lr=5e-4, total_episodes=100 * 64, batch_size=64, noptepochs=1),
        bind('ppo.samples_per_query', 8),
        bind_all('rewards', kl_coef=0.08, adaptive_kl='on', relative_kl_coef=True),
        bind_all('rewards.adaptive_kl', target=8.0, horizon=1000),
        bind_all('run', seed=1, log_interval=1),
    ),
}


EXPERIMENTS = {'train_policy': policy_experiments, 'train_reward': reward_experiments}
TRAININGS = {'train_policy': policy_options.HParams, 'train_reward': reward_options.CommandHParams}


def resume(settings: dict[str, Any], save_dir: str) -> None:
    """Continue the run in `save_dir` with its own settings, except for the user's `settings`."""
    mpi = settings.pop('mpi', None)
    save_dir = storage.absolute(save_dir)
    command, directory = recorded_run(save_dir)
    hparams = TRAININGS[command]()
    run_settings.read_settings(hparams, directory)
    unknown = settings.keys() - hyperparams.fields(type(hparams)).keys()
    if unknown:
        raise UserError(f'--{min(unknown)} is not an option of {command}')
    settings = user_settings.settings_with_own_token(settings, hparams.task)
    if hparams.policy is not None:
        settings = user_settings.complete(reward_experiments, settings, hparams.policy, None)
    user_settings.override(hparams, {**settings, 'run.save_dir': save_dir, 'run.resume': True})
    run_dir.prepare_run_dir(launch.validated(hparams), overwrite=False, explicitly_set=settings)
    if mpi is None:
        mpi = run_dir.ranks_of(hparams.run.directory)
    experiment = run_record.training(directory, command)['experiment']
    binds = settings_of_experiments().get(f'{command}/{experiment}', {})
    launch.start_training(hparams, experiment, binds, mpi)


def options_of_resume() -> dict[str, dataclasses.Field]:
    """Return all options of train_reward and train_policy that `resume` does not set itself."""
    options = {
        'mpi': hyperparams.fields(command_options.RankHParams)['mpi'],
        **user_settings.settable(reward_options.CommandHParams),
        **user_settings.settable(policy_options.HParams),
    }
    for name in ('run.save_dir', 'run.resume', 'rewards.train_new_model.run.save_dir'):
        del options[name]
    return options


def recorded_run(save_dir: str) -> tuple[str, str]:
    """Return the command that started a run, and the directory of the run on this machine."""
    directory = run_dir.fetch_run_dir(save_dir)
    names = {command: run_files.COMMANDS[command].settings for command in TRAININGS}
    missing = ' or '.join(names.values())
    for command, name in names.items():
        if storage.exists(storage.join(directory, name)):
            return command, directory
        if command in run_record.read(directory):
            missing = name  # run.json names the command, but its settings file is missing
            break
    raise UserError(f'{save_dir} holds no run to resume: it has no {missing}')


def settings_of_experiments() -> dict[str, dict[str, Any]]:
    """Return the settings {option: value} of every experiment, under the key COMMAND/EXPERIMENT."""
    found = {}
    for command, experiments in EXPERIMENTS.items():
        for name in experiments:
            found[f'{command}/{name}'] = user_settings.bindings(experiments, name, command)
    return found


cli = Program(
    help=__doc__,
    commands=[
        launch.experiment_command(
            'train_reward',
            reward_options.CommandHParams,
            reward_experiments,
            example='./launch.py train_reward mock_sentiment my-reward --mpi 1',
            help='Train a reward model on human labels.',
        ),
        launch.experiment_command(
            'train_policy',
            policy_options.HParams,
            policy_experiments,
            complete=functools.partial(user_settings.complete, reward_experiments),
            example='./launch.py train_policy mock_sentiment first --mpi 1',
            help=(
                'Train a policy by PPO against a reward model. Experiments train that model first,'
                ' unless they are given one.'
            ),
        ),
        Command(
            'resume',
            resume,
            options_of_resume(),
            ['save_dir'],
            example='./launch.py resume /tmp/save/train_policy/first',
            help=(
                'Continue the run in SAVE_DIR where it was interrupted, with as many ranks as it'
                ' had and with its own settings, few of which may be changed (docs/files.md). The'
                ' defaults below are those of a new run.'
            ),
        ),
        job_command(
            'export',
            'commands.export_model:export',
            command_options.ExportHParams,
            ['model_dir', 'output_dir'],
            example='./launch.py export /tmp/save/train_policy/first ./my-policy',
            help=(
                'Save a model as a Hugging Face directory. MODEL_DIR is a run of train_policy, the'
                ' directory of a model, or the name of a released one such as 124M: a language'
                ' model. A run of train_reward, or RUN/reward_model, gives a reward model: a'
                ' sequence classifier with one label.'
            ),
        ),
        job_command(
            'doctor',
            'commands.doctor:doctor',
            example='./launch.py doctor',
            help=(
                'Check that this machine has what training needs. Prints one line for each check,'
                ' with the fix if something is wrong.'
            ),
        ),
        job_command(
            'evaluate',
            'evaluation.evaluate:evaluate',
            command_options.EvaluationHParams,
            ['save_dir'],
            example='./launch.py evaluate /tmp/save/train_policy/first',
            help='Compare a policy with the best one at its KL. SAVE_DIR is a run of train_policy.',
        ),
        job_command(
            'report',
            'report.page:write_report',
            command_options.ReportHParams,
            [click.Argument(['runs'], type=click.Path(), nargs=-1, metavar='RUN...')],
            more=lambda: {'experiments': settings_of_experiments()},
            example='./launch.py report /tmp/save/train_policy/first',
            help=(
                'Write one HTML page about the runs in RUN...: what they reached, samples,'
                ' curves, labels, and how they were made.'
            ),
        ),
        *label_commands(reward_experiments, settings_of_experiments),
    ],
)

if __name__ == '__main__':
    cli()
