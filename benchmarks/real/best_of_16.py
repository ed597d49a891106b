"""best_of_16.py RUN: gain of the best of 16 answers by a head that learned few or many labels.

RUN: a head that was fitted to a simulated person's answers; evening.py leaves one in FOLDER/head.
Heads are fitted to random subsets of its labels. The initial model answers requests that nobody was
asked about; of 16 answers, each head chooses one. Printed is the gain by the person's own reward,
as a fraction of the gain that is possible at that KL, and its standard deviation over subsets.
"""

import argparse
import pathlib
import statistics

import torch

from lm_human_preferences import label_types, lm_tasks
from lm_human_preferences.evaluation import comparison, report
from lm_human_preferences.hparams.reward_options import CommandHParams
from lm_human_preferences.labels.held_out import subjects_of
from lm_human_preferences.labels.training_data import load_labels
from lm_human_preferences.machine import precision
from lm_human_preferences.policy import Policy
from lm_human_preferences.reward_sources import loading
from lm_human_preferences.reward_sources.frozen_head import head as heads
from lm_human_preferences.reward_sources.frozen_head.fitting import fit_head
from lm_human_preferences.reward_sources.frozen_head.reward import checked, features_of
from lm_human_preferences.runs import run_settings
from lm_human_preferences.utils.core import set_seed

VADER = f'{pathlib.Path(__file__).parent}/vader_reward.py:score'
SET_SCALE = 4  # answers to each request that set the scale of the features
PESSIMISM = 0.5  # as in a training


def sample(
    reference: Policy, task: lm_tasks.TaskHParams, queries: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `count` responses to each query, and their features: (queries, count, ...) each."""
    padding_token, encoder = reference.padding_token, reference.encoder
    truncated = lm_tasks.postprocess_fn_from_hparams(task, padding_token, encoder)
    responses, features = [], []
    for query in queries.split(1):
        drawn = reference.respond(query.repeat_interleave(count, 0), task.response_length, count)
        responses.append(truncated(drawn['responses']))
        features.append(features_of(reference, query, responses[-1].unsqueeze(0))[0])
        print('.', end='', flush=True)
    return torch.stack(responses), torch.stack(features)


def fraction_of_gain(chooser: torch.Tensor, rewards: torch.Tensor) -> tuple[float, float]:
    """Return the fraction of the possible gain, and the KL, of the best of 16 by `chooser`.

    chooser, rewards: (queries, samples) scores of the head and of the person.
    """
    uniform = torch.zeros_like(rewards).log_softmax(-1)
    points = comparison.compare_samples(uniform, uniform, rewards, None, chooser)
    point = points[f'{report.BEST_OF_N}16{report.BY_REWARD_MODEL}']
    return point['share'].mean().item(), point['kl'].mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('run')
    parser.add_argument('--person', default=VADER, help='FILE.py:FUNCTION, the hidden reward')
    parser.add_argument('--sizes', type=int, nargs='+', default=[30, 100, 280])
    parser.add_argument('--draws', type=int, default=6)
    parser.add_argument('--requests', type=int, default=30)
    parser.add_argument('--samples', type=int, default=96, help='answers to each request')
    parser.add_argument('--precision', default='fp32')
    args = parser.parse_args()
    comparison.FEW_SAMPLES = comparison.FEWEST_FOR_SHARE = 0  # few are tolerated here
    settings = run_settings.read_settings(CommandHParams(), args.run)
    task, label_type = settings.task, label_types.get(settings.labels.type)
    place = f'{args.run}/reward_model'
    reference = checked(place, *heads.load(place)).reference
    precision.configure_for(reference.model.sizes.n_embd, args.precision)
    encoding, encoder = reference.trained_model.encoding, reference.encoder
    set_seed(1)

    labels = load_labels(settings, encoding).tensors
    given = torch.stack([labels[field] for field in label_type.samples], dim=1)
    parts = zip(labels['query'].split(1), given.split(1), strict=True)
    known = torch.cat([features_of(reference, *part) for part in parts])

    sampler = lm_tasks.make_query_sampler(task, encoder=encoder, batch_size=640, mode='test')
    queries = sampler()['tokens'].unique(dim=0)[: args.requests]
    responses, features = sample(reference, task, queries, args.samples)
    judge = loading.load_judge(args.person, encoding, task)
    responses = responses.flatten(0, 1)
    repeated = queries.repeat_interleave(args.samples, 0)
    has_end = lm_tasks.filter_fn_from_hparams(task, encoder)(responses).view(features.shape[:2])
    rewards = judge.score(repeated, responses).view(has_end.shape).double()
    rewards = rewards.masked_fill(~has_end, task.penalty_reward_value)
    others = features[:, :SET_SCALE].flatten(0, 1)
    print(f'\n{len(queries)} requests, {has_end.double().mean():.2f} of the answers end')

    print(f'{"labels":>6}{"KL":>7}{"fraction":>10}{"deviation":>11}')
    for size in args.sizes:
        fractions, kl = [], 0.0
        for draw in range(args.draws if size < len(known) else 1):
            generator = torch.Generator().manual_seed(draw)
            rows = torch.randperm(len(known), generator=generator)[:size]
            subset = {field: values[rows] for field, values in labels.items()}
            subjects = subjects_of(subset, label_type, encoder)
            fitted = fit_head(known[rows], subset, label_type, others, subjects)
            scores, spread = fitted.head(features.double())
            chooser = (scores - PESSIMISM * spread).masked_fill(~has_end, -torch.inf)
            fraction, kl = fraction_of_gain(chooser, rewards)
            fractions.append(fraction)
        deviation = f'{statistics.stdev(fractions):.3f}' if len(fractions) > 1 else '-'
        print(f'{size:6}{kl:7.2f}{statistics.mean(fractions):10.3f}{deviation:>11}', flush=True)


if __name__ == '__main__':
    main()
