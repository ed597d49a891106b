#!/usr/bin/env python3
"""A PPO update, a reward step and their memory with adapters (LoRA) beside full training.

    pipenv run python benchmarks/adapters.py [--model gpt2] [--size 124M] [--batch 16] [--bf16]
    pipenv run python benchmarks/adapters.py memory --model llama --size 1.2B [--bf16]

The first command alternates between both in one process, so that the machine is the same for them.
The second takes one step of PPO with adapters, with one epoch and gradient checkpointing, and
prints what the process takes beside what a training would have announced.
"""

import argparse

import measuring
import numpy as np
import ppo_update
import reward_step
import torch
import workload

from lm_human_preferences.distributed import comm
from lm_human_preferences.hparams.task_options import LoraHParams
from lm_human_preferences.language.adapters.shared import SharedBase
from lm_human_preferences.language.networks.network import HEADS
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.machine import precision
from lm_human_preferences.machine.hardware import default_device
from lm_human_preferences.plan.phases import policy_phase
from lm_human_preferences.rewards import RewardModel

workload.SIZES['1.2B'] = (2048, 32, 26)
workload.SIZES['7B'] = (4096, 32, 32)
workload.KEY_VALUE_HEADS[32] = 8


class AdaptedRandomModel(SharedBase):
    """Random weights as the base of networks with adapters of rank 8."""

    def __init__(self, model: workload.RandomModel) -> None:
        TrainedModel.__init__(self, 'test')
        self.own_sizes = model.sizes()
        self.adapters = {scope: LoraHParams() for scope in ('policy', 'reward_model')}
        self._base = model.build(scope='base', scalar_heads=['value', 'reward'])
        self._base.requires_grad_(False)
        named = dict(self._base.named_parameters())
        self.parameters = {name: named[name] for name in named if HEADS not in name}
        self._missing = [name for name in named if HEADS in name]
        self.encoding = workload.ENCODING

    def sizes(self):
        return self.own_sizes


def model_of(args, *, adapted: bool):
    """Return what the networks of a training begin with."""
    model = workload.random_model(args.size, args.model)
    if not adapted:
        return model
    shared = AdaptedRandomModel(model)
    if args.bf16:
        shared.reduce()
    return shared


def speed(args):
    """Print seconds of the parts of an update, and of a reward step, for both."""
    hparams = ppo_update.hparams_of(args.batch)
    queries = workload.queries(args.batch)
    parts = {}
    for name, adapted in (('full', False), ('adapters', True)):
        model = model_of(args, adapted=adapted)
        run = ppo_update.Ours(args.size, hparams, queries, comm.init_comm(), lambda _, m=model: m)
        trainer = run.trainer
        step = reward_step.trainer_of(
            reward_step.hparams_of(8), RewardModel(model), reward_step.labels(8)
        )
        parts[name] = {
            'sampling': lambda t=trainer: t.policy.respond(queries, workload.RESPONSE_LENGTH),
            'epoch': lambda t=trainer: t.train_minibatch(t.rollout),
            'reward step': lambda s=step: s.train_batch(np.arange(8), lr=5e-5),
            'update': run.update,
        }
        run.update()
        step.train_batch(np.arange(8), lr=5e-5)
    print(f'{args.model} {args.size}, {"bf16" if args.bf16 else "fp32"}, {args.batch} episodes')
    for part in parts['full']:
        seconds = {name: [] for name in parts}
        for _ in range(args.repeats):
            for name, functions in parts.items():
                started = measuring.now()
                functions[part]()
                seconds[name].append(measuring.now() - started)
        full, adapters = (min(seconds[name]) for name in ('full', 'adapters'))
        print(f'{part:12} full {full:6.2f} s  adapters {adapters:6.2f} s  {adapters / full:.2f}')


def memory(args):
    """Print what a process takes for one step of PPO with adapters."""
    hparams = ppo_update.hparams_of(args.batch)
    settings = {'ppo.noptepochs': 1, 'run.gradient_checkpointing': True}
    hparams.override_from_dict(settings)
    hparams.run.precision = 'bf16' if args.bf16 else 'fp32'
    before = measuring.memory_taken()
    model = model_of(args, adapted=True)
    queries = workload.queries(args.batch)
    run = ppo_update.Ours(args.size, hparams, queries, comm.init_comm(), lambda _: model)
    run.trainer.policy.model.gradient_checkpointing = True
    started = measuring.now()
    run.update()
    seconds = measuring.now() - started
    peak = measuring.memory_taken()
    own = run.trainer.policy.model.own_parameters()
    sizes = model.sizes()
    sizes.learned = sum(each.numel() for name, each in own.items() if HEADS not in name)
    estimate = policy_phase(hparams).memory(sizes, 1, default_device()) / 1e9
    print(f'{sizes.parameters() / 1e9:.2f} billion parameters, {hparams.run.precision}:')
    print(f'process {peak / 1e9:.2f} GB, {before / 1e9:.2f} before; {estimate=:.2f}')
    print(f'{sizes.learned / 1e6:.1f}M learn; the step took {seconds:.0f} s')


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('what', nargs='?', choices=['speed', 'memory'], default='speed')
    parser.add_argument('--model', choices=workload.MODELS, default='gpt2')
    parser.add_argument('--size', choices=workload.SIZES, default='124M')
    parser.add_argument('--batch', type=int, default=16)
    parser.add_argument('--repeats', type=int, default=2)
    parser.add_argument('--threads', type=int, default=2)
    parser.add_argument('--bf16', action='store_true')
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    kind = 'bf16' if args.bf16 else 'fp32'
    precision.configure(kind, default_device(), workload.library_for(args.size))
    {'speed': speed, 'memory': memory}[args.what](args)


if __name__ == '__main__':
    main()
