"""evening.py FOLDER MODEL QUERIES: from a simulated person's answers to a better model.

Asks, answers, trains a policy against a head on frozen hidden states and judges it by what the
person really likes, on requests that were not asked about, by the commands of docs/real-run.md.
"""

import argparse
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
VADER = f'{ROOT}/benchmarks/real/vader_reward.py:score'


def run(*words: str) -> None:
    """Run a command of launch.py."""
    subprocess.run([sys.executable, ROOT / 'launch.py', *words], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('folder')
    parser.add_argument('model')
    parser.add_argument('queries')
    parser.add_argument('--answers', default='40')
    parser.add_argument('--person', default=VADER, help='FILE.py:FUNCTION, the hidden reward')
    parser.add_argument('--error', default='0.1', help='share of random answers')
    parser.add_argument('--seed', default='1')
    parser.add_argument('--target', default='3.5', help='KL')
    parser.add_argument('--episodes', default='1920')
    parser.add_argument('--samples', default='16', help='of each model to each request')
    args = parser.parse_args()
    folder, labels = pathlib.Path(args.folder).absolute(), f'{args.folder}/labels'
    seed = args.seed
    task = ['--task.policy.initial_model', args.model, '--task.query_dataset', args.queries]
    run('ask', 'chat', labels, *task, '--count', args.answers, '--seed', seed)
    person = ['--simulate', 'on', '--simulate.reward', args.person, '--simulate.error', args.error]
    run('label', labels, '--labeller', 'simulated', *person, '--simulate.seed', seed)
    new_model = {
        'features': 'frozen',
        'labels.source': labels,
        'labels.type': 'best_of_4',
        'labels.num_train': 'None',
        'run.seed': seed,
    }
    words = []
    for name, value in new_model.items():
        words += [f'--rewards.train_new_model.{name}', value]
    words += ['--rewards.kl_coef', '0.2', '--rewards.adaptive_kl.target', args.target]
    words += ['--rewards.adaptive_kl.horizon', '200']
    words += ['--ppo.total_episodes', args.episodes, '--run.seed', seed]
    run('train_policy', 'chat', 'policy', '--save_dir', str(folder), *task, *words)
    judged = ['--judge', args.person, '--samples', args.samples]
    run('evaluate', f'{folder}/policy', *judged, '--output_dir', str(folder))


if __name__ == '__main__':
    main()
