"""Exactly known reward of film reviews: log odds that a review is positive (paper, 3.1.1)."""

import functools
import itertools
import os
import sys

import numpy as np
import torch
import torch.nn.functional as F

from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.checkpointing.tf_bundle import Bundle
from lm_human_preferences.datasets import reviews
from lm_human_preferences.errors import UserError
from lm_human_preferences.language import encodings
from lm_human_preferences.language.networks import reviews_model
from lm_human_preferences.machine.hardware import default_device
from lm_human_preferences.training.optimizer import LBFGS
from lm_human_preferences.utils.core import one_thread

N_REVIEWS = 16384  # number of labelled reviews that the classifier is fitted to
L2_PENALTY = 0.1  # factor of the loss term: sum of squared weights / number of reviews
QUERIES = 'reviews'  # data set whose texts the known reward can score
CHECKPOINT = 'model.ckpt'  # name of the cached file that holds the known reward's weights


def can_judge(encoding: encodings.Encoding) -> bool:
    """Return whether `encoding` is the encoding of film reviews."""
    return encoding.name == encodings.Reviews.name


def check_encoding(encoding: encodings.Encoding) -> None:
    """Raise UserError unless the known reward can judge texts in `encoding`."""
    if not can_judge(encoding):
        raise UserError(
            f"the known reward ('mock') judges film reviews only, in the encoding 'reviews', not in"
            f' {encoding.name!r}: give another reward, or train with --task.policy.initial_model'
            ' reviews'
        )


class KnownReward:
    """log p(positive | text) / p(negative | text) of a logistic regression on labelled reviews.

    Features are the words of query and response, pairs of neighbouring words, and pairs of words
    with one word between. encoding: encoding of the scored tokens, see check_encoding.
    """

    def __init__(
        self,
        encoding: encodings.Encoding,
        device: torch.device | str | None = None,
    ) -> None:
        check_encoding(encoding)
        self.encoder = encoding.get_encoder()
        self.padding_token = self.encoder.padding_token
        self.weights = _weights().to(device or default_device())

    def score(self, queries: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
        """Return log odds (batch,) of queries (batch, length) with responses (batch, length)."""
        tokens = torch.cat([queries, responses], dim=1).to(self.weights.device)
        return _log_odds(self.weights, tokens, self.padding_token).float()


def _log_odds(weights: torch.Tensor, tokens: torch.Tensor, padding_token: int) -> torch.Tensor:
    """Return log odds (batch,), float64, that reviews `tokens` (batch, length) are positive.

    weights: (3, n, n), a weight for each pair (earlier, later) at distance 0 (a word with itself),
    1 and 2; n is n_vocab + 1. `tokens` may include padding.
    """
    n = weights.shape[1]
    order = (tokens == padding_token).int().argsort(dim=1, stable=True)
    tokens = tokens.gather(1, order)  # this moves padding to the end
    total = torch.zeros(len(tokens), dtype=weights.dtype, device=weights.device)
    for distance in range(len(weights)):
        earlier = tokens[:, : tokens.shape[1] - distance]
        later = tokens[:, distance:]
        pairs = torch.where(later == padding_token, 0, earlier * n + later)
        present = (later != padding_token).double()
        total = total + (weights[distance].flatten()[pairs] * present).sum(1)
    return total


@functools.cache
def _weights() -> torch.Tensor:
    """Return the known reward's weights from the cache; if no cache can be written, fit them."""

    def create(path: str) -> None:
        checkpoints.save(path, CHECKPOINT, {'weights': _fit()})

    depends_on = [sys.modules[__name__], reviews, reviews_model]
    try:
        path = reviews_model.computed_once('known_reward', create, depends_on)
    except UserError:
        return _fit()
    return torch.from_numpy(np.array(Bundle(os.path.join(path, CHECKPOINT))['weights']))


def _fit() -> torch.Tensor:
    """Fit the known reward's weights to labelled reviews; the result is the same each time."""
    encoder = encodings.Reviews.get_encoder()
    labelled = itertools.islice(reviews.labelled_reviews('train'), N_REVIEWS)
    texts, positive_shares = zip(*labelled, strict=True)
    tokens = reviews_model.as_batch(encoder, texts)
    targets = torch.tensor(positive_shares, dtype=torch.float64)
    n = encoder.padding_token + 1
    weights = torch.zeros(3, n, n, dtype=torch.float64, requires_grad=True)
    solver = LBFGS([weights], max_iter=100, line_search_fn='strong_wolfe')

    def loss() -> torch.Tensor:
        """Return the loss with the L2 penalty; set `weights.grad`."""
        weights.grad = None
        log_odds = _log_odds(weights, tokens, encoder.padding_token)
        error = F.binary_cross_entropy_with_logits(log_odds, targets)
        total = error + L2_PENALTY * weights.square().sum() / len(texts)
        total.backward()
        return total

    with one_thread():
        solver.step(loss)
    return weights.detach()
