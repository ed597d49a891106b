"""Labels that no person gave: for the sources 'test' and 'mock' of --labels.source.

'test' prefers small token ids and needs no model. 'mock' judges responses of the initial policy by
the known reward, as section 3.1.1 of the paper does by a sentiment classifier.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from lm_human_preferences import label_types, lm_tasks
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.reward_options import HParams
from lm_human_preferences.label_types import LabelType
from lm_human_preferences.labels.simulated_labeller import small_tokens
from lm_human_preferences.synthetic.known_reward import KnownReward
from lm_human_preferences.training import memory
from lm_human_preferences.utils.core import ceil_div

if TYPE_CHECKING:
    from lm_human_preferences.distributed.comm import Comm
    from lm_human_preferences.language.encodings import Encoding
    from lm_human_preferences.policy import Policy

TEST_SEED = 0
TEST_LABELS = 64  # labels of the source 'test' where --labels.num_train does not say, at least


def check_num_train(hparams: HParams) -> int:
    """--labels.num_train, which the source 'mock' needs; UserError where it is missing."""
    if hparams.labels.num_train is None:
        raise UserError(
            f'{hparams.labels.setting("source")} answers as many queries as it is asked: give'
            f' {hparams.labels.option_name("num_train")}'
        )
    return hparams.labels.num_train


def check_memory(count: int, hparams: HParams) -> None:
    """UserError where so many labels do not fit into memory."""
    schemas = label_types.get(hparams.labels.type).schemas(**hparams.task.lengths())
    numbers = sum(math.prod(schema.shape) for schema in schemas.values())
    option = hparams.labels.option_name('num_train')
    memory.check_fits(option, count, 8 * numbers, memory.on_host())


def generate_labels(hparams: HParams, encoding: Encoding) -> dict[str, torch.Tensor]:
    """Labels of the source 'test': {field: tensor (num_train, *schema.shape)}.

    Queries and responses are random; the smaller the token ids of a response are, the better.
    """
    count = hparams.labels.num_train
    if count is None:
        count = ceil_div(TEST_LABELS, hparams.batch_size) * hparams.batch_size
    else:
        check_memory(count, hparams)
    label_type = label_types.get(hparams.labels.type)
    schemas = label_type.question_schemas(**hparams.task.lengths())
    generator = torch.Generator().manual_seed(TEST_SEED)
    questions = {}
    for field, schema in schemas.items():
        shape = (count, *schema.shape)
        questions[field] = torch.randint(encoding.n_vocab, shape, generator=generator)
    rewards = small_tokens(
        [{field: ids[row].tolist() for field, ids in questions.items()} for row in range(count)]
    )
    return {**questions, **label_type.simulate(torch.tensor(rewards) / encoding.n_vocab)}


def simulated_labels(
    hparams: HParams,
    policy: Policy,
    comm: Comm,
) -> dict[str, torch.Tensor]:
    """Labels of the source 'mock': {field: tensor (num_train, *schema.shape)}.

    hparams: train_reward's; policy: the initial one, which responds to the queries. Rank 0 makes
    all labels and every rank gets the same ones, so they do not depend on the number of ranks.
    """
    # Every rank checks and builds the reward, so that all of them end with the same error.
    reward = KnownReward(policy.trained_model.encoding, policy.device)
    count = check_num_train(hparams)
    check_memory(count, hparams)
    labels = _judged_labels(hparams, policy, reward, count) if comm.rank == 0 else None
    labels = comm.all_gather_object(labels)[0]
    assert labels is not None
    return labels


def _judged_labels(
    hparams: HParams, policy: Policy, reward: KnownReward, count: int
) -> dict[str, torch.Tensor]:
    """`count` labels on responses of `policy`, as `reward` judges them."""
    task = hparams.task
    label_type = label_types.get(hparams.labels.type)
    sampler = lm_tasks.make_query_sampler(hparams=task, encoder=policy.encoder, batch_size=count)
    postprocess = lm_tasks.postprocess_fn_from_hparams(task, policy.padding_token, policy.encoder)
    queries = sampler()['tokens']
    samples = {}
    for field in label_type.samples:
        responses = policy.respond(queries, length=task.response_length)['responses']
        samples[field] = postprocess(responses).cpu()
    scores = [reward.score(queries, responses) for responses in samples.values()]
    answers = label_type.simulate(torch.stack(scores, dim=1).cpu())
    if hparams.labels.error:
        answers = _with_errors(answers, label_type, hparams.labels.error)
    return {'query': queries, **samples, **answers}


def _with_errors(
    answers: dict[str, torch.Tensor], label_type: LabelType, error: float
) -> dict[str, torch.Tensor]:
    """`answers` {field: (labels, ...)}, of which a share `error` is replaced by random ones."""
    count = len(next(iter(answers.values())))
    is_error = torch.rand(count) < error
    # Not label_type.by_chance: that draws from elsewhere, and each seed would get other labels.
    by_chance = label_type.simulate(torch.randn(count, len(label_type.samples)))
    mixed = {}
    for field, values in answers.items():
        mixed[field] = values.clone()
        mixed[field][is_error] = by_chance[field][is_error]
    return mixed
