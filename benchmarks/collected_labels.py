"""Policies from labels that `ask` and `label` have collected, beside those from made-up ones.

All come about by the commands alone, in mock_sentiment, whose reward is known.

Four policies for each seed, whose simulated labellers err with the same probability:

    mock        1024 labels of --labels.source mock
    folder      1024 labels of a folder
    half        512 labels of a folder
    two batches these 512, and 512 that were asked of the policy `half`, all in one training

Each is compared with the best policy possible at its own KL by the known reward.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

LAUNCH = Path(__file__).parents[1] / 'launch.py'
NEW = '--rewards.train_new_model'


def run(*words):
    """Run ./launch.py with `words` on one thread; RuntimeError, with what it printed, if it
    fails."""
    done = subprocess.run(
        [sys.executable, str(LAUNCH), *map(str, words)],
        capture_output=True,
        text=True,
        env={**os.environ, 'OMP_NUM_THREADS': '1', 'MKL_NUM_THREADS': '1'},
    )
    if done.returncode != 0:
        raise RuntimeError(f'{words}: {done.stdout[-2000:]}{done.stderr[-2000:]}')


def collect(folder, count, seed, error, *words):
    """Add `count` questions to `folder`, and have the simulated labeller answer them."""
    run('ask', 'mock_sentiment', folder, '--count', count, '--seed', seed, *words)
    run(
        *('label', folder, '--labeller', 'robot'),
        *('--simulate.error', error, '--simulate.seed', seed),
    )


def train(save_dir, name, seed, episodes, kl_target, *labels):
    """Train a policy, and return its KL and its share of the gain that is possible there."""
    run(
        *('train_policy', 'mock_sentiment', name, '--mpi', 1, '--save_dir', save_dir),
        *('--run.seed', seed, f'{NEW}.run.seed', seed),
        *('--ppo.total_episodes', episodes, '--rewards.adaptive_kl.target', kl_target),
        *labels,
    )
    results = json.loads((Path(save_dir) / name / 'evaluation.json').read_text())
    policy = results['rewards']['known reward']['policy']
    return {'kl': policy['kl'], 'share': policy['share']}


def of_seed(directory, seed, settings):
    """The four policies of one seed: {name: {'kl': ..., 'share': ...}}."""
    directory = Path(directory) / str(seed)
    save_dir = directory / 'runs'
    options = (seed, settings.episodes, settings.kl_target)
    count, error = settings.labels, settings.error
    made_up = (f'{NEW}.labels.num_train', count, f'{NEW}.labels.error', error)
    found = {'mock': train(save_dir, 'mock', *options, *made_up)}
    collect(directory / 'folder', count, seed, error)
    found['folder'] = train(save_dir, 'folder', *options, *source(directory / 'folder'))
    both = directory / 'both'
    collect(both, count // 2, seed, error)
    found['half'] = train(save_dir, 'half', *options, *source(both))
    collect(both, count // 2, seed, error, '--policy', save_dir / 'half')
    found['two batches'] = train(save_dir, 'two', *options, *source(both))
    return found


def source(folder):
    """The options that have a reward model learn from all labels of `folder`."""
    return f'{NEW}.labels.source', folder, f'{NEW}.labels.num_train', 'None'


def main():
    """Print a line for each seed, then mean and standard deviation of each policy."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--seeds', type=int, default=5)
    parser.add_argument('--first-seed', type=int, default=1)
    parser.add_argument('--labels', type=int, default=1024)
    parser.add_argument('--error', type=float, default=0.3)
    parser.add_argument('--episodes', type=int, default=200 * 256)
    parser.add_argument('--kl-target', type=float, default=2.0)
    settings = parser.parse_args()
    everything = []
    with tempfile.TemporaryDirectory() as directory:
        for seed in range(settings.first_seed, settings.first_seed + settings.seeds):
            everything.append(of_seed(directory, seed, settings))
            print(json.dumps({'seed': seed, **everything[-1]}), flush=True)
    for name in everything[0]:
        for value in ('kl', 'share'):
            numbers = [found[name][value] for found in everything]
            spread = statistics.stdev(numbers) if len(numbers) > 1 else float('nan')
            print(f'{name:12} {value:6} {statistics.mean(numbers):.3f} +- {spread:.3f}')


if __name__ == '__main__':
    main()
