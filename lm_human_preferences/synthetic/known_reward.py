"""A reward that is known, and the human who judges by it (paper, section 3.1.1): how positive a
film review sounds."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from lm_human_preferences import lm_tasks
from lm_human_preferences.datasets import reviews
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.train_reward import HParams
from lm_human_preferences.labels import files as label_files
from lm_human_preferences.language import encodings
from lm_human_preferences.synthetic.language_model import as_batch
from lm_human_preferences.utils.core import default_device, one_thread

if TYPE_CHECKING:
    from lm_human_preferences.distributed.comm import Comm
    from lm_human_preferences.policy import Policy

READ, PENALTY = (
    16384,
    0.1,
)  # labelled reviews that the classifier learns from; its L2 penalty per review


def check_encoding(encoding: encodings.Encoding) -> None:
    """UserError unless `encoding` is that of the reviews, which the known reward judges."""
    if encoding.name != encodings.Reviews.name:
        raise UserError(
            f"the known reward ('mock') judges film reviews only, encoding 'reviews', not "
            f'{encoding.name!r}: set --task.policy.initial_model reviews'
        )


class MockRewardModel:
    """log p(positive | text) / p(negative | text) of a logistic regression on labelled reviews.

    Its features are the words of query and response, the pairs of neighbours, and the pairs with
    one word between. encoding: that of the policy, whose tokens are scored; UserError unless it is
    that of the reviews.
    """

    def __init__(
        self,
        encoding: encodings.Encoding,
        device: torch.device | str | None = None,
    ) -> None:
        check_encoding(encoding)
        self.encoder = encoding.get_encoder()
        self.padding_token = self.encoder.padding_token
        self.weights = _fit().to(device or default_device())

    def score(self, queries: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
        """Log odds (batch,) of `queries (batch, query_length)` with `responses (batch,
        response_length)`."""
        tokens = torch.cat([queries, responses], dim=1).to(self.weights.device)
        return _log_odds(self.weights, tokens, self.padding_token).float()

    def tf_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Nothing: this reward is not part of a checkpoint."""
        return {}

    def get_params(self) -> list[torch.nn.Parameter]:
        """Nothing that a run trains or shares."""
        return []


def _log_odds(
    weights: torch.Tensor,
    tokens: torch.Tensor,
    padding_token: int,
) -> torch.Tensor:
    """Log odds (batch,), float64, of `tokens (batch, length)`; padding anywhere counts for nothing.

    weights: (3, n, n) of pairs (earlier, later) at distance 0 (a word with itself), 1 and 2, where
    n is n_vocab + 1.
    """
    n = weights.shape[1]
    order = (tokens == padding_token).int().argsort(dim=1, stable=True)
    tokens = tokens.gather(1, order)  # padding last
    total: torch.Tensor | int = 0
    for distance in range(len(weights)):
        earlier, later = tokens[:, : tokens.shape[1] - distance], tokens[:, distance:]
        pairs = torch.where(later == padding_token, 0, earlier * n + later)
        present = (later != padding_token).double()
        total = total + (weights[distance].flatten()[pairs] * present).sum(1)
    assert isinstance(total, torch.Tensor)
    return total


@functools.cache
def _fit() -> torch.Tensor:
    """The weights of `_log_odds` that explain labelled reviews best, with a small penalty; always
    the same."""
    encoder = encodings.Reviews.get_encoder()
    texts, liked = zip(*itertools.islice(reviews.labelled_reviews('train'), READ))
    tokens = as_batch(encoder, texts)
    targets, n = torch.tensor(liked, dtype=torch.float64), encoder.padding_token + 1
    weights = torch.zeros(3, n, n, dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS([weights], max_iter=100, line_search_fn='strong_wolfe')

    def loss() -> torch.Tensor:
        """The error of all reviews and the penalty; leaves their gradient in the weights."""
        solver.zero_grad()
        error = F.binary_cross_entropy_with_logits(
            _log_odds(weights, tokens, encoder.padding_token), targets
        )
        total = error + PENALTY * weights.square().sum() / len(texts)
        total.backward()
        return total

    with one_thread():
        solver.step(loss)
    return weights.detach()


def simulated_labels(
    hparams: HParams,
    policy: Policy,
    comm: Comm,
) -> dict[str, torch.Tensor]:
    """What somebody who judges by the known reward answers about `labels.num_train` queries, N
    responses to each.

    hparams: train_reward's; policy: the initial one, whose responses are judged. Rank 0 asks, so
    that the labels, the same on every rank, do not depend on the number of ranks. Returns {field:
    tensor (num_train, *schema.shape)}.
    """
    reward, count = (
        MockRewardModel(policy.trained_model.encoding, policy.device),
        hparams.labels.num_train,
    )
    if count is None:
        raise UserError(
            '--labels.source mock answers as many queries as it is asked: give --labels.num_train'
        )
    schemas, labels = label_files.schemas_of(hparams), None
    label_files.check_labels_fit(count, schemas)
    if comm.rank == 0:
        sampler = lm_tasks.make_query_sampler(
            hparams=hparams.task, encoder=policy.encoder, batch_size=count
        )
        postprocess = lm_tasks.postprocess_fn_from_hparams(hparams.task, policy.padding_token)
        queries = sampler()['tokens']
        samples = {
            field: postprocess(
                policy.respond(queries, length=hparams.task.response_length)['responses']
            ).cpu()
            for field in schemas
            if field.startswith('sample')
        }
        liking = torch.stack(
            [reward.score(queries, responses) for responses in samples.values()], dim=1
        )
        labels = label_files.answered({'query': queries, **samples}, liking.cpu(), schemas)
    labels = comm.all_gather_object(labels)[0]
    assert labels is not None
    return labels
