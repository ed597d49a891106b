"""A reward that is known exactly: how positive a film review sounds (paper, section 3.1.1).

It plays the part of the sentiment classifier with which the paper simulates human labels.
"""

import functools
import inspect
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
from lm_human_preferences.language import encodings, tokenisers
from lm_human_preferences.synthetic import language_model, made_once
from lm_human_preferences.utils.core import default_device, one_thread

N_REVIEWS = 16384  # labelled reviews that the classifier is fitted to
L2_PENALTY = 0.1  # per review
CHECKPOINT = 'model.ckpt'  # in the directory in the cache


def can_judge(encoding: encodings.Encoding) -> bool:
    """Whether texts in `encoding` are film reviews, which are all that the known reward judges.

    They may be of a tokeniser that has a token for each of their words.
    """
    return encoding.name == encodings.Reviews.name or _words_of(encoding) is not None


def check_encoding(encoding: encodings.Encoding) -> None:
    """UserError unless the known reward can judge texts in `encoding`."""
    if not can_judge(encoding):
        raise UserError(
            f"the known reward ('mock') judges film reviews only, encoding 'reviews', not "
            f'{encoding.name!r}: set --task.policy.initial_model reviews'
        )


class KnownReward:
    """log p(positive | text) / p(negative | text) of a logistic regression on labelled reviews.

    Its features are the words of query and response, the pairs of neighbours, and the pairs with
    one word between. encoding: that of the policy whose tokens are scored; see check_encoding.
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
        words = _words_of(encoding)
        self._words = None if words is None else words.to(self.weights.device)

    def score(self, queries: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
        """Log odds (batch,) of queries with their responses.

        queries: (batch, query_length). responses: (batch, response_length).
        """
        tokens = torch.cat([queries, responses], dim=1).to(self.weights.device)
        if self._words is not None:
            tokens = self._words[tokens]
        return _log_odds(self.weights, tokens, encodings.Reviews.n_vocab).float()

    def parameters_by_name(self) -> dict[str, torch.nn.Parameter]:
        """Nothing: this reward is not part of a checkpoint."""
        return {}

    def get_params(self) -> list[torch.nn.Parameter]:
        """Nothing that a run trains or broadcasts."""
        return []


def _words_of(encoding: encodings.Encoding) -> torch.Tensor | None:
    """The token of `reviews` (n_vocab + 1,) for each of a tokeniser, padding for what is no word.

    None for `encoding` that is of no tokeniser, or of one whose tokens are not these words.
    """
    if not isinstance(encoding, tokenisers.TokeniserEncoding):
        return None
    encoder = encoding.get_encoder()
    try:
        tokens = encoder.encode(' '.join(reviews.WORDS))
    except UserError:  # it lacks a word
        return None
    if [encoder.decode([token]) for token in tokens] != list(reviews.WORDS):
        return None
    words = torch.full((encoding.n_vocab + 1,), encodings.Reviews.n_vocab)
    words[tokens] = torch.arange(len(tokens))
    return words


def _log_odds(
    weights: torch.Tensor,
    tokens: torch.Tensor,
    padding_token: int,
) -> torch.Tensor:
    """Log odds (batch,), float64, of `tokens (batch, length)`; padding is ignored wherever it is.

    weights: (3, n, n) of pairs (earlier, later) at distance 0 (a word with itself), 1 and 2, where
    n is n_vocab + 1.
    """
    n = weights.shape[1]
    order = (tokens == padding_token).int().argsort(dim=1, stable=True)
    tokens = tokens.gather(1, order)  # padding last
    total = torch.zeros(len(tokens), dtype=weights.dtype, device=weights.device)
    for distance in range(len(weights)):
        earlier = tokens[:, : tokens.shape[1] - distance]
        later = tokens[:, distance:]
        pairs = torch.where(later == padding_token, 0, earlier * n + later)
        present = (later != padding_token).double()
        total = total + (weights[distance].flatten()[pairs] * present).sum(1)
    return total


class _Solver(torch.optim.LBFGS):
    """PyTorch's, without the wrapper that imports the compiler first, for longer than a fit."""

    add_param_group = inspect.unwrap(torch.optim.LBFGS.add_param_group)


@functools.cache
def _weights() -> torch.Tensor:
    """The weights of `_log_odds`: from the cache, unless that cannot be written.

    A fit takes a second, and every process would need one.
    """
    depends_on = [sys.modules[__name__], reviews, language_model]
    try:
        path = made_once.directory('known_reward', _create, depends_on)
    except UserError:
        return _fit()
    return torch.from_numpy(np.array(Bundle(os.path.join(path, CHECKPOINT))['weights']))


def _create(path: str) -> None:
    """Fit the weights, and write them into the directory `path`."""
    checkpoints.save(path, CHECKPOINT, {'weights': _fit()})


def _fit() -> torch.Tensor:
    """The weights of `_log_odds` that explain labelled reviews best, given the L2 penalty.

    They are always the same.
    """
    encoder = encodings.Reviews.get_encoder()
    labelled = itertools.islice(reviews.labelled_reviews('train'), N_REVIEWS)
    texts, positive_shares = zip(*labelled, strict=True)
    tokens = language_model.as_batch(encoder, texts)
    targets = torch.tensor(positive_shares, dtype=torch.float64)
    n = encoder.padding_token + 1
    weights = torch.zeros(3, n, n, dtype=torch.float64, requires_grad=True)
    solver = _Solver([weights], max_iter=100, line_search_fn='strong_wolfe')

    def loss() -> torch.Tensor:
        """The loss over all reviews with the penalty; leaves its gradient in the weights."""
        weights.grad = None
        log_odds = _log_odds(weights, tokens, encoder.padding_token)
        error = F.binary_cross_entropy_with_logits(log_odds, targets)
        total = error + L2_PENALTY * weights.square().sum() / len(texts)
        total.backward()
        return total

    with one_thread():
        solver.step(loss)
    return weights.detach()
