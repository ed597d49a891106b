"""Measurement of a run's models on all possible responses if they are few, else on samples."""

import collections
import contextlib
import io
import math
from typing import Any, NamedTuple

import torch

from lm_human_preferences import lm_tasks, rewards, storage
from lm_human_preferences.datasets import registry
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import UserError
from lm_human_preferences.evaluation import comparison, optimum, report
from lm_human_preferences.external_rewards.function import FunctionScorer
from lm_human_preferences.external_rewards.texts import TextReward
from lm_human_preferences.language import trained_models
from lm_human_preferences.language.encodings import Encoder, Encoding
from lm_human_preferences.policy import Policy
from lm_human_preferences.reward_sources import loading
from lm_human_preferences.reward_sources.sources import RewardSource
from lm_human_preferences.synthetic import known_reward
from lm_human_preferences.synthetic.known_reward import KnownReward
from lm_human_preferences.utils.logging import progress

MOST_RESPONSES = 300_000  # most possible responses that are enumerated; otherwise, sample
MOST_TEXTS = 16_384  # the same limit for a reward that reads texts, which is slower
QUERIES = 64  # default number of queries from an endless data set
DRAWS = 2048  # number of draws in which every query of an enumerable data set occurs
COLUMNS = ('kl', 'reward', 'standard_errors', 'effective_samples')  # the last two only for samples

RewardModels = dict[str, rewards.ScoringModel]


class Models(NamedTuple):
    """Models of a run, and its task; the first of `rewards` is what the policy was trained on."""

    policy: Policy
    reference: Policy
    rewards: RewardModels
    task: lm_tasks.TaskHParams


class Responses(NamedTuple):
    """Log-probabilities and {reward name: scores} of all responses to each query, or of samples.

    Tensors are (queries, responses).
    """

    ref_logprobs: torch.Tensor
    logprobs: torch.Tensor
    scores: dict[str, torch.Tensor]
    repeats: float = 0.0  # see repeats_of; 0 if all responses are enumerated


def load_models(save_dir: str, source: RewardSource, judge: str | None = None) -> Models:
    """Return the models of a run. judge: name or path of another reward, see loading.load_judge."""
    task = source.task
    policy, reference = load_policies(save_dir, task)
    encoding = policy.trained_model.encoding
    with contextlib.redirect_stdout(io.StringIO()):  # loading prints a line for each variable
        models = _reward_models(save_dir, source, encoding, reference)
        if judge is not None:
            models[report.JUDGE] = loading.load_judge(judge, encoding, task)
    return Models(policy, reference, models, task)


def load_policies(save_dir: str, task: lm_tasks.TaskHParams) -> tuple[Policy, Policy]:
    """Return the policy and the reference of a run."""
    policies = []
    for scope in ('policy', 'ref_policy'):
        model = trained_models.TrainedModel(scope, storage.join(save_dir, 'policy'), scope)
        settings = lm_tasks.policy_settings(task, model.encoding.get_encoder())
        with contextlib.redirect_stdout(io.StringIO()):  # loading prints a line per variable
            policies.append(Policy(model, scope=scope, only_samples=True, **settings))
    policy, reference = policies
    return policy, reference


def _reward_models(
    save_dir: str, source: RewardSource, encoding: Encoding, reference: Policy
) -> RewardModels:
    """Return {name: reward model} of a run.

    If the reward model was trained on film reviews, their known reward is measured, too.
    """
    trained_on = source.for_evaluation(save_dir, encoding, reference)
    if isinstance(trained_on, KnownReward):
        return {'known reward': trained_on}
    if isinstance(trained_on, TextReward):
        is_function = isinstance(trained_on.scorer, FunctionScorer)
        return {report.FUNCTION if is_function else report.CLASSIFIER: trained_on}
    models: RewardModels = {report.REWARD_MODEL: trained_on}
    is_about_reviews = source.task.query_dataset == known_reward.QUERIES
    if is_about_reviews and known_reward.can_judge(encoding):
        models['known reward'] = KnownReward(encoding)
    return models


def queries_of(
    source: RewardSource, encoder: Encoder, count: int | None, seed: int = 1
) -> torch.Tensor:
    """Return distinct test queries (queries, query_length). count: None for the default number."""
    task = source.task
    is_enumerable = registry.info(task.query_dataset).is_enumerable
    sampler = lm_tasks.make_query_sampler(
        task,
        encoder=encoder,
        batch_size=DRAWS if is_enumerable else count or QUERIES,
        mode='test',
        labels=source.label_source(),
    )
    queries = sampler()['tokens']
    if task.query_dataset not in registry.DATASETS:
        return _each_once(queries, task)
    if not is_enumerable:
        return queries
    queries = queries.unique(dim=0)
    if count is None:
        return queries
    # `unique` sorts, and the first queries resemble each other, so draw at random. A separate
    # generator leaves the global one unchanged, and with it what is sampled later.
    generator = torch.Generator().manual_seed(seed)
    return queries[torch.randperm(len(queries), generator=generator)[:count]]


def _each_once(queries: torch.Tensor, task: lm_tasks.TaskHParams) -> torch.Tensor:
    """Return the distinct ones of `queries (drawn, query_length)`; UserError if fewer than 2."""
    distinct = dict.fromkeys(map(tuple, queries.tolist()))
    if len(distinct) < 2:
        raise UserError(
            f'--task.query_dataset {task.query_dataset}: its test part has a single query; an'
            ' evaluation needs at least 2'
        )
    return torch.tensor(list(distinct))


def count_trained_on(
    task: lm_tasks.TaskHParams, encoder: Encoder, queries: torch.Tensor
) -> int | None:
    """Return how many of `queries (queries, query_length)` are also in the training split.

    None if the training split is downloaded, or generated without end.
    """
    name = task.query_dataset
    if registry.info(name).is_enumerable:
        return len(queries)  # training and test queries are drawn from the same set
    if name in registry.DATASETS:
        return None
    sampler = lm_tasks.make_query_sampler(task, encoder=encoder, batch_size=1)
    once = sampler.dataset.sequences(sampler.rules, repeat_count=1)
    trained_on = set(map(tuple, once))
    return sum(tuple(query) in trained_on for query in queries.tolist())


def enumerate_all(models: Models, queries: torch.Tensor) -> Responses:
    """Return log-probabilities and scores of all responses to `queries (queries, query_length)`."""
    policy, reference, judges, task = models
    length = task.response_length
    ref_logprobs, logprobs = [], []
    scores: dict[str, list[torch.Tensor]] = collections.defaultdict(list)
    for query in progress(
        queries.split(1), comm=Comm(), desc='all responses, by both models', unit='query'
    ):
        ref_logprobs.append(optimum.all_logprobs(reference, query, length))
        logprobs.append(optimum.all_logprobs(policy, query, length))
        for name, model in judges.items():
            scores[name].append(_all_scores(model, task, query, policy.model.sizes.n_vocab))
    of_all = {name: torch.cat(parts) for name, parts in scores.items()}
    return Responses(torch.cat(ref_logprobs), torch.cat(logprobs), of_all)


def _all_scores(
    model: rewards.ScoringModel, task: lm_tasks.TaskHParams, query: torch.Tensor, n_vocab: int
) -> torch.Tensor:
    """Return the scores (1, responses) of all possible responses to `query (1, query_length)`."""
    length = task.response_length
    if not task.truncates:
        if isinstance(model, rewards.TrainedRewardModel):
            return optimum.all_rewards(model, query, length)
        if isinstance(model, rewards.EnsembleReward):
            of_members = [optimum.all_rewards(each, query, length) for each in model.members]
            return torch.stack(of_members).mean(0)
    return optimum.all_scores(rewards.make_score_fn(task, model), query, n_vocab, length)


def sample_many(
    models: Models,
    queries: torch.Tensor,
    samples: int,
    batch_size: int,
    bar: str = 'samples of both models',
) -> Responses:
    """Sample responses to `queries (queries, query_length)` from both models, and score them.

    Each query gets 2 * `samples` responses, the reference's first. Their log-probabilities are
    those of optimum.mixture. bar: label of the progress bar.
    """
    policy, reference, judges, task = models
    score_fns = {name: rewards.make_score_fn(task, model) for name, model in judges.items()}
    log_ratios, of_policy = [], []
    scores: dict[str, list[torch.Tensor]] = collections.defaultdict(list)
    rows = queries.to(policy.device).repeat_interleave(samples, 0)
    parts = rows.split(batch_size)
    same = math.gcd(samples, batch_size)  # number of neighbouring rows with the same query
    length = task.response_length
    for part in progress(parts, comm=Comm(), desc=bar, unit='batch'):
        for model in (reference, policy):
            drawn = model.respond(part, length, same)
            other = reference if model is policy else policy
            of_other = other.analyze_responses(part, drawn['responses'], same)['logprobs']
            log_ratio = (drawn['logprobs'].double() - of_other).sum(1).cpu()
            log_ratios.append(log_ratio if model is policy else -log_ratio)
            for name, score_fn in score_fns.items():
                score, responses, _ = score_fn(part, drawn['responses'])
                scores[name].append(score.double().cpu())
        of_policy.append(responses.cpu())

    def by_query(parts: list[torch.Tensor]) -> torch.Tensor:
        of_models = [torch.cat(parts[model::2]).view(len(queries), -1) for model in range(2)]
        return torch.cat(of_models, dim=1)

    ref_logprobs, logprobs = optimum.mixture(by_query(log_ratios))
    of_samples = {name: by_query(parts) for name, parts in scores.items()}
    repeats = repeats_of(torch.cat(of_policy).unflatten(0, (len(queries), -1)))
    return Responses(ref_logprobs, logprobs, of_samples, repeats)


def repeats_of(responses: torch.Tensor) -> float:
    """Return the fraction of `responses (queries, samples, length)` that are their query's mode."""
    most = 0
    for of_query in responses:
        most += of_query.unique(dim=0, return_counts=True)[1].max().item()
    return most / (len(responses) * responses.shape[1])


def can_enumerate(models: Models) -> bool:
    """Return whether the possible responses are few enough to measure all of them."""
    count = models.policy.model.sizes.n_vocab**models.task.response_length
    reads_texts = any(isinstance(model, TextReward) for model in models.rewards.values())
    return count <= (MOST_TEXTS if reads_texts else MOST_RESPONSES)


def measure(
    models: Models,
    queries: torch.Tensor,
    kl_coef: float | None,
    *,
    samples: int | None,
    batch_size: int,
    are_chosen: bool,
) -> dict[str, Any]:
    """Return results on `queries (queries, query_length)` for JSON; exact if can_enumerate.

    samples: number of responses to sample from each model to each query, if not exact. are_chosen:
    whether the user gave the number of queries.
    """
    count = samples
    exact = can_enumerate(models)
    if exact:
        count = models.policy.model.sizes.n_vocab**models.task.response_length
        responses = enumerate_all(models, queries)
    else:
        assert samples is not None, 'see evaluate.fitted'
        responses = sample_many(models, queries, samples, batch_size)
    results: dict[str, Any] = {
        'exact': exact,
        'queries': len(queries),
        'responses': count,
        'kl_coef': kl_coef,
        'rewards': {},
    }
    trained_on = next(iter(models.rewards))  # the reward that the policy was trained on
    is_enumerable = registry.info(models.task.query_dataset).is_enumerable
    with_errors = are_chosen or not (exact and is_enumerable)
    log_rho, log_pi, all_scores, repeats = responses
    for name, scores in all_scores.items():
        # The KL coefficient, and so the optimum, belongs to the reward that was trained on.
        of_own = {'kl_coef': kl_coef, 'chooser': None}
        of_other = {'kl_coef': None, 'chooser': all_scores[trained_on]}
        settings = of_own if name == trained_on else of_other
        if exact:
            points = comparison.compare(log_rho, log_pi, scores, **settings)
        else:
            points = comparison.compare_samples(
                log_rho, log_pi, scores, repeats=repeats, **settings
            )
        results['rewards'][name] = {
            **comparison.summarize(points, with_errors=with_errors),
            report.FRONTIER: _frontier(log_rho, scores, exact),
        }
    return results


def _frontier(
    ref_logprobs: torch.Tensor, scores: torch.Tensor, exact: bool
) -> dict[str, list[float]]:
    betas = optimum.beta_grid(scores)
    if betas[0] == 0:  # all responses to a query are equally good: the frontier is a point
        betas = torch.ones(1)
    if exact:
        columns = optimum.frontier(ref_logprobs, scores, betas)
    else:
        columns = optimum.sampled_frontier(ref_logprobs, scores, betas)
    return {name: column.tolist() for name, column in zip(COLUMNS, columns)}
