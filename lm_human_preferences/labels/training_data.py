"""Labels to train on: labels loaded from --labels.source, or simulated labels.

Simulated labels are judged by score_small_tokens, which needs no model, or by KnownReward (section
3.1.1 of the paper).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lm_human_preferences import label_types, lm_tasks
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.reward_options import HParams
from lm_human_preferences.label_types import LabelType
from lm_human_preferences.synthetic.known_reward import KnownReward
from lm_human_preferences.utils.core import ceil_div

if TYPE_CHECKING:
    from lm_human_preferences.language.encodings import Encoding
    from lm_human_preferences.policy import Policy

TEST_SEED = 0
TEST_LABELS = 64  # minimum number of labels of the source 'test' if --labels.num_train is None
# Function from queries (batch, length) and responses (batch, length) to scores (batch,)
Score = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class LoadedLabels(NamedTuple):
    """Labels to train a reward model on, in the same order as in their source.

    tensors: {field: (labels, *schema.shape)}. notes: lines for the user. about: facts for run.json.
    """

    tensors: dict[str, torch.Tensor]
    notes: list[str]
    about: dict[str, Any]

    @property
    def digest(self) -> str:
        """Return the SHA-256 of all tensors, in hexadecimal."""
        found = hashlib.sha256()
        for field in sorted(self.tensors):
            values = self.tensors[field].cpu().contiguous()
            found.update(f'{field} {values.dtype} {tuple(values.shape)}'.encode())
            found.update(values.numpy().tobytes())
        return found.hexdigest()


def made_up(tensors: dict[str, torch.Tensor]) -> LoadedLabels:
    """Return simulated labels, `tensors {field: (labels, ...)}`, as LoadedLabels."""
    count = len(tensors['query'])
    return LoadedLabels(tensors, [], {'found': count, 'simulated': count})


def load_labels(
    settings: HParams,
    encoding: Encoding,
    comm: Comm | None = None,
    lines: Mapping[str, int] | None = None,
) -> LoadedLabels:
    """Load and check the labels of --labels.source, as the original's download_labels does.

    lines: for a folder, {labeller: number of lines to read}; None: all lines that rank 0 sees.
    """
    if settings.labels.source == 'test':
        return made_up(generate_labels(settings, encoding))
    from lm_human_preferences.labels import label_files  # label_files imports all label formats

    return LoadedLabels(*label_files.read(settings, encoding, comm or Comm(), lines))


def score_small_tokens(queries: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
    """Return minus the mean token id (batch,), float64: the reward of the source 'test'."""
    return -responses.double().sum(1) / responses.shape[1]


def scores_of(score: Score, questions: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return scores (batch, samples) of the samples in `questions` {field: ids (batch, length)}."""
    queries = questions['query']
    samples = [ids for field, ids in questions.items() if field != 'query']
    return torch.stack([score(queries, ids).cpu() for ids in samples], dim=1)


def check_num_train(settings: HParams) -> int:
    """Return --labels.num_train, which the source 'mock' needs; UserError if it is missing."""
    if settings.labels.num_train is None:
        raise UserError(
            f'{settings.labels.setting("source")} labels as many queries as you want: give'
            f' {settings.labels.option_name("num_train")}'
        )
    return settings.labels.num_train


def generate_labels(settings: HParams, encoding: Encoding) -> dict[str, torch.Tensor]:
    """Return labels of the source 'test' on random tokens: {field: (num_train, *schema.shape)}."""
    count = settings.labels.num_train
    if count is None:
        count = ceil_div(TEST_LABELS, settings.batch_size) * settings.batch_size
    label_type = label_types.get(settings.labels.type)
    schemas = label_type.question_schemas(**settings.task.lengths())
    generator = torch.Generator().manual_seed(TEST_SEED)
    questions = {}
    for field, schema in schemas.items():
        shape = (count, *schema.shape)
        questions[field] = torch.randint(encoding.n_vocab, shape, generator=generator)
    scores = scores_of(score_small_tokens, questions).float()
    return {**questions, **label_type.simulate(scores / encoding.n_vocab)}


def simulated_labels(settings: HParams, policy: Policy, comm: Comm) -> dict[str, torch.Tensor]:
    """Return labels {field: (num_train, ...)} of the source 'mock'; rank 0 makes all of them."""
    # Rank 0 alone uses the reward, but all ranks build it, so that they raise the same errors.
    reward = KnownReward(policy.trained_model.encoding, policy.device)
    count = check_num_train(settings)
    return comm.on_rank_0(lambda: _judged_labels(settings, policy, reward.score, count))


def _judged_labels(
    settings: HParams, policy: Policy, score: Score, count: int
) -> dict[str, torch.Tensor]:
    """Return `count` labels on responses of `policy`, judged by `score`."""
    task = settings.task
    label_type = label_types.get(settings.labels.type)
    sampler = lm_tasks.make_query_sampler(task, encoder=policy.encoder, batch_size=count)
    postprocess = lm_tasks.postprocess_fn_from_hparams(task, policy.padding_token, policy.encoder)
    queries = sampler()['tokens']
    questions = {'query': queries}
    for field in label_type.samples:
        responses = policy.respond(queries, length=task.response_length)['responses']
        questions[field] = postprocess(responses).cpu()
    answers = label_type.simulate(scores_of(score, questions), random.Random(TEST_SEED))
    if settings.labels.error:
        answers = _with_errors(answers, label_type, settings.labels.error)
    return {**questions, **answers}


def _with_errors(
    answers: dict[str, torch.Tensor], label_type: LabelType, error: float
) -> dict[str, torch.Tensor]:
    """Return `answers` {field: (labels, ...)} with a fraction `error` replaced by random ones."""
    count = len(next(iter(answers.values())))
    is_error = torch.rand(count) < error
    # label_type.by_chance is not used: with it, a seed would not give the same labels as before.
    by_chance = label_type.simulate(torch.randn(count, len(label_type.samples)))
    mixed = {}
    for field, values in answers.items():
        mixed[field] = values.clone()
        mixed[field][is_error] = by_chance[field][is_error]
    return mixed
