"""frontier.py RUN...: reward, KL and share of the possible gain of runs of docs/real-run.md.

`./launch.py evaluate` measures the same for one run, in float32. Here the initial model answers
once for all runs, in bf16 where that is fast, and they come into one picture. Each ± is a 95 %
interval over requests.
"""

import argparse
import math
import pathlib
import sys
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import plots

from lm_human_preferences import rewards
from lm_human_preferences.evaluation import comparison, measure, optimum, report
from lm_human_preferences.machine import precision
from lm_human_preferences.policy import Policy
from lm_human_preferences.ppo import ScoreFn
from lm_human_preferences.reward_sources import loading
from lm_human_preferences.reward_sources.sources import source_of
from lm_human_preferences.runs import run_settings
from lm_human_preferences.utils.core import set_seed

JUDGE = f'{pathlib.Path(__file__).parent}/vader_reward.py:score'
ROWS = 64  # that are sampled together


class Answers(NamedTuple):
    """Of one model to all queries, (queries, samples) each."""

    scores: torch.Tensor
    logprobs: torch.Tensor  # by the model itself
    ended: torch.Tensor
    responses: torch.Tensor  # (queries, samples, length)


def sample(
    policy: Policy, score: ScoreFn, queries: torch.Tensor, length: int, count: int
) -> Answers:
    """Return `count` answers of `policy` to each of `queries (queries, query_length)`."""
    same = math.gcd(count, ROWS)  # neighbours of a part, at least, answer one query
    parts = []
    for part in queries.repeat_interleave(count, 0).split(ROWS):
        drawn = policy.respond(part, length, same)
        responses = drawn['responses']
        scores = score(part, responses)[0].double()
        ended = responses[:, -1] == policy.padding_token
        parts.append((scores, drawn['logprobs'].double().sum(1), ended, responses))
    shape = len(queries), count
    return Answers(*(torch.cat(column).unflatten(0, shape) for column in zip(*parts)))


def logprobs_of(policy: Policy, queries: torch.Tensor, answers: Answers) -> torch.Tensor:
    """Return the log-probabilities of answers of another model: (queries, samples)."""
    count = answers.scores.shape[1]
    rows = queries.repeat_interleave(count, 0).split(ROWS)
    parts = []
    for part, responses in zip(rows, answers.responses.flatten(0, 1).split(ROWS), strict=True):
        found = policy.analyze_responses(part, responses, math.gcd(count, ROWS))
        parts.append(found['logprobs'].double().sum(1))
    return torch.cat(parts).view(-1, count)


def points_of(initial: Answers, trained: Answers, log_ratios: torch.Tensor) -> dict[str, Any]:
    """Return base and policy as in an evaluation. log_ratios: of both models' answers in turn."""
    reference, policy = optimum.mixture(log_ratios)
    scores = torch.cat([initial.scores, trained.scores], dim=1)
    repeats = measure.repeats_of(trained.responses)
    found = comparison.compare_samples(reference, policy, scores, kl_coef=None, repeats=repeats)
    return comparison.summarize(found, with_errors=True)


def line_of(points: dict[str, Any], initial: Answers, trained: Answers) -> str:
    """Return what is printed of a run."""
    texts = {}
    for name in ('kl', 'reward', 'frontier', 'share'):
        value = points['policy'][name]
        width = report.margin(points['policy'], name, len(initial.scores))
        texts[name] = '-' if value is None else f'{value:.3f} ± {width or math.nan:.3f}'
    return (
        f'reward {points["base"]["reward"]:.2f} to {texts["reward"]}, KL {texts["kl"]},'
        f' possible {texts["frontier"]}, share {texts["share"]}'
        f' ({points["policy"]["effective_samples"]:.0f} effective samples),'
        f' ended {initial.ended.double().mean():.2f} to {trained.ended.double().mean():.2f}'
    )


def draw(
    reference: torch.Tensor, scores: torch.Tensor, points: dict[str, dict[str, Any]], path: str
) -> None:
    """Draw the frontier where it is sure, and the runs: {name: points}."""
    figure, (axes,) = plots.panels()
    title = 'Reward and KL on requests that were not trained on'
    plots.label(axes, title=title, x='KL from the initial model (nats)', y='reward')
    curve = comparison.known_frontier(reference, scores, exact=False)
    plots.draw_frontier(axes, curve['kl'], curve['reward'])
    axes.legend(loc='lower right', frameon=False)
    for name, found in points.items():
        place = found['policy']['kl'], found['policy']['reward']
        axes.plot(*place, 'o', color=plots.VERMILION)
        axes.annotate(name, place, xytext=(6, -4), textcoords='offset points')
    plots.save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('runs', nargs='+')
    parser.add_argument('--samples', type=int, default=64, help='of each model to each query')
    parser.add_argument('--picture')
    args = parser.parse_args()
    report.BEST_OF = ()  # not printed here
    initial, farthest, mixture = None, None, None
    points = {}
    for run in args.runs:
        source = source_of(run_settings.load_run_hparams(run))
        task = source.task
        policy, reference = measure.load_policies(run, task)
        precision.configure_for(policy.model.sizes.n_embd, 'fp32')
        judge = loading.load_judge(JUDGE, policy.trained_model.encoding, task)
        score = rewards.make_score_fn(task, judge)
        queries = measure.queries_of(source, policy.encoder, None)
        set_seed(1)
        length = task.response_length
        if initial is None:
            initial = sample(reference, score, queries, length, args.samples)
        trained = sample(policy, score, queries, length, args.samples)
        log_ratios = torch.cat(
            [
                logprobs_of(policy, queries, initial) - initial.logprobs,
                trained.logprobs - logprobs_of(reference, queries, trained),
            ],
            dim=1,
        )
        name = pathlib.Path(run).name
        points[name] = points_of(initial, trained, log_ratios)
        print(f'{name}: {line_of(points[name], initial, trained)}', flush=True)
        if farthest is None or points[name]['policy']['kl'] > points[farthest]['policy']['kl']:
            farthest = name  # its samples tell most of the frontier
            scores = torch.cat([initial.scores, trained.scores], dim=1)
            mixture = optimum.mixture(log_ratios)[0], scores
    if args.picture and mixture is not None:
        draw(*mixture, points, args.picture)


if __name__ == '__main__':
    main()
