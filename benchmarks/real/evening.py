"""evening.py FOLDER MODEL QUERIES: from a simulated person's answers to a better model.

Asks, answers, fits a head on frozen hidden states, trains a policy against it, and judges both and
the best of n of both by what the person really likes, on requests that were not asked about: by
the commands of docs/real-run.md.
"""

import argparse
import json
import math
import pathlib
import subprocess
import sys

import numpy as np

ROOT = pathlib.Path(__file__).parents[2]
VADER = f'{ROOT}/benchmarks/real/vader_reward.py:score'
PENALTY = -1  # score of an answer that does not end
# Points of an evaluation by their names in the table
POINTS = {
    'base': 'initial model',
    'best_of_4_by_reward_model': 'best of 4 of it',
    'best_of_16_by_reward_model': 'best of 16 of it',
    'policy': 'policy',
}


def run(script: str, *words: str) -> str:
    """Run a command of launch.py or sample.py; return what it prints, which is shown, too."""
    command = [sys.executable, ROOT / script, *words]
    printed = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            print(line, end='', flush=True)
            printed.append(line)
    if process.returncode:
        sys.exit(process.returncode)
    return ''.join(printed)


def best_of_policy(save_dir: str, person: str, requests: str, output: pathlib.Path) -> list[float]:
    """Return KL and the person's reward of the best of 4 answers of a policy by its head."""
    choice = ['--best_of', '4', '--nsamples', requests, '--seed', '1', '--output', str(output)]
    run('sample.py', 'sample', '--save_dir', save_dir, *choice)
    samples = [json.loads(line) for line in output.read_text().splitlines()]
    scores = run('launch.py', 'score', person, str(output)).splitlines()
    rewards = []
    for sample, score in zip(samples, scores, strict=True):
        has_end = sample['score'] != PENALTY
        rewards.append(json.loads(score)['score'] if has_end else PENALTY)
    # KL from the initial model: of the choice from the policy, and of what is chosen.
    kls = [sample['choice_kl'] + sample['kl'] for sample in samples]
    return [sum(kls) / len(kls), sum(rewards) / len(rewards)]


def share_of_gain(kl: float, reward: float, points: dict) -> float:
    """Return the share of the gain that is possible at a KL; NaN where that is not known."""
    frontier, base = points['frontier'], points['base']['reward']
    if kl > max(frontier['kl']):
        return math.nan
    possible = np.interp(kl, frontier['kl'], frontier['reward'])
    return (reward - base) / (possible - base)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('folder')
    parser.add_argument('model')
    parser.add_argument('queries')
    parser.add_argument('--answers', default='40')
    parser.add_argument('--person', default=VADER, help='FILE.py:FUNCTION, the hidden reward')
    parser.add_argument('--error', default='0.1', help='fraction of random answers')
    parser.add_argument('--seed', default='1')
    parser.add_argument('--target', default='3.5', help='KL')
    parser.add_argument('--episodes', default='1920')
    parser.add_argument('--precision', default='fp32', help='of the training of the policy')
    parser.add_argument('--samples', default='64', help='of each model to each request')
    parser.add_argument('--requests', default='64', help='to which the best of 4 is sampled')
    args = parser.parse_args()
    folder, labels = pathlib.Path(args.folder).absolute(), f'{args.folder}/labels'
    head, policy = f'{folder}/head', f'{folder}/policy'
    seed = args.seed
    task = ['--task.policy.initial_model', args.model, '--task.query_dataset', args.queries]
    run('launch.py', 'ask', 'chat', labels, *task, '--count', args.answers, '--seed', seed)
    person = ['--simulate', 'on', '--simulate.reward', args.person, '--simulate.error', args.error]
    person += ['--simulate.seed', seed]
    run('launch.py', 'label', labels, '--labeller', 'simulated', *person)
    words = ['--features', 'frozen', '--labels.source', labels, '--labels.type', 'best_of_4']
    words += ['--labels.num_train', 'None', '--run.seed', seed, '--save_dir', str(folder)]
    run('launch.py', 'train_reward', 'chat', 'head', *task, *words)
    dataset = ['--task.query_dataset', args.queries, '--nsamples', '4']
    choice = ['--judge', head, '--best_of', '16']
    run('sample.py', 'sample', '--model', args.model, *dataset, *choice)
    words = ['--rewards.trained_model', head, '--save_dir', str(folder), '--run.seed', seed]
    words += ['--rewards.kl_coef', '0.25', '--rewards.adaptive_kl.target', args.target]
    words += ['--rewards.adaptive_kl.horizon', '600', '--ppo.total_episodes', args.episodes]
    words += ['--run.precision', args.precision, '--run.save_interval', '5']
    run('launch.py', 'train_policy', 'chat', 'policy', *task, *words)
    judged = ['--judge', args.person, '--samples', args.samples, '--output_dir', str(folder)]
    run('launch.py', 'evaluate', policy, *judged)
    points = json.loads((folder / 'evaluation.json').read_text())['rewards']['judge']
    rows = {name: (points[point]['kl'], points[point]['reward']) for point, name in POINTS.items()}
    best = best_of_policy(policy, args.person, args.requests, folder / 'best_of_4.jsonl')
    rows['best of 4 of the policy'] = (best[0], best[1])
    print(f'\n{"by the hidden reward":24}{"KL":>7}{"reward":>8}{"share":>7}')
    for name, (kl, reward) in rows.items():
        share = share_of_gain(kl, reward, points) if kl else math.nan
        print(f'{name:24}{kl:7.2f}{reward:8.3f}{"-" if math.isnan(share) else f"{share:.2f}":>7}')


if __name__ == '__main__':
    main()
