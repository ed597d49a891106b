#!/usr/bin/env python3
"""What a GPU computes otherwise when it does the same again.

    pipenv run python benchmarks/repeats.py operators [--size 124M] [--batch 64]
    pipenv run python benchmarks/repeats.py resume [--precision bf16]

The first command names the operators of an update that PyTorch knows as nondeterministic here, and
says how far the weights are apart after the same update twice, also where epochs take
deterministic algorithms, and how long these take. The second kills a training,
resumes it, and compares its weights with those of one that was not killed.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import measuring
import numpy as np
import ppo_update
import torch
import workload

from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.checkpointing.tf_bundle import Bundle
from lm_human_preferences.distributed import comm
from lm_human_preferences.language import model, trained_models
from lm_human_preferences.machine import precision
from lm_human_preferences.machine.hardware import default_device

REPOSITORY = Path(__file__).resolve().parents[1]
STEPS = 8


def weights_after_an_update(args, clock=None):
    """The weights of a policy after an update from the same start, as one vector.

    clock: times the epochs.
    """
    queries = workload.queries(args.batch)
    run = ppo_update.Ours(args.size, ppo_update.hparams_of(args.batch), queries, comm.init_comm())
    torch.manual_seed(1)
    np.random.seed(1)
    clock = clock or measuring.Clock()
    run.trainer.train = clock.timed('epochs', run.trainer.train)
    run.update()
    own = run.trainer.policy.parameters_by_name().values()
    return torch.cat([each.detach().flatten().cpu() for each in own])


def operators(args):
    """Print the nondeterministic operators of an update, and whether it can be repeated."""
    measuring.set_up(args.precision, args.size)
    library, device = workload.library_for(args.size), default_device()
    precision.configure(args.precision, device, library, deterministic=False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter('always')
        weights_after_an_update(args)
    torch.use_deterministic_algorithms(False)
    named = {str(each.message).split(' does not have')[0] for each in found}
    print('nondeterministic:', ', '.join(sorted(named)) or 'none')
    for deterministic in (False, True):
        precision.configure(args.precision, device, library, deterministic=deterministic)
        found = []
        for _ in range(2):
            clock = measuring.Clock()
            found.append(weights_after_an_update(args, clock))
        print(
            f'weights of two {"deterministic " * deterministic}updates differ by at most'
            f' {(found[0] - found[1]).abs().max():.1e}, epochs took {clock.seconds["epochs"]:.3g} s'
        )


def write_model(directory):
    """Write a random model of letters whose heads flash attention takes."""
    sizes = model.HParams(n_vocab=27, n_ctx=8, n_embd=16, n_head=2, n_layer=2)
    network = model.Model(sizes).initialize()
    variables = network.variable_names.variables(dict(network.named_parameters()))
    checkpoints.save(f'{directory}/checkpoints', 'model.ckpt', variables)
    trained_models.GPT2(sizes).write_files(directory)
    trained_models.TrainedModel('test').encoding.write_files(directory)


def training(directory, start, precision):
    """The command of a short training of the model `start`, with a checkpoint after each step."""
    words = (
        'launch.py train_policy test run --rewards.train_new_model off --rewards.trained_model test'
        f' --run.precision {precision}'
        f' --ppo.total_episodes {64 * STEPS} --run.save_interval 1 --run.seed 1 --mpi 1'
    )
    paths = ['--task.policy.initial_model', start, '--save_dir', directory]
    return [sys.executable, *words.split(), *paths]


def final_weights(directory):
    """The policy's weights in the last checkpoint of a run, as one vector."""
    prefix = checkpoints.latest(f'{directory}/run/policy/checkpoints')
    assert prefix is not None
    bundle = Bundle(prefix)
    return np.concatenate([np.ravel(bundle[each]) for each in bundle if 'policy/' in each])


def resume(args):
    """Print whether a run that was killed ends as one that was not."""
    with tempfile.TemporaryDirectory() as folder:
        start, whole, killed = f'{folder}/start', f'{folder}/whole', f'{folder}/killed'
        write_model(start)
        command = training(whole, start, args.precision)
        subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
        command = training(killed, start, args.precision)
        with subprocess.Popen(
            command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, start_new_session=True
        ) as process:
            while len(list(Path(killed).rglob('*.index'))) < STEPS // 4 and process.poll() is None:
                time.sleep(0.02)
            was_running = process.poll() is None
            if was_running:
                os.killpg(process.pid, signal.SIGKILL)
        subprocess.run(
            [sys.executable, 'launch.py', 'resume', f'{killed}/run'],
            cwd=REPOSITORY,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        difference = np.abs(final_weights(whole) - final_weights(killed)).max()
    when = 'killed and resumed' if was_running else 'not killed, as it had ended'
    print(f'{when}: weights differ by at most {difference:.1e}')


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('what', choices=('operators', 'resume'))
    parser.add_argument('--size', choices=workload.SIZES, default='124M')
    parser.add_argument('--batch', type=int, default=64)
    parser.add_argument('--precision', choices=measuring.PRECISIONS, default='fp32')
    args = parser.parse_args()
    {'operators': operators, 'resume': resume}[args.what](args)


if __name__ == '__main__':
    main()
