"""Gain of a reward model from answers that prefer no sample.

All is done by the commands, in mock_sentiment, whose reward is known. For each seed a simulated
labeller, who cannot tell small differences apart, answers the questions of a folder. Reward models
then learn from

    ties       all of the answers
    left out   those that prefer a sample

The best policy by a reward model at a KL of 2 is known exactly, and with it the share of the gain
in known reward that this reward model allows there (evaluation.optimum).
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import launch  # noqa: E402
from lm_human_preferences import lm_tasks, rewards  # noqa: E402
from lm_human_preferences.evaluation import optimum, reward_on_labels  # noqa: E402
from lm_human_preferences.hparams.reward_options import HParams  # noqa: E402
from lm_human_preferences.labels import simulated  # noqa: E402
from lm_human_preferences.labels.folder import LabelFolder  # noqa: E402
from lm_human_preferences.labels.labeller import Labeller  # noqa: E402
from lm_human_preferences.policy import Policy  # noqa: E402
from lm_human_preferences.reward_sources import loading  # noqa: E402

KLS = (1.0, 2.0, 4.0)
QUANTILES = {5: 2.776, 10: 2.262, 20: 2.093}  # Student's t for 95 %, by the number of seeds


def run(*words):
    """Run ./launch.py with `words` on one thread; RuntimeError, with what it printed, if it
    fails."""
    done = subprocess.run(
        [sys.executable, str(ROOT / 'launch.py'), *map(str, words)],
        capture_output=True,
        text=True,
        env={**os.environ, 'OMP_NUM_THREADS': '1', 'MKL_NUM_THREADS': '1'},
    )
    if done.returncode != 0:
        raise RuntimeError(f'{words}: {done.stdout[-2000:]}{done.stderr[-2000:]}')


class World:
    """All responses to all queries of mock_sentiment: how likely and how good they are."""

    def __init__(self):
        hparams = HParams()
        (trial,) = launch.reward_experiments['mock_sentiment']
        hparams.override_from_dict({var: value for var, value, _ in trial})
        self.task = hparams.task
        model = lm_tasks.initial_model(self.task.policy.initial_model)
        policy = Policy(
            model,
            scope='ref_policy',
            embed_queries=lm_tasks.query_formatter(self.task, model.encoding.get_encoder()),
            temperature=self.task.policy.temperature,
        )
        sampler = lm_tasks.make_query_sampler(
            hparams=self.task, encoder=policy.encoder, batch_size=4096, mode='test'
        )
        self.queries = sampler()['tokens'].unique(dim=0)
        self.length = self.task.response_length
        self.ref_logprobs = optimum.all_logprobs(policy, self.queries, self.length)
        self.reward = loading.load_reward_model('mock', model.encoding)
        score = rewards.make_score_fn(self.task, self.reward)
        n_vocab = policy.model.sizes.n_vocab
        self.known = optimum.all_scores(score, self.queries, n_vocab, self.length)
        self.initial = optimum.expected(self.ref_logprobs, self.known).mean().item()
        self.best = {kl: optimum.frontier_at(kl, self.ref_logprobs, self.known)[0] for kl in KLS}

    def shares(self, directory):
        """{KL: share of the possible gain} of the best policy by the reward model of a run."""
        model = reward_on_labels.load(reward_on_labels.saved_model(str(directory)))
        scores = optimum.all_rewards(model, self.queries, self.length)
        found = {}
        for kl in KLS:
            _, beta = optimum.frontier_at(kl, self.ref_logprobs, scores)
            logprobs = (self.ref_logprobs + scores / beta).log_softmax(-1)
            gain = optimum.expected(logprobs, self.known).mean().item() - self.initial
            found[kl] = gain / (self.best[kl] - self.initial)
        return found


def answer(world, folder, seed, settings):
    """Answer all questions of a folder; small differences between the best two are a tie."""

    def judge(questions):
        judged = simulated.judge_by(world.reward.score)(questions)
        for of_samples in judged:
            second, best = sorted(range(len(of_samples)), key=of_samples.__getitem__)[-2:]
            if of_samples[best] - of_samples[second] < settings.indifference:
                of_samples[second] = of_samples[best]
        return judged

    with Labeller(LabelFolder(str(folder)), 'robot') as robot:
        simulated.simulate(robot, judge, error=settings.error, seed=seed)


def of_seed(world, directory, seed, settings):
    """(what reward models of both kinds allow: {name: shares}, the share of ties)."""
    folder = directory / 'folder'
    sources = {'ties': folder, 'left out': directory / 'choices.json'}
    words = ('--count', settings.labels, '--seed', seed, '--ties', 'on')
    run('ask', 'mock_sentiment', folder, *words)
    answer(world, folder, seed, settings)
    run('labels', folder, '--export', sources['left out'])
    found = {}
    for name, source in sources.items():
        run(
            *('train_reward', 'mock_sentiment', name.replace(' ', '_'), '--mpi', 1),
            *('--save_dir', directory / 'runs', '--run.seed', seed),
            *('--labels.source', source, '--labels.num_train', 'None'),
            *settings.option,
        )
        found[name] = world.shares(directory / 'runs' / name.replace(' ', '_'))
    answers = LabelFolder(str(folder)).counted()
    return found, sum(answer.value == 'tie' for answer in answers) / len(answers)


def main():
    """Print a line for each seed, then means and the intervals of the paired differences."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--seeds', type=int, default=10, choices=QUANTILES)
    parser.add_argument('--labels', type=int, default=1024)
    parser.add_argument('--error', type=float, default=0.0)
    parser.add_argument('--indifference', type=float, default=0.65)
    parser.add_argument('option', nargs='*', help='of train_reward, after --')
    settings = parser.parse_args()
    torch.set_num_threads(1)
    world = World()
    everything = []
    for seed in range(1, settings.seeds + 1):
        with tempfile.TemporaryDirectory() as directory, torch.random.fork_rng():
            found, ties = of_seed(world, Path(directory), seed, settings)
        everything.append(found)
        print(json.dumps({'seed': seed, 'share of ties': ties, **found}), flush=True)
    for kl in KLS:
        of = {name: [found[name][kl] for found in everything] for name in everything[0]}
        for name, values in of.items():
            print(f'KL {kl:g} {name:9} {statistics.mean(values):.3f}, worst {min(values):.3f}')
        pairs = [a - b for a, b in zip(of['ties'], of['left out'], strict=True)]
        half = QUANTILES[len(pairs)] * statistics.stdev(pairs) / math.sqrt(len(pairs))
        print(f'KL {kl:g} ties less left out: {statistics.mean(pairs):+.3f} +- {half:.3f}')


if __name__ == '__main__':
    main()
