"""Most probable linear head for labels, and its uncertainty (Laplace's approximation)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from lm_human_preferences.label_types import LabelType
from lm_human_preferences.training.optimizer import LBFGS

Labels = dict[str, torch.Tensor]
MOST_ITERATIONS = 1000
SMALLEST_GRADIENT = 1e-6  # gradient, in nats per unit of a weight, below which L-BFGS stops
SMALLEST_CHANGE = 1e-10  # change of the loss, in nats, below which L-BFGS stops
ALL_EQUAL = 1e-6  # labels count as equal if they vary by at most this fraction of the largest label
LEAST_KNOWN = 1e-9  # smallest relative reduction of a direction's variance by the labels


def standardized(labels: Labels, label_type: LabelType) -> tuple[Labels, float, float]:
    """Return (labels, unit, origin), where numeric labels are (label - origin) / unit.

    They then have a root mean square of 1, so that nothing depends on their unit.
    Labels that are not numeric are returned unchanged.
    """
    if not label_type.is_numeric:
        return labels, 1.0, 0.0
    values = labels[label_type.field].double()
    origin = values.mean() if len(label_type.samples) == 1 else values.new_zeros(())
    values = values - origin
    unit = values.square().mean().sqrt().item()
    if unit <= ALL_EQUAL * labels[label_type.field].abs().max().item():
        unit = 1.0
    return {**labels, label_type.field: values / unit}, unit, origin.item()


class Problem(NamedTuple):
    """Labels with the features (labels, n, features) of their responses, in float64.

    Numeric labels are standardised; the loss takes the variance of their noise as 1.
    """

    features: torch.Tensor
    labels: Labels
    label_type: LabelType

    def rows(self, chosen: torch.Tensor) -> Problem:
        """Return a Problem with only the `chosen` labels (a bool mask, or indices of labels)."""
        labels = {field: values[chosen] for field, values in self.labels.items()}
        return self._replace(features=self.features[chosen], labels=labels)

    def surprise(self, scores: torch.Tensor) -> torch.Tensor:
        """Return minus the labels' log-likelihood, up to a constant, given `scores (labels, n)`."""
        mean = self.label_type.loss_of(scores, self.labels)['loss']
        return (0.5 if self.label_type.is_numeric else 1.0) * len(scores) * mean

    def surprises(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the negative log-likelihood of each label (labels,), up to a constant."""
        rows = torch.arange(len(scores)).split(1)
        return torch.stack([self.rows(row).surprise(scores[row]) for row in rows])

    def guess(self) -> float:
        """Return the best constant score: the mean of ratings; 0 for comparisons."""
        is_rated = self.label_type.is_numeric and self.features.shape[1] == 1
        return self.labels[self.label_type.field].mean().item() if is_rated else 0.0


def fit(
    problem: Problem, strength: float, start: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the most probable weight (features,) and bias () of a head for the labels.

    The prior of each weight is a Gaussian around 0 of precision `strength`, so the problem is
    strictly convex if the label type's loss is convex. start: (weight, bias); None: zeros.
    """
    features = problem.features
    if start is None:
        start = features.new_zeros(features.shape[-1]), features.new_zeros(())
    weight, bias = (each.clone().requires_grad_() for each in start)
    optimizer = LBFGS(
        [weight, bias],
        max_iter=MOST_ITERATIONS,
        tolerance_grad=SMALLEST_GRADIENT,
        tolerance_change=SMALLEST_CHANGE,
        history_size=20,
        line_search_fn='strong_wolfe',
    )

    def closure() -> torch.Tensor:
        """Return the loss, after computing its gradients."""
        weight.grad = bias.grad = None
        of_labels = problem.surprise(features @ weight + bias)
        loss = of_labels + strength / 2 * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return weight.detach(), bias.detach()


def posterior(problem: Problem, strength: float) -> dict[str, torch.Tensor]:
    """Return {field of Head: value} for the most probable head and that head's uncertainty.

    strength: precision of the prior; for numeric labels, multiplied by the variance of their noise,
    which is estimated here. The fields are weight, bias, known and doubt.
    """
    weight, bias = fit(problem, strength)
    scores = problem.features @ weight + bias
    values, vectors = torch.linalg.eigh(_curvature(problem, scores))
    roots = vectors * values.clamp(min=0).sqrt().unsqueeze(1)
    rows = (roots.transpose(1, 2) @ problem.features).flatten(0, 1)
    if len(rows) > rows.shape[1]:
        rows = torch.linalg.qr(rows, mode='r').R
    _, singular, directions = torch.linalg.svd(rows, full_matrices=False)
    precision = singular.square()
    fraction = precision / (precision + strength)
    is_known = fraction > LEAST_KNOWN
    known = directions[is_known] * fraction[is_known].sqrt().unsqueeze(1)
    variance = 1 / strength
    if problem.label_type.is_numeric:
        free = len(scores) - (scores.shape[1] == 1)  # a head for ratings also fits a bias
        left = 2 * problem.surprise(scores) + strength * weight.square().sum()
        variance *= left.item() / max(free, 1)
    doubt = torch.tensor(variance**0.5)
    return {'weight': weight, 'bias': bias, 'known': known, 'doubt': doubt}


def _curvature(problem: Problem, scores: torch.Tensor) -> torch.Tensor:
    """Return second derivatives (labels, n, n) of each label's loss with respect to its scores."""
    scores = scores.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(problem.surprise(scores), scores, create_graph=True)
    rows = []
    for column in gradient.unbind(1):
        (row,) = torch.autograd.grad(column.sum(), scores, retain_graph=True)
        rows.append(row)
    return torch.stack(rows, dim=1)
