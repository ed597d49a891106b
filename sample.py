#!/usr/bin/env python3
"""Print samples of a trained policy.

\b
For example:
  ./sample.py sample --save_dir /tmp/save/train_policy/first --nsamples 8
  ./sample.py sample --save_dir /tmp/save/train_policy/first \\
      --prompt 'the film was' --per_query 4
"""

from dataclasses import dataclass, field

from lm_human_preferences import shell

shell.require('click')

from lm_human_preferences.cli import launch
from lm_human_preferences.cli.program import Program
from lm_human_preferences.errors import about_option
from lm_human_preferences.hparams.command_options import RewardOfRunHParams
from lm_human_preferences.hparams.reward_options import CONSOLES, PRECISIONS
from lm_human_preferences.runs import run_settings
from lm_human_preferences.storage import outputs
from lm_human_preferences.utils.hyperparams import TEXTS, option, own_option


@dataclass
class SampleHParams(launch.RankHParams):
    save_dir: str = option(
        None,
        'run directory of the policy, path or URL: it holds train_policy_hparams.json',
        path=True,
    )
    savescope: str = option(
        'policy', 'variables to sample from: policy, or ref_policy for the initial model'
    )
    prompt: TEXTS = own_option(
        (), "a query of your own, may be given several times; default: the run's data set"
    )
    queries: str | None = own_option(
        None,
        'your own queries in a file, path or URL: a .jsonl with one JSON string a line, or a .csv',
        path=True,
    )
    per_query: int = own_option(1, 'responses to each query', at_least=1)
    temperature: float | None = option(None, "divides the logits; None: the task's own", at_least=0)
    seed: int | None = option(None, 'seed of all random numbers; None: a different one each time')
    batch_size: int = option(4, 'samples at a time', at_least=1)
    nsamples: int = option(
        0,
        'samples in all, for which queries of your own are repeated; 0: --per_query for each of'
        ' these, else until interrupted',
        at_least=0,
    )
    output: str | None = own_option(
        None,
        'new .jsonl file for the samples: text and tokens of query and response, score, KL',
        path=True,
    )
    rewards: RewardOfRunHParams = field(default_factory=RewardOfRunHParams)
    precision: str = option(
        'fp32', 'number format of matrix products: fp32, tf32 (GPUs) or bf16', one_of=PRECISIONS
    )
    console: str = own_option(
        'summary',
        'summary: print samples alone; original: the settings, too, as the original did',
        one_of=CONSOLES,
    )

    def validate(self) -> None:
        """Check also the run, and that the output can be written."""
        if self.save_dir is None:
            raise ValueError(
                f'{self.option_name("save_dir")} missing: the directory of a run of train_policy,'
                ' such as /tmp/save/train_policy/NAME'
            )
        super().validate()
        if self.output is not None:
            with about_option(self.option_name('output')):
                outputs.check_new_file(self.output)
        run_settings.load_run_hparams(self.save_dir)  # without waiting for torch


cli = Program(
    help=__doc__,
    commands=[
        launch.Job(launch.JobName.SAMPLE, SampleHParams).command(
            'sample', positionals=('mode', 'mpi'), help=__doc__
        )
    ],
)

if __name__ == '__main__':
    cli()
