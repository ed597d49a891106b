#!/usr/bin/env python3
"""Seconds that a person waits: for help, error messages, and the first step of a training.

    pipenv run python benchmarks/startup.py [--size 124M] [--batch 8] [--repeats 3] [--threads 2]

The model of the training is in the cache. Printed are seconds, and processor seconds, which a busy
machine disturbs less, from the start of a command to its end or to the first step's line. Beside
them is what cannot be avoided, or what others do: to import torch, to import transformers' GPT-2 as
well, to read the bytes of the model. Then the processor seconds of each phase of a training.
Weights, labels and byte pairs are made up in a temporary LMHP_CACHE; nothing is downloaded.
"""

import argparse
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Nothing heavy is imported here: a child that reports phases times its own imports.
sys.path.insert(0, str(ROOT))

LABELS, FULL_STOP = 1000, 13
# {command: the beginning of the line that its first step prints}
TRAININGS = {'train_policy': '[ppo_step 0]', 'train_reward': 'k =  loss '}


def write_encoding(folder):
    """A byte pair encoding of GPT-2's size: nearly every pair of bytes is a token."""
    from lm_human_preferences.language import encodings

    names = [*encodings._byte_of()]
    pairs = [(a, b) for a in names for b in names][: encodings.Main.n_vocab - len(names) - 1]
    tokens = [*names, *(a + b for a, b in pairs), encodings.END_OF_TEXT]
    (folder / 'encoder.json').write_text(
        json.dumps({name: i for i, name in enumerate(tokens)}), encoding='utf-8'
    )
    lines = ['#version: 0.2', *(' '.join(pair) for pair in pairs), '']
    (folder / 'vocab.bpe').write_text('\n'.join(lines), encoding='utf-8')


def write_model(folder, size, is_reward_model=False):
    """A model of random weights as it was released, or as train_reward saves one."""
    import workload

    from lm_human_preferences import rewards, storage
    from lm_human_preferences.checkpointing import checkpoints
    from lm_human_preferences.language.model import Model

    model = workload.RandomModel(size)
    if is_reward_model:
        parameters = rewards.RewardModel(model).parameters_by_name()
        tensors = {f'{rewards.SCOPE}/{name}': value for name, value in parameters.items()}
    else:
        tensors = dict(model.build(scope='model').named_parameters())
    variables = Model.variable_names.variables(tensors)
    storage.write_json(str(folder / 'hparams.json'), model.sizes().to_nested_dict())
    checkpoints.save(str(folder), 'model.ckpt', variables)


def write_labels(path):
    """Write labels with 64-token queries that end with a full stop: enough for the first step."""
    import numpy as np

    rng = np.random.default_rng(0)
    path.write_text(
        json.dumps(
            [
                {
                    'query': [*rng.integers(50257, size=63).tolist(), FULL_STOP],
                    'best': int(rng.integers(4)),
                    **{f'sample{i}': rng.integers(50257, size=24).tolist() for i in range(4)},
                }
                for _ in range(LABELS)
            ]
        )
    )


def prepare(folder, size):
    """Fill `folder` with a cache, a reward model and labels."""
    for name, write in {
        'cache/openaipublic/gpt-2/encodings/main': write_encoding,
        'cache/openaipublic/gpt-2/models/124M': lambda path: write_model(path, size),
        'reward': lambda path: write_model(path, size, is_reward_model=True),
    }.items():
        (folder / name).mkdir(parents=True)
        write(folder / name)
    write_labels(folder / 'labels.json')


def training(command, folder, batch, name='first'):
    """The words of a command that trains as run `name`, with sizes for a quick first step."""
    words = [
        command,
        'descriptiveness',
        name,
        '--mpi',
        '1',
        '--save_dir',
        f'{folder}/save',
        '--overwrite',
        '--run.console',
        'original',
    ]
    if command == 'train_reward':
        return [
            *words,
            '--labels.source',
            f'{folder}/labels.json',
            '--labels.num_train',
            f'{LABELS // batch * batch}',
            '--batch_size',
            f'{batch}',
            '--rollout_batch_size',
            f'{batch}',
            '--normalize_samples',
            f'{batch}',
        ]
    (folder / 'train_reward_hparams.json').write_text(
        json.dumps({'labels': {'source': f'{folder}/labels.json'}})
    )
    return [
        *words,
        '--ppo.batch_size',
        f'{batch}',
        '--ppo.total_episodes',
        f'{100 * batch}',
        '--rewards.train_new_model',
        'off',
        '--rewards.trained_model',
        f'{folder}/reward',
    ]


def run(words, variables, until=None):
    """(seconds, processor seconds) that `python WORDS` takes.

    until: the beginning of the line to wait for; None: until the command ends.
    """
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    if until is None:
        process.stdout.read()
    elif not any(line.startswith(until) for line in process.stdout):
        sys.exit(f'{" ".join(words)} ended before its first step')
    seconds = time.perf_counter() - started
    # A process counts only once it has been waited for.
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process.kill()
    process.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, sum(after[:2]) - sum(before[:2])


class Phases:
    """Processor seconds by phase; what is called within another phase counts as that one's."""

    def __init__(self):
        self.seconds, self.is_running = {}, False

    def timed(self, phase, function, is_last=False):
        """`function`, whose time counts as that of `phase`.

        is_last: when it returns, print the phases and end the process.
        """

        def wrapped(*args, **kwargs):
            if self.is_running:
                return function(*args, **kwargs)
            self.is_running, started = True, time.process_time()
            result = function(*args, **kwargs)
            self.seconds[phase] = self.seconds.get(phase, 0) + time.process_time() - started
            self.is_running = False
            if is_last:
                self.seconds['rest'] = time.process_time() - sum(self.seconds.values())
                print(json.dumps(self.seconds), flush=True)
                os._exit(0)  # before anything is saved
            return result

        return wrapped


def tell_phases(words):
    """Print the processor seconds of each phase of `launch.py WORDS` as JSON.

    The command ends after its first step.
    """
    phases = Phases()
    phases.timed('imports', importlib.import_module)(f'lm_human_preferences.{words[0]}')
    import launch
    from lm_human_preferences import lm_tasks, rewards, train_policy, train_reward
    from lm_human_preferences.labels import training_data
    from lm_human_preferences.language import encodings, trained_models

    ppo, reward = train_policy.PPOTrainer, train_reward.RewardModelTrainer
    for place, name, phase in (
        (encodings.Encoding, 'get_encoder', 'encoder'),
        (trained_models.TrainedModel, 'build', 'networks'),
        (rewards.TrainedRewardModel, '__init__', 'networks'),
        (training_data, 'load_labels', 'labels'),
        (lm_tasks.QuerySampler, '__call__', 'queries'),
        (reward, 'sampled_mean_std', 'normalising'),
        (ppo, 'generate', 'step'),
        (ppo, 'train', 'step'),
        (reward, 'train_batch', 'step'),
    ):
        function = getattr(place, name)
        is_last = name in ('train', 'train_batch')
        setattr(place, name, phases.timed(phase, function, is_last=is_last))
    launch.cli(words)


def commands(folder, batch, skipped):
    """{what is measured: (words after `python`, start of the line to wait for)}.

    skipped: words; what has one of them in its name is left out.
    """
    launch, data = str(ROOT / 'launch.py'), next(map(str, folder.glob('cache/**/*.data*')))
    found = {
        'import torch': ['-c', 'import torch'],
        'and GPT-2 of transformers': [
            '-c',
            'import torch, transformers; transformers.GPT2LMHeadModel',
        ],
        'and the bytes of the model': [
            '-c',
            'import sys, torch, transformers; transformers.GPT2LMHeadModel; '
            'open(sys.argv[1], "rb").read()',
            data,
        ],
        'launch.py --help': [launch, '--help'],
        'train_policy --help': [launch, 'train_policy', '--help'],
        'train_reward --help': [launch, 'train_reward', '--help'],
        'sample.py sample --help': [str(ROOT / 'sample.py'), 'sample', '--help'],
        'an unknown option': [launch, 'train_policy', 'test', 'first', '--ppo.bach_size', '8'],
        'a wrong value': [launch, 'train_policy', 'test', 'first', '--ppo.batch_size', 'many'],
    }
    to_the_end = {name: (words, None) for name, words in found.items()}
    to_the_first_step = {
        f'{name}, first step': ([launch, *training(name, folder, batch)], until)
        for name, until in TRAININGS.items()
    }
    return {
        name: command
        for name, command in {**to_the_end, **to_the_first_step}.items()
        if not any(word in name for word in skipped)
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--size', choices=['test', '124M', '355M', '774M'], default='124M')
    parser.add_argument('--batch', type=int, default=8)
    parser.add_argument('--repeats', type=int, default=3)
    parser.add_argument('--threads', type=int, default=2)
    parser.add_argument(
        '--skip', default='', metavar='WORD,...', help='leave out lines that name one of these'
    )
    parser.add_argument('--phases', nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.phases:
        return tell_phases(args.phases)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, args.size)
        variables = {
            **os.environ,
            'LMHP_CACHE': f'{folder}/cache',
            'LMHP_OFFLINE': '1',
            'OMP_NUM_THREADS': str(args.threads),
        }
        variables.pop('LMHP_GPT2_ENCODINGS', None)
        skipped = args.skip.split(',') if args.skip else []
        print(
            f'{args.size}, batch {args.batch}, {args.threads} threads   seconds  processor seconds'
        )
        for what, (words, until) in commands(folder, args.batch, skipped).items():
            seconds, used = map(
                statistics.median, zip(*(run(words, variables, until) for _ in range(args.repeats)))
            )
            print(f'{what:36} {seconds:7.2f}  {used:7.2f}', flush=True)
        for command in TRAININGS:
            if any(word in command for word in skipped):
                continue
            words = training(command, folder, args.batch, name=f'{command}-phases')
            output = subprocess.run(
                [sys.executable, __file__, '--phases', *words],
                env=variables,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            ).stdout
            phases = json.loads(output.splitlines()[-1])
            print(
                f'{command}: '
                + ', '.join(f'{phase} {seconds:.2f}' for phase, seconds in phases.items()),
                flush=True,
            )


if __name__ == '__main__':
    main()
