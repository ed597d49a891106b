#!/usr/bin/env python3
"""Print samples of a trained policy.

\b
For example:
  ./sample.py sample --save_dir /tmp/save/train_policy/first --nsamples 8
"""
from dataclasses import dataclass
from typing import Optional

from lm_human_preferences.hparams.train_reward import PRECISIONS
from lm_human_preferences.utils import launch
from lm_human_preferences.utils.hyperparams import option


@dataclass
class SampleHParams(launch.RankHParams):
    save_dir: str = option(None, 'run directory of the policy, path or URL: it holds train_policy_hparams.json')
    savescope: str = option('policy', 'variables to sample from: policy, or ref_policy for the initial model')
    temperature: Optional[float] = option(None, "divides the logits; None: the task's own", at_least=0)
    seed: Optional[int] = option(None, 'seed of all random numbers; None: another one every time')
    batch_size: int = option(4, 'samples at a time', at_least=1)
    nsamples: int = option(0, 'samples in all; 0: until interrupted', at_least=0)
    precision: str = option('fp32', 'type of products: fp32, tf32 (GPUs) or bf16', one_of=PRECISIONS)


cli = launch.Program(help=__doc__, commands=[
    launch.job_command('sample', 'lm_human_preferences.sample_policy:sample_policy', SampleHParams,
                       positionals=('mode', 'mpi'), help=__doc__)])

if __name__ == '__main__':
    cli()
