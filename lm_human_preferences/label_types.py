"""What people were asked and what they answered: the label types of a reward model (the original's label_types.py)."""
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F

from lm_human_preferences.utils.core import Schema, pearson_r
from lm_human_preferences.utils.errors import UserError

NUMBER = Schema(torch.float32, ())


def _tokens(length):
    return Schema(torch.int64, (length,))


class LabelType(ABC):
    """A question about responses and the loss that its answers give.

    `reward_model` is a function of (queries, responses), see rewards.RewardModel.get_rewards_op; `labels` a dict of
    batched tensors.
    """

    @abstractmethod
    def question_schemas(self, *, query_length, response_length):
        """Schemas of the query and of the responses that were shown."""

    @abstractmethod
    def label_schemas(self):
        """Schemas of the answer."""

    @abstractmethod
    def loss(self, reward_model, labels):
        """Statistics of a batch, scalars, of which 'loss' is to be minimised."""

    def target_scales(self, labels):
        """Numbers (batch,) on the scale that rewards should have, or None where labels tell nothing of it."""
        return None


class PickBest(LabelType):
    """The best of N responses: cross entropy of a softmax over their rewards (paper, equation 1)."""

    def __init__(self, num_responses):
        self.num_responses = num_responses

    def question_schemas(self, *, query_length, response_length):
        samples = {f'sample{i}': _tokens(response_length) for i in range(self.num_responses)}
        return {'query': _tokens(query_length), **samples}

    def label_schemas(self):
        return {'best': Schema(torch.int64, ())}

    def loss(self, reward_model, labels):
        samples = torch.stack([labels[f'sample{i}'] for i in range(self.num_responses)], dim=1)
        logits = reward_model(labels['query'], samples)
        error = F.cross_entropy(logits, labels['best'].to(logits.device))
        return {'loss': error, 'error': error}


class ScalarRating(LabelType):
    """One response with a score: squared error."""

    def question_schemas(self, *, query_length, response_length):
        return {'query': _tokens(query_length), 'sample': _tokens(response_length)}

    def label_schemas(self):
        return {'score': NUMBER}

    def target_scales(self, labels):
        return labels['score']

    def loss(self, reward_model, labels):
        predicted = reward_model(labels['query'], labels['sample'])
        score = labels['score'].to(predicted.device)
        error = F.mse_loss(predicted, score)
        var, mean = torch.var_mean(score, correction=0)
        corr = pearson_r(score, predicted.detach())
        return {'loss': error, 'error': error, 'label_mean': mean, 'label_var': var, 'corr': corr}


class ScalarComparison(LabelType):
    """How much better the second of two responses is: squared error of the difference of rewards."""

    def question_schemas(self, *, query_length, response_length):
        sample = _tokens(response_length)
        return {'query': _tokens(query_length), 'sample0': sample, 'sample1': sample}

    def label_schemas(self):
        return {'difference': NUMBER}

    def target_scales(self, labels):
        return labels['difference'] / 2  # a difference of two rewards varies twice as much as one

    def loss(self, reward_model, labels):
        rewards = reward_model(labels['query'], torch.stack([labels['sample0'], labels['sample1']], dim=1))
        predicted = rewards[:, 1] - rewards[:, 0]
        error = F.mse_loss(predicted, labels['difference'].to(predicted.device))
        return {'loss': error, 'error': error}


def get(name):
    """The label type called `name`: scalar_rating, scalar_compare, or best_of_N."""
    if name == 'scalar_rating':
        return ScalarRating()
    if name == 'scalar_compare':
        return ScalarComparison()
    if name.startswith('best_of_'):
        try:
            return PickBest(int(name.removeprefix('best_of_')))
        except ValueError:
            pass
    raise UserError(f'--labels.type {name!r} is none of best_of_N (as in best_of_4), scalar_rating, scalar_compare')
