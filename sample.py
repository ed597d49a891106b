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

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lm_human_preferences import shell

shell.require('click')

import launch as experiments
from lm_human_preferences.cli import launch, user_settings
from lm_human_preferences.cli.program import Command, Program
from lm_human_preferences.errors import about_option
from lm_human_preferences.hparams.command_options import BEST_OF, JUDGE, RewardOfRunHParams
from lm_human_preferences.hparams.reward_options import CONSOLES, PRECISIONS
from lm_human_preferences.hparams.task_options import TaskHParams
from lm_human_preferences.runs import run_settings
from lm_human_preferences.storage import outputs
from lm_human_preferences.utils.hyperparams import TEXTS, option, own_option


@dataclass
class SampleHParams(launch.RankHParams):
    save_dir: str | None = option(None, 'run directory of the policy, path or URL', path=True)
    savescope: str = option('policy', 'policy, or ref_policy for the initial model')
    model: str | None = own_option(
        None,
        'sample a model without a run: a directory, or a name as of --task.policy.initial_model',
        path=True,
    )
    prompt: TEXTS = own_option(
        (), "a query of your own, perhaps several times; default: the run's data set"
    )
    queries: str | None = own_option(
        None, 'queries of your own, path or URL of a .jsonl or .csv file', path=True
    )
    per_query: int = own_option(1, 'responses to each query', at_least=1)
    best_of: int = own_option(1, f'each response is {BEST_OF}', at_least=1)
    judge: str | None = own_option(None, f'score by another reward: {JUDGE}', path=True)
    temperature: float | None = option(None, "divides the logits; None: the task's own", at_least=0)
    seed: int | None = option(None, 'seed of all random numbers; None: a different one each time')
    batch_size: int = option(4, 'samples at a time', at_least=1)
    nsamples: int = option(
        0,
        'samples in all; 0: --per_query for each of your queries, else until interrupted',
        at_least=0,
    )
    output: str | None = own_option(
        None, 'new .jsonl file for the samples, with tokens, score and KL', path=True
    )
    rewards: RewardOfRunHParams = field(default_factory=RewardOfRunHParams)
    precision: str = option(
        'fp32', 'matrix products in fp32, tf32 (GPUs) or bf16', one_of=PRECISIONS
    )
    console: str = own_option(
        'summary', 'summary: samples alone; original: the settings, too', one_of=CONSOLES
    )
    task: TaskHParams | None = own_option(None, None)

    def validate(self) -> None:
        """Check also the model and the run, and that the output can be written."""
        is_run, is_model = self.save_dir is not None, self.model is not None
        if is_run == is_model or is_model != (self.task is not None):
            raise ValueError(
                'give --save_dir, the directory of a run of train_policy such as'
                ' /tmp/save/train_policy/NAME, or else --model, perhaps with options --task.NAME'
            )
        if self.task is not None and self.task.query_dataset is None:
            raise ValueError('--model: give --prompt, --queries or --task.query_dataset')
        super().validate()
        if self.output is not None:
            with about_option(self.option_name('output')):
                outputs.check_new_file(self.output)
        if self.save_dir is not None:
            run_settings.load_run_hparams(self.save_dir)  # without waiting for torch

    def problems(self) -> Iterator[tuple[object, str]]:
        """Check that there is something for the judge to do."""
        yield (
            self.judge and self.best_of == 1 and self.output is None,
            '{judge=} has nothing to do: give {best_of} N, or {output} FILE for the scores',
        )


def sample(settings: dict[str, Any]) -> None:
    """Start the job; a --model gets the task of `chat`, except for the user's `settings`."""
    if settings.get('model') is not None:
        chat = user_settings.bindings(experiments.reward_experiments, 'chat', 'sample')
        task = {name: value for name, value in chat.items() if name.startswith('task.')}
        if settings.keys() & {'prompt', 'queries'}:
            task['task.query_dataset'] = 'test'  # required, but not read
        settings = {**task, **settings, 'task.policy.initial_model': settings['model']}
    launch.Job(launch.JobName.SAMPLE, SampleHParams).start(settings)


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
