"""How close a trained policy comes to the best one possible at its KL (paper, section 3.1.1 and
figure 3)."""

from __future__ import annotations

import contextlib
import glob
import io
import itertools
import json
import math
import os
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lm_human_preferences import lm_tasks, rewards, storage
from lm_human_preferences.commands.sample_policy import load_run_hparams
from lm_human_preferences.datasets import reviews
from lm_human_preferences.distributed.comm import LocalComm
from lm_human_preferences.evaluation import optimum, plots
from lm_human_preferences.hparams import train_policy as train_policy_options
from lm_human_preferences.hparams.evaluate import HParams
from lm_human_preferences.hparams.task import TaskHParams
from lm_human_preferences.language import trained_models
from lm_human_preferences.language.encodings import Encoder
from lm_human_preferences.policy import Policy
from lm_human_preferences.storage import outputs
from lm_human_preferences.synthetic.known_reward import MockRewardModel
from lm_human_preferences.training import precision
from lm_human_preferences.utils.core import ceil_div, default_device, set_seed
from lm_human_preferences.utils.logging import announce, log_line, progress

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_RESPONSES = 300_000  # to a query, that are enumerated
QUERIES, DRAWS = (
    64,
    2048,
)  # of a data set without end; drawn to meet each of the queries that reviews have
BEST_OF = (4, 16, 64)
BY_REWARD_MODEL = '_by_reward_model'  # ends the name of a best of n that another reward judges
FRONTIER = (
    'kl',
    'reward',
    'standard_errors',
    'effective_samples',
)  # the latter two only where it is estimated
COLUMNS = {
    'kl': 'KL',
    'reward': 'reward',
    'frontier': 'best at that KL',
    'share': 'share of the gain',
}
FEW_SAMPLES = 10  # effective ones, below which the frontier is estimated too low to be of use
SETTLED = 0.1  # share by which the KL misses its target, or the coefficient moved, that is told
OUTPUTS = ('evaluation.json', 'evaluation.png')
STYLES = {  # a marker and a colour of its own for each kind of point in the picture
    'base': ('o', plots.BLUE),
    'policy': ('*', plots.VERMILION),
    'optimum': ('D', plots.SKY),
    'best of n by reward model': ('^', plots.ORANGE),
    'best of n by known reward': ('s', plots.GREEN),
}

RewardModels = dict[str, rewards.TrainedRewardModel | MockRewardModel]
# log-probabilities under the reference, KL, {reward: (scores of all responses, their mean)}
Compared = tuple[torch.Tensor, torch.Tensor, dict[str, tuple[torch.Tensor, ...]]]
Points = dict[str, dict[str, torch.Tensor]]  # what `compare` returns


def logged_kl_coefs(save_dir: str) -> list[float]:
    """The KL coefficient of each step of the run in `save_dir`; empty where no events tell it."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import (
        Event,  # pyright: ignore[reportAttributeAccessIssue]  protobuf makes it at run time
    )

    found = {}
    pattern = os.path.join(glob.escape(save_dir), 'tb', 'ppo', 'events.out.tfevents.*')
    for path in sorted(glob.glob(pattern)):  # later files go on where earlier ones end
        for record in RawEventFileLoader(path).Load():
            event = Event.FromString(record)
            for value in event.summary.value:
                if value.tag == 'objective/kl_coef':
                    found[event.step] = value.simple_value
    return [found[step] for step in sorted(found)]


def final_kl_coef(save_dir: str, hparams: train_policy_options.HParams) -> float | None:
    """The KL coefficient in force at the last step of the run in `save_dir`.

    It is what was logged: a run that was resumed may have ended with another one than it began
    with. Without events it is that of `hparams`, or None if it adapted.
    """
    logged, given = logged_kl_coefs(save_dir), hparams.rewards.kl_coef
    if not logged:
        return None if hparams.rewards.adaptive_kl else given
    return given if logged[-1] == np.float32(given) else logged[-1]  # events are float32


def kl_control(save_dir: str, hparams: train_policy_options.HParams) -> dict[str, Any] | None:
    """How the KL coefficient was steered in the last tenth of a run; None where it was not.

    Returns the target of the KL in nats, the steps of the run and of its last tenth, and the
    coefficients at the first and the last of these.
    """
    logged = logged_kl_coefs(save_dir)
    if hparams.rewards.adaptive_kl is None or not logged:
        return None
    recent = logged[-max(2, ceil_div(len(logged), 10)) :]
    return {
        'target': hparams.rewards.adaptive_kl.target,
        'steps': len(logged),
        'recent_steps': len(recent),
        'kl_coef_before': recent[0],
        'kl_coef': recent[-1],
    }


def load_models(
    save_dir: str, hparams: train_policy_options.HParams
) -> tuple[Policy, Policy, RewardModels]:
    """(policy, reference, {name: reward model}) of a run, what it was trained on first; hparams:
    train_policy's."""
    trained = {
        scope: trained_models.TrainedModel(scope, storage.join(save_dir, 'policy'), scope)
        for scope in ('policy', 'ref_policy')
    }
    encoding, task = trained['policy'].encoding, hparams.task
    with contextlib.redirect_stdout(io.StringIO()):  # a line for each variable
        policy, reference = (
            Policy(
                model,
                scope=scope,
                embed_queries=lm_tasks.query_formatter(task, encoding.get_encoder()),
                temperature=task.policy.temperature,
            )
            for scope, model in trained.items()
        )
        names = {'reward model': rewards.reward_model_of(save_dir, hparams)}
        if encoding.name == 'reviews':
            names = {name: of for name, of in names.items() if of != 'mock'} | {
                'known reward': 'mock'
            }
        models = {name: rewards.load_reward_model(of, encoding) for name, of in names.items()}
    return policy, reference, models


def queries_of(
    hparams: train_policy_options.HParams, encoder: Encoder, count: int | None, seed: int = 1
) -> torch.Tensor:
    """`count` queries of the test part, each once: (queries, query_length).

    None: all those of reviews, else QUERIES. The queries of reviews are few and equally frequent;
    `seed` decides which of them are taken.
    """
    few = hparams.task.query_dataset == 'reviews'
    sampler = lm_tasks.make_query_sampler(
        hparams=hparams.task,
        encoder=encoder,
        batch_size=DRAWS if few else count or QUERIES,
        mode='test',
        labels=rewards.label_source(hparams),
    )
    queries = sampler()['tokens']
    if few:
        queries = queries.unique(dim=0)  # sorted: those next to each other are alike
    if few and count is not None:
        generator = torch.Generator().manual_seed(seed)  # what is sampled later stays the same
        queries = queries[torch.randperm(len(queries), generator=generator)[:count]]
    return queries


def enumerate_all(
    policy: Policy,
    reference: Policy,
    models: RewardModels,
    task: TaskHParams,
    queries: torch.Tensor,
) -> Compared:
    """What `compare` needs, from all responses to `queries`: (reference's log-probabilities, KL,
    {name: scores}).

    scores: those of all responses (queries, responses), and their mean under the policy (queries,).
    """
    length, n_vocab = task.response_length, policy.model.hparams.n_vocab
    found = []
    for query in progress(queries.split(1), comm=LocalComm(), desc='all responses', unit='query'):
        ref_logprobs = optimum.all_logprobs(reference, query, length)
        logprobs = optimum.all_logprobs(policy, query, length)
        scores = {}
        for name, model in models.items():
            if task.truncate_token is None and isinstance(model, rewards.TrainedRewardModel):
                of_all = optimum.all_rewards(model, query, length)
            else:
                of_all = optimum.all_scores(
                    rewards.make_score_fn(task, model), query, n_vocab, length
                )
            scores[name] = of_all, optimum.expected(logprobs, of_all)
        found.append((ref_logprobs, optimum.kl(logprobs, ref_logprobs), scores))
    ref_logprobs, kl, scores = zip(*found)
    return (
        torch.cat(ref_logprobs),
        torch.cat(kl),
        {name: tuple(map(torch.cat, zip(*(of[name] for of in scores)))) for name in models},
    )


def sample_many(
    policy: Policy,
    reference: Policy,
    models: RewardModels,
    task: TaskHParams,
    queries: torch.Tensor,
    settings: HParams,
) -> Compared:
    """What `compare` needs, from `settings.samples` responses of each model to each of `queries`:
    as above."""
    score_fns = {name: rewards.make_score_fn(task, model) for name, model in models.items()}
    kls, scores = [], {name: ([], []) for name in models}
    rows = (
        queries.to(policy.device).repeat_interleave(settings.samples, 0).split(settings.batch_size)
    )
    for part in progress(rows, comm=LocalComm(), desc='samples', unit='batch'):
        drawn = policy.respond(part, length=task.response_length)
        ref_logprobs = reference.analyze_responses(part, drawn['responses'])['logprobs']
        kls.append((drawn['logprobs'].double() - ref_logprobs).sum(1).cpu())
        plain = reference.respond(part, length=task.response_length)
        for name, score_fn in score_fns.items():
            for results, responses in zip(scores[name], (plain['responses'], drawn['responses'])):
                results.append(score_fn(part, responses)[0].double().cpu())

    def by_query(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(parts).reshape(len(queries), -1)

    kl = by_query(kls)
    return (
        optimum.as_distribution(kl),
        kl.mean(1),
        {
            name: (by_query(of_ref), by_query(of_policy).mean(1))
            for name, (of_ref, of_policy) in scores.items()
        },
    )


def compare(
    ref_logprobs: torch.Tensor,
    kl: torch.Tensor,
    scores: torch.Tensor,
    score: torch.Tensor,
    *,
    kl_coef: float | None,
    exact: bool,
    chooser: torch.Tensor | None = None,
) -> Points:
    """The policy and others against the frontier.

    ref_logprobs, scores (queries, responses): what the reference does, and how its responses are
    scored. kl, score (queries,): of the policy. kl_coef: of the optimum, None to leave it out.
    chooser (queries, responses): what the reward model thinks of the same responses, if `scores`
    are another reward: best of n is then chosen by either. Returns {point: {name: values
    (queries,) whose mean is the result}}.
    """

    def reach(beta: float) -> dict[str, torch.Tensor]:
        return (
            {} if exact else {'effective_samples': optimum.effective_samples(scores, beta or 1e-9)}
        )

    def point(kl: torch.Tensor, reward: torch.Tensor) -> dict[str, torch.Tensor]:
        values, beta = against_frontier(kl, reward, ref_logprobs, scores)
        return values | reach(beta)

    base = optimum.expected(ref_logprobs, scores)
    points = {'base': {'kl': torch.zeros_like(base), 'reward': base}, 'policy': point(kl, score)}
    for name, best, best_kl in bests_of_n(ref_logprobs, scores, exact=exact):
        points[name] = point(best_kl, best)
    if chooser is not None:
        for name, best, best_kl in bests_of_n(ref_logprobs, chooser, exact=exact, judged=scores):
            points[f'{name}{BY_REWARD_MODEL}'] = point(best_kl, best)
    if kl_coef:
        log_z, best, _ = optimum.moments(ref_logprobs, scores, kl_coef)
        points['optimum'] = {'kl': best / kl_coef - log_z, 'reward': best, **reach(kl_coef)}
        points['policy']['kl_to_optimum'] = kl - score / kl_coef + log_z
    return points


def bests_of_n(
    ref_logprobs: torch.Tensor,
    scores: torch.Tensor,
    *,
    exact: bool,
    judged: torch.Tensor | None = None,
) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """(name, reward, KL) of each best of n; reward and KL (queries,). See optimum.best_of_n."""
    names = [f'best_of_{n}' for n in BEST_OF]
    if exact:
        return list(zip(names, *optimum.best_of_n(ref_logprobs, scores, *BEST_OF, judged=judged)))
    return [
        (
            name,
            optimum.sampled_best_of_n(scores, n, judged),
            torch.full((len(scores),), math.log(n) - (n - 1) / n, dtype=torch.float64),
        )
        for name, n in zip(names, BEST_OF)
    ]


def against_frontier(
    kl: torch.Tensor, reward: torch.Tensor, ref_logprobs: torch.Tensor, scores: torch.Tensor
) -> tuple[dict[str, torch.Tensor], float]:
    """Of a policy with `kl` and `reward` (queries,): these, the frontier's reward at its KL, the
    share of the gain.

    All are (queries,), and their means are the results. What is no mean by nature is linearised, so
    that the spread between queries tells its error: the frontier's reward is the minimum over beta
    of beta (KL + log Z). Returns them by name, and that beta.
    """
    base, (_, beta) = (
        optimum.expected(ref_logprobs, scores),
        optimum.frontier_at(kl.mean(), ref_logprobs, scores),
    )
    if beta == 0:
        frontier = scores.max(1).values
    elif math.isinf(beta):
        frontier = base
    else:
        frontier = beta * (kl + optimum.moments(ref_logprobs, scores, beta)[0])
    gain, possible = reward - base, frontier - base
    share = gain.mean() / possible.mean()
    return {
        'kl': kl,
        'reward': reward,
        'frontier': frontier,
        'share': share + (gain - share * possible) / possible.mean(),
    }, beta


def summarised(points: Points, *, whole: bool) -> dict[str, dict[str, Any]]:
    """{point: {name: mean}} of what `compare` returns, with standard errors unless the queries are
    the `whole` set."""
    summary: dict[str, dict[str, Any]] = {
        point: {name: _number(of.mean()) for name, of in values.items()}
        for point, values in points.items()
    }
    if not whole:
        for point, values in points.items():
            errors = {name: _number(optimum.standard_error(of)) for name, of in values.items()}
            summary[point]['standard_errors'] = errors
    return summary


def _number(scalar: torch.Tensor) -> float | None:
    """As JSON has it: None where it is not finite, such as the share of a gain that no KL
    allows."""
    return scalar.item() if math.isfinite(scalar) else None


def point_label(point: str, reward: str) -> str:
    """What a point of `compare` is called where results of `reward` are shown."""
    if point.endswith(BY_REWARD_MODEL):
        point, reward = point.removesuffix(BY_REWARD_MODEL), 'reward model'
    text = point.replace('_', ' ')
    return f'{text} by {reward}' if point.startswith('best_of_') else text


def table(results: dict[str, Any]) -> Iterator[str]:
    """The results of `evaluate` as lines of text."""
    kind, of = ('exact', 'all') if results['exact'] else ('estimated', 'samples:')
    yield (
        f'{kind}, from {of} {results["responses"]} responses to each of {results["queries"]}'
        ' queries'
    )
    for name, points in results['rewards'].items():
        yield ''
        yield from _aligned(_rows(name, points))
        policy = points['policy']
        if 'kl_to_optimum' in policy:
            last = ', the last of the run' if results.get('kl_coef_is_last') else ''
            yield f'optimum: the best policy at the KL coefficient {results["kl_coef"]:.4g}{last}'
            yield from _unsettled(results.get('kl_control'), policy['kl'])
        few = [
            point_label(point, name)
            for point, values in points.items()
            if point != 'frontier' and values.get('effective_samples', FEW_SAMPLES) < FEW_SAMPLES
        ]
        if few:
            yield (
                f'WARNING: less than {FEW_SAMPLES} effective samples at the KL of {", ".join(few)};'
                ' the best there is estimated too low: give more --samples'
            )


def _rows(name: str, points: dict[str, dict[str, Any]]) -> list[list[str]]:
    """The cells of the table of reward `name`: lists of strings, the heads first."""
    rows = [[name, *COLUMNS.values()]]
    for point in points:
        if point != 'frontier':
            cells = [_cell(points[point], key) for key in COLUMNS]
            rows.append([point_label(point, name), *cells])
    if 'kl_to_optimum' in points['policy']:
        empty = [''] * (len(COLUMNS) - 1)
        rows.append(['KL(policy || optimum)', _cell(points['policy'], 'kl_to_optimum'), *empty])
    return rows


def _aligned(rows: list[list[str]]) -> Iterator[str]:
    """Lines of a table: the first column on the left, numbers on the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    for first, *cells in rows:
        numbers = [f'{cell:>{width}}' for cell, width in zip(cells, widths[1:])]
        yield '  '.join([f'{first:{widths[0]}}', *numbers]).rstrip()


def _unsettled(control: dict[str, Any] | None, kl: float) -> Iterator[str]:
    """A line where the KL of the policy missed its target or the coefficient was still moving.

    control: see kl_control. The optimum at the last coefficient is then not what the run aimed at.
    """
    if control is None:
        return
    before, now = control['kl_coef_before'], control['kl_coef']
    told = []
    if abs(kl / control['target'] - 1) > SETTLED:
        told.append(f'the KL is {kl:.2f}, not the target {control["target"]:g}')
    if abs(now / before - 1) > SETTLED:
        direction = 'rose' if now > before else 'fell'
        told.append(
            f'the KL coefficient {direction} from {before:.3g} to {now:.3g} in the last '
            f'{control["recent_steps"]} steps'
        )
    if told:
        yield (
            f'note: not settled after {control["steps"]} steps: {", and ".join(told)}; '
            'so this optimum is not what a longer run would aim at'
        )


def _cell(values: dict[str, Any], name: str) -> str:
    """A number as the table shows it, with its standard error if it has one; '' for what there is
    not."""
    value, error = values.get(name), values.get('standard_errors', {}).get(name)
    form = '{:.1%}' if name == 'share' else '{:.3f}'
    return (
        '' if value is None else form.format(value) + (f' ± {form.format(error)}' if error else '')
    )


def picture(results: dict[str, Any], path: str) -> None:
    """Draw KL against reward: the frontier and all points, a panel for each reward.

    results: those of `evaluate`. Bars are standard errors.
    """
    figure, panels = plots.panels(len(results['rewards']))
    name = os.path.basename(results['save_dir'].rstrip('/'))
    if name in ('', '.', '..'):
        name = os.path.basename(os.path.abspath(results['save_dir']))
    figure.suptitle(
        f'Run {name[:80]}: the policy and the best one possible',
        color=plots.INK,
        fontsize=13,
        parse_math=False,
    )
    for axes, (reward, points) in zip(panels, results['rewards'].items()):
        plots.label(axes, title=reward, x='KL from the base model (nats)', y='reward')
        marks = {point: values for point, values in points.items() if point != 'frontier'}
        base, curve = points['base'], points['frontier']
        errors = curve.get('standard_errors')
        if errors is not None:
            errors = [base['standard_errors']['reward'], *errors]
        plots.draw_frontier(
            axes,
            [base['kl'], *curve['kl']],
            [base['reward'], *curve['reward']],
            errors,
            label='frontier',
            up_to=1.2 * max(values['kl'] for values in marks.values()),
        )
        _draw_kinds(axes, reward, marks)
        plots.legend(axes, loc='lower right')
    plots.save(figure, path)


def _draw_kinds(axes: Axes, reward: str, marks: dict[str, dict[str, Any]]) -> None:
    """Draw points {name: values} of the results of `reward`: all best of n in one kind of mark."""

    def kind_of(point: str) -> str:
        label = point_label(point, reward)
        return f'best of n by {label.split(" by ")[1]}' if point.startswith('best_of_') else label

    *_, numbered = (kind_of(point) for point in marks if point.startswith('best_of_'))
    for kind, group in itertools.groupby(marks, kind_of):
        points = list(group)
        values = {key: [marks[point][key] for point in points] for key in ('kl', 'reward')}
        errors: list[list[float] | None] = [None, None]
        if 'standard_errors' in marks[points[0]]:
            errors = [
                [marks[point]['standard_errors'][key] or 0 for point in points]
                for key in ('kl', 'reward')
            ]
        marker, colour = STYLES[kind]
        # One number serves both kinds of best of n, which have the same KL, one above the other.
        texts = [point.split('_')[2] for point in points] if kind == numbered else ()
        plots.draw_points(
            axes,
            values['kl'],
            values['reward'],
            marker=marker,
            colour=colour,
            label=kind,
            errors=errors,
            texts=texts,
        )


def evaluate(save_dir: str, *, directory: str | None = None, **settings: Any) -> dict[str, Any]:
    """Compare the policy of a run with the best one possible: a table, evaluation.json and
    evaluation.png.

    save_dir: a run of train_policy, local or remote. directory: where its files are, given by a
    training that ends with this. settings: HParams of this command. Returns the results. The table
    is printed before anything is written.
    """
    ends_training, directory = directory is not None, directory or save_dir
    options, hparams = HParams(**settings), load_run_hparams(directory)
    output_dir = options.output_dir or ('.' if storage.is_remote(directory) else directory)
    if not ends_training:  # which has its table printed even where nothing more can be written
        outputs.check_output_dir(output_dir, *OUTPUTS)
    precision.configure('fp32', default_device())  # whatever the run was trained in
    models = load_models(directory, hparams)
    set_seed(options.seed)  # of the queries, too, where the data set is made up
    queries = queries_of(hparams, models[0].encoder, options.queries, options.seed)
    is_last = options.kl_coef is None
    kl_coef = final_kl_coef(directory, hparams) if is_last else options.kl_coef
    results = {
        'save_dir': save_dir,
        **measure(*models, hparams.task, queries, options, kl_coef),
        'kl_coef_is_last': is_last,
        'kl_control': kl_control(directory, hparams) if is_last else None,
    }
    announce(*table(results), '')  # also where the console is quiet: this is what was asked for
    command = f'./launch.py evaluate {shlex.quote(save_dir)}'
    with outputs.explained(output_dir, fix=f'`{command} --output_dir ANOTHER` writes elsewhere'):
        picture(results, os.path.join(output_dir, OUTPUTS[1]))
        # Last, as it tells `is_done`.
        outputs.write(output_dir, OUTPUTS[0], json.dumps(results, indent=2).encode())
    log_line(
        f'Saved {" and ".join(OUTPUTS)} in {save_dir if output_dir == directory else output_dir}'
    )
    if not ends_training:  # which says itself what comes next
        log_line(
            'Sample from the policy: '
            f'./sample.py sample --save_dir {shlex.quote(save_dir)} --nsamples 8'
        )
    return results


def is_done(directory: str) -> bool:
    """Whether a run's directory holds an evaluation."""
    return os.path.exists(os.path.join(directory, 'evaluation.json'))


def tokens_to_compute(task: TaskHParams, n_vocab: int) -> int:
    """How many tokens pass through a network in an evaluation with default settings, for an
    estimate of its time."""
    tokens = task.query_length + task.response_length
    if n_vocab**task.response_length > MOST_RESPONSES:
        # Both models sample, the reference reads the policy's responses, the reward model those of
        # both.
        passes = 5
        return passes * tokens * QUERIES * HParams().samples
    queries = len(reviews.queries()) if task.query_dataset == 'reviews' else QUERIES
    beginnings = queries * n_vocab ** (task.response_length - 1)
    return beginnings * (2 * (tokens - 1) + tokens - 1 + n_vocab)


def measure(
    policy: Policy,
    reference: Policy,
    models: RewardModels,
    task: TaskHParams,
    queries: torch.Tensor,
    settings: HParams,
    kl_coef: float | None,
) -> dict[str, Any]:
    """The results of `evaluate` on `queries (queries, query_length)`, exact where responses are few
    enough."""
    responses = policy.model.hparams.n_vocab**task.response_length
    exact = responses <= MOST_RESPONSES
    ref_logprobs, kl, scores = (
        enumerate_all(policy, reference, models, task, queries)
        if exact
        else sample_many(policy, reference, models, task, queries, settings)
    )
    results = {
        'exact': exact,
        'queries': len(queries),
        'responses': responses if exact else settings.samples,
        'kl_coef': kl_coef,
        'rewards': {},
    }
    trained_on = next(iter(models))  # what the coefficient was set against
    for name, (of_all, of_policy) in scores.items():
        own = name == trained_on
        points = compare(
            ref_logprobs,
            kl,
            of_all,
            of_policy,
            kl_coef=kl_coef if own else None,
            exact=exact,
            chooser=None if own else scores[trained_on][0],
        )
        betas = optimum.beta_grid(of_all)
        frontier = (
            optimum.frontier(ref_logprobs, of_all, betas)
            if exact
            else optimum.sampled_frontier(of_all, betas)
        )
        whole = exact and task.query_dataset == 'reviews' and settings.queries is None
        results['rewards'][name] = {
            **summarised(points, whole=whole),
            'frontier': dict(zip(FRONTIER, map(torch.Tensor.tolist, frontier))),
        }
    return results
