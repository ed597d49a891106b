"""Measurement of a run's models on all possible responses if they are few, else on samples."""

import collections
import math
from typing import Any, NamedTuple

import torch

from lm_human_preferences import lm_tasks, rewards, storage
from lm_human_preferences.datasets import registry
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.evaluation import comparison, optimum, report
from lm_human_preferences.language import trained_models
from lm_human_preferences.language.encodings import Encoder, Encoding
from lm_human_preferences.policy import Policy
from lm_human_preferences.reward_sources import loading
from lm_human_preferences.reward_sources.function import FunctionScorer
from lm_human_preferences.reward_sources.sources import RewardSource
from lm_human_preferences.reward_sources.texts import TextReward
from lm_human_preferences.synthetic import known_reward
from lm_human_preferences.synthetic.known_reward import KnownReward
from lm_human_preferences.utils.logging import progress

MOST_RESPONSES = 300_000  # maximum number of responses to enumerate; beyond, responses are sampled
MOST_TEXTS = 16_384  # maximum number of responses to enumerate for slow rewards that read texts
QUERIES = 64  # default number of queries from an endless data set
DRAWS = 2048  # number of draws from a finite data set after which every query has occurred

RewardModels = dict[str, rewards.ScoringModel]


class Models(NamedTuple):
    """Models of a run, and the run's task; the policy was trained on the first of the `rewards`."""

    policy: Policy
    reference: Policy
    rewards: RewardModels
    task: lm_tasks.TaskHParams


class Responses(NamedTuple):
    """Log-probabilities and {reward name: scores} of responses, which are all possible or sampled.

    Tensors are (queries, responses).
    """

    ref_logprobs: torch.Tensor
    logprobs: torch.Tensor
    scores: dict[str, torch.Tensor]
    repeats: float = 0.0  # fraction of samples that are their query's most frequent response


def load_models(save_dir: str, source: RewardSource, judge: str | None = None) -> Models:
    """Return the models of a run. judge: name or path of another reward that is measured, too."""
    policy, reference = load_policies(save_dir, source.task)
    encoding = policy.trained_model.encoding
    models = _reward_models(save_dir, source, encoding, reference)
    if judge is not None:
        models[report.JUDGE] = loading.load_judge(judge, encoding, source.task)
    return Models(policy, reference, models, source.task)


def load_policies(save_dir: str, task: lm_tasks.TaskHParams) -> tuple[Policy, Policy]:
    """Return the policy and the reference policy of a run."""
    policies = []
    for scope in ('policy', 'ref_policy'):
        model = trained_models.TrainedModel(scope, storage.join(save_dir, 'policy'), scope)
        settings = lm_tasks.policy_settings(task, model.encoding.get_encoder())
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
    queries = sampler()['tokens'].unique(dim=0)
    # Queries are chosen at random, because `unique` sorts similar queries together.
    # A separate generator is used, because the global generator samples the responses later.
    generator = torch.Generator().manual_seed(seed)
    return queries[torch.randperm(len(queries), generator=generator)[:count]]


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
    is_network = isinstance(model, rewards.TrainedRewardModel | rewards.EnsembleReward)
    if is_network and not task.truncates:
        return optimum.all_rewards(model, query, n_vocab, task.response_length)
    score_fn = rewards.make_score_fn(task, model)
    return optimum.all_scores(score_fn, query, n_vocab, task.response_length)


def sample_many(models: Models, queries: torch.Tensor, samples: int, batch_size: int) -> Responses:
    """Sample and score responses of policy and reference to `queries (queries, query_length)`.

    Each query gets 2 * `samples` responses, the reference's first. Their log-probabilities are
    those of optimum.mixture.
    """
    policy, reference, judges, task = models
    score_fns = {name: rewards.make_score_fn(task, model) for name, model in judges.items()}
    log_ratios, of_policy = [], []
    scores: dict[str, list[torch.Tensor]] = collections.defaultdict(list)
    rows = queries.to(policy.device).repeat_interleave(samples, 0)
    parts = rows.split(batch_size)
    same = math.gcd(samples, batch_size)  # number of neighbouring rows with the same query
    length = task.response_length
    for part in progress(parts, comm=Comm(), desc='samples of both models', unit='batch'):
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
    """Return the fraction of `responses (queries, samples, length)` equal to their query's mode."""
    most = 0
    for of_query in responses:
        most += of_query.unique(dim=0, return_counts=True)[1].max().item()
    return most / (len(responses) * responses.shape[1])


def can_enumerate(models: Models) -> bool:
    """Return whether the possible responses are few enough to measure all of them."""
    count = models.policy.model.sizes.n_vocab**models.task.response_length
    reads_texts = any(isinstance(model, TextReward) for model in models.rewards.values())
    most = MOST_TEXTS if reads_texts else MOST_RESPONSES
    return count <= most and not models.task.stops


def measure(
    models: Models, queries: torch.Tensor, kl_coef: float | None, samples: int, batch_size: int
) -> dict[str, Any]:
    """Return, as JSON values, the results of an evaluation on `queries (queries, query_length)`.

    samples: number of responses to sample from each model to each query, unless can_enumerate.
    """
    exact = can_enumerate(models)
    if exact:
        responses = enumerate_all(models, queries)
        samples = responses.logprobs.shape[1]
    else:
        responses = sample_many(models, queries, samples, batch_size)
    found = {}
    own = next(iter(models.rewards))  # the reward that the policy was trained on
    log_rho, log_pi, all_scores, repeats = responses
    for name, scores in all_scores.items():
        # kl_coef defines an optimum only for the reward that the policy was trained on.
        coefficient, chooser = (kl_coef, None) if name == own else (None, all_scores[own])
        if exact:
            points = comparison.compare(log_rho, log_pi, scores, coefficient, chooser)
        else:
            points = comparison.compare_samples(
                log_rho, log_pi, scores, coefficient, chooser, repeats
            )
        found[name] = {
            **comparison.summarize(points, with_errors=not exact),
            report.FRONTIER: comparison.known_frontier(log_rho, scores, exact=exact),
        }
    return {
        'exact': exact,
        'queries': len(queries),
        'responses': samples,
        'kl_coef': kl_coef,
        'rewards': found,
    }
