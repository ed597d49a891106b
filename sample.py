#!/usr/bin/env python3
"""Print samples of a trained policy, or of a model that has not been trained.

\b
For example:
  ./sample.py sample --save_dir /tmp/save/train_policy/first --nsamples 8
  ./sample.py sample --save_dir /tmp/save/train_policy/first \\
      --prompt 'the film was' --best_of 16
  ./sample.py sample --model ./my-model --prompt 'What is rain?'

A --model gets the task of the experiment `chat`, unless options --task.NAME change it.
"""

from typing import Any

from lm_human_preferences import errors

errors.require('click')

import launch as experiments
from lm_human_preferences import storage
from lm_human_preferences.cli import launch, user_settings
from lm_human_preferences.cli.program import Command, Program
from lm_human_preferences.errors import UserError, about_option
from lm_human_preferences.hparams.command_options import SampleHParams
from lm_human_preferences.runs import run_settings


def sample(settings: dict[str, Any]) -> None:
    """Start sampling. With --model, `settings` override the task of the experiment `chat`."""
    is_run, is_model = (settings.get(name) is not None for name in ('save_dir', 'model'))
    if is_run == is_model or (is_run and any(name.startswith('task.') for name in settings)):
        raise UserError(
            'give either --save_dir with a run of train_policy, such as'
            ' /tmp/save/train_policy/first, or --model; options --task.NAME need --model'
        )
    if is_model:
        chat = user_settings.bindings(experiments.reward_experiments, 'chat', 'sample')
        # Adapters that have not been trained would change nothing.
        task = {
            name: value
            for name, value in chat.items()
            if name.startswith('task.') and not name.startswith('task.policy.lora')
        }
        if settings.keys() & {'prompt', 'queries'}:
            task['task.query_dataset'] = 'test'  # a required option, unused if queries are given
        elif settings.get('task.query_dataset') is None:
            raise UserError('--model needs --prompt, --queries or --task.query_dataset')
        settings = {**task, **settings, 'task.policy.initial_model': settings['model']}
    options = SampleHParams()
    user_settings.override(options, settings)
    launch.validated(options)
    if options.output is not None:
        with about_option('--output'):
            storage.check_new_file(options.output)
    if options.save_dir is not None:
        run_settings.load_run_hparams(options.save_dir)  # finds errors before torch is loaded
    launch.start_job('commands.sample_policy:sample_policy', {'options': options}, options.mpi)


cli = Program(
    help=__doc__,
    commands=[
        Command(
            'sample',
            sample,
            user_settings.settable(SampleHParams),
            positionals=('mode', 'mpi'),
            help=__doc__,
        )
    ],
)

if __name__ == '__main__':
    cli()
