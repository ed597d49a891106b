"""frontier.py RUN...: reward, KL and share of the possible gain of runs of docs/real-run.md.

`./launch.py evaluate` measures the same for one run, in float32. Here the initial model answers
once for all runs, in bf16 where that is fast, and they come into one picture.
"""

import argparse
import math
import pathlib
from typing import NamedTuple

import torch

from lm_human_preferences import rewards
from lm_human_preferences.evaluation import comparison, measure, optimum, plots
from lm_human_preferences.evaluation.report import FEW_SAMPLES
from lm_human_preferences.machine import products
from lm_human_preferences.policy import Policy
from lm_human_preferences.rewards import ScoreFn
from lm_human_preferences.runs import run_settings
from lm_human_preferences.training import precision
from lm_human_preferences.utils.core import set_seed

JUDGE = f'{pathlib.Path(__file__).parent}/vader_reward.py:score'
ROWS = 64  # that are sampled together


class Answers(NamedTuple):
    """Of one model to all queries, (queries, samples) each."""

    scores: torch.Tensor
    log_ratios: torch.Tensor  # log pi / rho, whose mean is the KL
    ended: torch.Tensor


def sample(
    policy: Policy,
    reference: Policy,
    score: ScoreFn,
    queries: torch.Tensor,
    length: int,
    count: int,
) -> Answers:
    """Return `count` answers of `policy` to each of `queries (queries, query_length)`."""
    same = math.gcd(count, ROWS)  # neighbours of a part, at least, answer one query
    parts = []
    for part in queries.repeat_interleave(count, 0).split(ROWS):
        drawn = policy.respond(part, length, same)
        responses = drawn['responses']
        ratios = torch.zeros(len(part), dtype=torch.float64)
        if policy is not reference:
            of_reference = reference.analyze_responses(part, responses, same)['logprobs']
            ratios = (drawn['logprobs'].double() - of_reference).sum(1)
        scores = score(part, responses)[0].double()
        parts.append((scores, ratios, responses[:, -1] == policy.padding_token))
    return Answers(*(torch.cat(column).view(len(queries), count) for column in zip(*parts)))


def line_of(initial: Answers, trained: Answers) -> str:
    """Return what is printed of a run; the error is twice the standard error of its gain."""
    before, after = initial.scores.mean(1), trained.scores.mean(1)
    uniform = optimum.as_distribution(initial.scores)
    values, beta = comparison.against_frontier(
        trained.log_ratios.mean(1), after, uniform, initial.scores
    )
    means = {name: value.mean().item() for name, value in values.items()}
    effective = optimum.effective_samples(initial.scores, beta or 1e-9).mean().item()
    is_sure = '' if effective >= FEW_SAMPLES else f' (from {effective:.0f} effective samples)'
    gain = after - before
    error = 2 * optimum.standard_error(gain)
    of_any = gain.mean() / (2 - before.mean())  # 2 is VADER's highest score, whatever the KL
    return (
        f'reward {before.mean():.2f} to {after.mean():.2f} ± {error:.2f}, KL {means["kl"]:.2f},'
        f' possible {means["frontier"]:.2f}{is_sure}, share {means["share"]:.2f},'
        f' of any gain {of_any:.2f},'
        f' ended {initial.ended.double().mean():.2f} to {trained.ended.double().mean():.2f}'
    )


def draw(initial: Answers, points: dict[str, tuple[float, float]], path: str) -> None:
    """Draw the frontier where it is sure, and the runs: {name: (KL, reward)}."""
    figure, (axes,) = plots.panels()
    title = 'Reward and KL on requests that were not trained on'
    plots.label(axes, title=title, x='KL from the initial model (nats)', y='reward')
    betas = optimum.beta_grid(initial.scores)
    kls, highest, errors, effective = optimum.sampled_frontier(initial.scores, betas)
    sure = effective >= FEW_SAMPLES
    if sure.any():
        plots.draw_frontier(axes, kls[sure].tolist(), highest[sure].tolist(), errors[sure].tolist())
        axes.legend(loc='lower right', frameon=False)
    for name, (kl, reward) in points.items():
        axes.plot(kl, reward, 'o', color=plots.VERMILION)
        axes.annotate(name, (kl, reward), xytext=(6, -4), textcoords='offset points')
    plots.save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('runs', nargs='+')
    parser.add_argument('--samples', type=int, default=16, help='of a policy to each query')
    parser.add_argument('--initial_samples', type=int, default=64, help='for the frontier')
    parser.add_argument('--picture')
    args = parser.parse_args()
    initial = None
    points = {}
    for run in args.runs:
        hparams = run_settings.load_run_hparams(run)
        models = measure.load_models(run, hparams)
        policy, reference, _, task = models
        kind = 'fp32' if products.note_on_bf16('bf16') else 'bf16'
        precision.configure_for(policy.model.hparams.n_embd, kind)
        judge = rewards.load_judge(JUDGE, policy.trained_model.encoding, task)
        score = rewards.make_score_fn(task, judge)
        queries = measure.queries_of(hparams, policy.encoder, None)
        set_seed(1)
        length = task.response_length
        if initial is None:
            count = args.initial_samples
            initial = sample(reference, reference, score, queries, length, count)
        trained = sample(policy, reference, score, queries, length, args.samples)
        name = pathlib.Path(run).name
        points[name] = trained.log_ratios.mean().item(), trained.scores.mean().item()
        print(f'{name}: {line_of(initial, trained)}', flush=True)
    if args.picture and initial is not None:
        draw(initial, points, args.picture)


if __name__ == '__main__':
    main()
