#!/usr/bin/env python3
"""The peak memory of one training step, compared with the estimate made before it begins.

An estimate is within a quarter of what is taken.

    pipenv run python benchmarks/memory.py [--model gpt2] [--size 124M] [--threads 2]
    pipenv run python benchmarks/memory.py ppo --batch 512 --micro-batch-size 16
        [--checkpointing] [--bf16]

The first command prints a table of several kinds of steps, each in a process of its own; the second
measures one of them, twice. The PPO step here has one epoch instead of four, and Adam's moments are
there from the beginning. GB are those of the GPU or, if there is none, of the whole process, whose
libraries are measured before. The time of both steps is printed as well.
"""

import argparse
import contextlib
import functools
import io
import subprocess
import sys
import time

import measuring
import numpy as np
import ppo_update
import reward_step
import torch
import workload

from lm_human_preferences.distributed import comm
from lm_human_preferences.machine import precision
from lm_human_preferences.machine.hardware import default_device
from lm_human_preferences.plan.phases import policy_phase, reward_phase
from lm_human_preferences.policy import Policy
from lm_human_preferences.rewards import RewardModel

STEPS = [
    'ppo --batch 16',
    'ppo --batch 16 --checkpointing',
    'ppo --batch 16 --bf16',
    'ppo --batch 64 --micro-batch-size 8',
    'ppo --batch 64 --micro-batch-size 8 --checkpointing',
    'reward --batch 8',
    'reward --batch 8 --checkpointing',
    'reward --batch 8 --bf16',
    'reward --batch 32 --micro-batch-size 4',
]


def model_of(args):
    """The model that is measured, of random weights."""
    return workload.random_model(args.size, args.model)


def ppo(args, common):
    """(bytes expected, function that builds a trainer and returns it with its step)."""
    hparams = ppo_update.hparams_of(args.batch)
    hparams.override_from_dict(
        {**common, 'ppo.noptepochs': 1, 'ppo.micro_batch_size': args.micro_batch_size}
    )

    def build():
        model = functools.partial(workload.random_model, model=args.model)
        queries = workload.queries(args.batch)
        run = ppo_update.Ours(args.size, hparams, queries, comm.init_comm(), model)
        run.trainer.policy.model.gradient_checkpointing = args.checkpointing
        return run.trainer, run.update

    return policy_phase(hparams).memory(model_of(args).sizes(), 1, default_device()), build


def reward(args, common):
    """As `ppo`, for a reward model's step on labels, without sampling."""
    hparams = reward_step.hparams_of(args.batch)
    hparams.override_from_dict(
        {
            **common,
            'task.query_length': workload.QUERY_LENGTH,
            'task.response_length': workload.RESPONSE_LENGTH,
            'rollout_batch_size': 1,
            'micro_batch_size': args.micro_batch_size,
        }
    )

    def build():
        reward_model = RewardModel(model_of(args))
        reward_model.model.gradient_checkpointing = args.checkpointing
        trainer = reward_step.trainer_of(
            hparams, reward_model, reward_step.labels(args.batch), Policy(model_of(args))
        )
        return trainer, lambda: trainer.train_batch(np.arange(args.batch), lr=5e-5)

    return reward_phase(hparams).memory(model_of(args).sizes(), 1, default_device()), build


def measure(args):
    """Print a line about one step."""
    torch.set_num_threads(args.threads)
    common = {
        'run.precision': 'bf16' if args.bf16 else 'fp32',
        'run.gradient_checkpointing': args.checkpointing,
    }
    estimate, build = {'ppo': ppo, 'reward': reward}[args.step](args, common)
    library = workload.library_for(args.size)
    device = default_device()
    precision.configure(common['run.precision'], device, library)
    libraries = 0 if device.type == 'cuda' else measuring.memory_taken()
    trainer, step = build()
    trainer.optimizer.start_at(1)
    started, processor = measuring.now(), time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        for _ in range(2):  # the second finds the holes that the first has left
            step()
    seconds, processor = measuring.now() - started, time.process_time() - processor
    found = measuring.memory_taken() / 1e9
    expected = (libraries + estimate) / 1e9
    print(
        f'{expected:9.2f} {found:9.2f} {expected / found - 1:+9.0%} {seconds:9.1f}'
        f' {processor:9.1f}',
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('step', nargs='?', choices=('ppo', 'reward'))
    parser.add_argument('--model', choices=workload.MODELS, default='gpt2')
    parser.add_argument('--size', choices=workload.SIZES, default='124M')
    parser.add_argument('--threads', type=int, default=2)
    parser.add_argument('--batch', type=int, default=16)
    parser.add_argument('--micro-batch-size', type=int)
    parser.add_argument('--checkpointing', action='store_true')
    parser.add_argument('--bf16', action='store_true')
    args = parser.parse_args()
    if args.step:
        return measure(args)
    print(f'{args.size:52} {"expected":>9} {"GB":>9} {"off by":>9} {"s":>9} {"cpu s":>9}')
    for step in STEPS:
        print(f'{step:52}', end=' ', flush=True)
        subprocess.run(
            [
                sys.executable,
                __file__,
                *step.split(),
                '--model',
                args.model,
                '--size',
                args.size,
                '--threads',
                str(args.threads),
            ],
            check=True,
        )


if __name__ == '__main__':
    main()
