"""How close a trained policy comes to the best one possible at its KL (paper, section 3.1.1 and figure 3)."""
import contextlib
import io
import math
import os

import torch

from lm_human_preferences import lm_tasks, optimum, plots, rewards
from lm_human_preferences.hparams.evaluate import HParams
from lm_human_preferences.language import trained_models
from lm_human_preferences.policy import Policy
from lm_human_preferences.sample_policy import load_run_hparams
from lm_human_preferences.utils import checkpoints, precision, storage
from lm_human_preferences.utils.comm import SingleProcess
from lm_human_preferences.utils.core import default_device, set_seed
from lm_human_preferences.utils.logging import progress, say

MOST_RESPONSES = 300_000  # to a query, that are enumerated
QUERIES, DRAWS = 64, 2048  # of a data set without end; drawn to meet each of the queries that reviews have
BEST_OF = (4, 16, 64)
FRONTIER = ('kl', 'reward', 'standard_errors', 'effective_samples')  # the latter two only where it is estimated
COLUMNS = {'kl': 'KL', 'reward': 'reward', 'frontier': 'best at that KL', 'share': 'share of the gain'}
FEW_SAMPLES = 10  # effective ones, below which the frontier is estimated too low to be of use


def final_kl_coef(save_dir, hparams):
    """The KL coefficient in force at the last step of the run in `save_dir`; None where it adapted and left no trace.

    hparams: train_policy's.
    """
    events_dir = storage.join(save_dir, 'tb', 'ppo')
    if hparams.rewards.adaptive_kl is None:
        return hparams.rewards.kl_coef
    if not os.path.isdir(events_dir):
        return None
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(events_dir, size_guidance={'scalars': 1}).Reload()  # the newest of each is kept
    return events.Scalars('objective/kl_coef')[-1].value if events.scalars.Keys() else None


def load_models(save_dir, hparams):
    """(policy, reference, {name: reward model}) of a run, what it was trained on first; hparams: train_policy's."""
    trained = {scope: trained_models.TrainedModel(scope, storage.join(save_dir, 'policy'), scope)
               for scope in ('policy', 'ref_policy')}
    encoding, task = trained['policy'].encoding, hparams.task
    with contextlib.redirect_stdout(io.StringIO()):  # a line for each variable
        policy, reference = (
            Policy(model, scope=scope, embed_queries=lm_tasks.query_formatter(task, encoding.get_encoder()),
                   temperature=task.policy.temperature) for scope, model in trained.items())
        names = {'reward model': rewards.reward_model_of(save_dir, hparams)}
        if encoding.name == 'reviews':
            names = {name: of for name, of in names.items() if of != 'mock'} | {'known reward': 'mock'}
        models = {name: rewards.get_reward_model(of, encoding) for name, of in names.items()}
    return policy, reference, models


def queries_of(hparams, encoder, count):
    """`count` queries of the test part, each once, (queries, query_length); None: all those of reviews, else QUERIES.

    The queries of reviews are few and equally frequent. hparams: train_policy's.
    """
    few = hparams.task.query_dataset == 'reviews'
    sampler = lm_tasks.make_query_sampler(
        hparams=hparams.task, encoder=encoder, batch_size=DRAWS if few else count or QUERIES, mode='test',
        labels=rewards.label_source(hparams))
    queries = sampler()['tokens']
    return queries.unique(dim=0)[:count] if few else queries


def enumerate_all(policy, reference, models, task, queries):
    """What `compare` needs, from all responses to `queries`: (reference's log-probabilities, KL, {name: scores}).

    scores: those of all responses (queries, responses), and their mean under the policy (queries,).
    """
    length, n_vocab = task.response_length, policy.model.hparams.n_vocab
    found = []
    for query in progress(queries.split(1), comm=SingleProcess(), desc='all responses', unit='query'):
        ref_logprobs = optimum.all_logprobs(reference, query, length)
        logprobs = optimum.all_logprobs(policy, query, length)
        scores = {}
        for name, model in models.items():
            if task.truncate_token is None and isinstance(model, rewards.TrainedRewardModel):
                of_all = optimum.all_rewards(model, query, length)
            else:
                of_all = optimum.all_scores(rewards.make_score_fn(task, model), query, n_vocab, length)
            scores[name] = of_all, optimum.expected(logprobs, of_all)
        found.append((ref_logprobs, optimum.kl(logprobs, ref_logprobs), scores))
    ref_logprobs, kl, scores = zip(*found)
    return torch.cat(ref_logprobs), torch.cat(kl), {
        name: tuple(map(torch.cat, zip(*(of[name] for of in scores)))) for name in models}


def sample_many(policy, reference, models, task, queries, settings):
    """What `compare` needs, from `settings.samples` responses of each model to each of `queries`: as above."""
    score_fns = {name: rewards.make_score_fn(task, model) for name, model in models.items()}
    kls, scores = [], {name: ([], []) for name in models}
    rows = queries.to(policy.device).repeat_interleave(settings.samples, 0).split(settings.batch_size)
    for part in progress(rows, comm=SingleProcess(), desc='samples', unit='batch'):
        drawn = policy.respond(part, length=task.response_length)
        ref_logprobs = reference.analyze_responses(part, drawn['responses'])['logprobs']
        kls.append((drawn['logprobs'].double() - ref_logprobs).sum(1).cpu())
        plain = reference.respond(part, length=task.response_length)
        for name, score_fn in score_fns.items():
            for results, responses in zip(scores[name], (plain['responses'], drawn['responses'])):
                results.append(score_fn(part, responses)[0].double().cpu())

    def by_query(parts):
        return torch.cat(parts).reshape(len(queries), -1)
    kl = by_query(kls)
    return optimum.as_distribution(kl), kl.mean(1), {
        name: (by_query(of_ref), by_query(of_policy).mean(1)) for name, (of_ref, of_policy) in scores.items()}


def compare(ref_logprobs, kl, scores, score, *, kl_coef, exact):
    """The policy and others against the frontier: {point: {name: values (queries,) whose mean is the result}}.

    ref_logprobs, scores (queries, responses): what the reference does, and how its responses are scored. kl, score
    (queries,): of the policy. kl_coef: of the optimum, None to leave it out.
    """
    def reach(beta):
        return {} if exact else {'effective_samples': optimum.effective_samples(scores, beta or 1e-9)}

    def point(kl, reward):
        values, beta = against_frontier(kl, reward, ref_logprobs, scores)
        return values | reach(beta)
    base = optimum.expected(ref_logprobs, scores)
    points = {'base': {'kl': torch.zeros_like(base), 'reward': base}, 'policy': point(kl, score)}
    bests = zip(*optimum.best_of_n(ref_logprobs, scores, *BEST_OF)) if exact else (
        (optimum.sampled_best_of_n(scores, n), torch.full_like(base, math.log(n) - (n - 1) / n)) for n in BEST_OF)
    for n, (best, best_kl) in zip(BEST_OF, bests):
        points[f'best_of_{n}'] = point(best_kl, best)
    if kl_coef:
        log_z, best, _ = optimum.moments(ref_logprobs, scores, kl_coef)
        points['optimum'] = {'kl': best / kl_coef - log_z, 'reward': best, **reach(kl_coef)}
        points['policy']['kl_to_optimum'] = kl - score / kl_coef + log_z
    return points


def against_frontier(kl, reward, ref_logprobs, scores):
    """Of a policy with `kl` and `reward` (queries,): these, the frontier's reward at its KL, the share of the gain.

    All are (queries,), and their means are the results. What is no mean by nature is linearised, so that the spread
    between queries tells its error: the frontier's reward is the minimum over beta of beta (KL + log Z). Returns them
    by name, and that beta.
    """
    base, (_, beta) = optimum.expected(ref_logprobs, scores), optimum.frontier_at(kl.mean(), ref_logprobs, scores)
    if beta == 0:
        frontier = scores.max(1).values
    elif math.isinf(beta):
        frontier = base
    else:
        frontier = beta * (kl + optimum.moments(ref_logprobs, scores, beta)[0])
    gain, possible = reward - base, frontier - base
    share = gain.mean() / possible.mean()
    return {'kl': kl, 'reward': reward, 'frontier': frontier,
            'share': share + (gain - share * possible) / possible.mean()}, beta


def summarised(points, *, whole):
    """{point: {name: mean}} of what `compare` returns, with standard errors unless the queries are the `whole` set."""
    summary = {point: {name: _number(of.mean()) for name, of in values.items()} for point, values in points.items()}
    if not whole:
        for point, values in points.items():
            errors = {name: _number(optimum.standard_error(of)) for name, of in values.items()}
            summary[point]['standard_errors'] = errors
    return summary


def _number(scalar):
    """As JSON has it: None where it is not finite, such as the share of a gain that no KL allows."""
    return scalar.item() if math.isfinite(scalar) else None


def table(results):
    """The results of `evaluate` as lines of text."""
    kind, of = ('exact', 'all') if results['exact'] else ('estimated', 'samples:')
    yield f'{kind}, from {of} {results["responses"]} responses to each of {results["queries"]} queries'
    for name, points in results['rewards'].items():
        yield ''
        yield f'{name:14}' + ''.join(f'{head:>19}' for head in COLUMNS.values())
        for point in (point for point in points if point != 'frontier'):
            yield f'{point.replace("_", " "):14}' + ''.join(f'{_cell(points[point], key):>19}' for key in COLUMNS)
        policy = points['policy']
        if 'kl_to_optimum' in policy:
            yield f'optimum: at the KL coefficient {results["kl_coef"]:.4g}; KL(policy || optimum) is ' + _cell(
                policy, 'kl_to_optimum')
        few = [point.replace('_', ' ') for point, values in points.items()
               if point != 'frontier' and values.get('effective_samples', FEW_SAMPLES) < FEW_SAMPLES]
        if few:
            yield (f'WARNING: less than {FEW_SAMPLES} effective samples at the KL of {", ".join(few)}; the best there '
                   'is estimated too low: give more --samples')


def _cell(values, name):
    """A number as the table shows it, with its standard error if it has one; '' for what there is not."""
    value, error = values.get(name), values.get('standard_errors', {}).get(name)
    form = '{:.1%}' if name == 'share' else '{:.3f}'
    return '' if value is None else form.format(value) + (f' ± {form.format(error)}' if error else '')


def picture(results, path):
    """Draw KL against reward: the frontier and all points, a panel for each reward."""
    figure, panels = plots.panels(len(results['rewards']))
    for axes, (name, points) in zip(panels, results['rewards'].items()):
        marks = {point.replace('_', ' '): (values['kl'], values['reward'])
                 for point, values in points.items() if point != 'frontier'}
        plots.label(axes, title=name, x='KL from the base model (nats)', y='reward')
        plots.draw_frontier(axes, *list(points['frontier'].values())[:3], label='frontier',
                            up_to=1.2 * max(kl for kl, _ in marks.values()))
        plots.draw_points(axes, marks)
        plots.legend(axes, loc='lower right')
    plots.save(figure, path)


def evaluate(save_dir, *, directory=None, **settings):
    """Compare the policy of a run with the best one possible: a table, evaluation.json and evaluation.png.

    save_dir: a run of train_policy, local or remote. directory: where its files are, if they are elsewhere. settings:
    HParams of this command. Returns the results.
    """
    directory = directory or save_dir
    settings, hparams = HParams(**settings), load_run_hparams(directory)
    precision.prepare('fp32', default_device())  # whatever the run was trained in
    models = load_models(directory, hparams)
    set_seed(settings.seed)
    results = measure(*models, hparams.task, queries_of(hparams, models[0].encoder, settings.queries), settings,
                      final_kl_coef(directory, hparams) if settings.kl_coef is None else settings.kl_coef)
    results = {'save_dir': save_dir, **results}
    output_dir = settings.output_dir or ('.' if storage.is_remote(directory) else directory)
    checkpoints.write_json(os.path.join(output_dir, 'evaluation.json'), results)
    picture(results, os.path.join(output_dir, 'evaluation.png'))
    say(*table(results), '', 'Saved evaluation.json and evaluation.png in '
        f'{save_dir if output_dir == directory else output_dir}')
    return results


def is_done(directory: str) -> bool:
    """Whether a run's directory holds an evaluation."""
    return os.path.exists(os.path.join(directory, 'evaluation.json'))


def measure(policy, reference, models, task, queries, settings, kl_coef):
    """The results of `evaluate` on `queries (queries, query_length)`, exact where responses are few enough."""
    responses = policy.model.hparams.n_vocab ** task.response_length
    exact = responses <= MOST_RESPONSES
    ref_logprobs, kl, scores = (enumerate_all(policy, reference, models, task, queries) if exact else
                                sample_many(policy, reference, models, task, queries, settings))
    results = {'exact': exact, 'queries': len(queries), 'responses': responses if exact else settings.samples,
               'kl_coef': kl_coef, 'rewards': {}}
    for name, (of_all, of_policy) in scores.items():
        own = name == next(iter(models))  # what the coefficient was set against
        points = compare(ref_logprobs, kl, of_all, of_policy, kl_coef=kl_coef if own else None, exact=exact)
        betas = optimum.beta_grid(of_all)
        frontier = optimum.frontier(ref_logprobs, of_all, betas) if exact else optimum.sampled_frontier(of_all, betas)
        whole = exact and task.query_dataset == 'reviews' and settings.queries is None
        results['rewards'][name] = {**summarised(points, whole=whole),
                                    'frontier': dict(zip(FRONTIER, map(torch.Tensor.tolist, frontier)))}
    return results
