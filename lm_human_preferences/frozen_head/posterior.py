"""The most probable linear head for labels, and what they leave open (Laplace's approximation)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from lm_human_preferences.label_types import LabelType

Labels = dict[str, torch.Tensor]
MOST_ITERATIONS = 1000
SMALLEST_GRADIENT = 1e-6  # in nats per unit of a weight, where a fit ends
SMALLEST_CHANGE = 1e-10  # in nats
SMALLEST_VARIANCE = 1e-12  # of numbers that are labels, which are all the same below it
LEAST_KNOWN = 1e-9  # share of the prior's variance, below which labels have told nothing


def scale_of(labels: Labels, label_type: LabelType) -> float:
    """Return the factor that makes nats of the loss of a label.

    Squared errors are divided by twice the variance that guessing leaves. That is more than the
    noise, for which the strength of the prior, chosen by cross-validation, makes up in the fit.
    """
    if not label_type.is_numeric:
        return 1.0
    variance = label_type.guessing_loss(labels)
    return 0.5 / variance if variance > SMALLEST_VARIANCE else 1.0


class Problem(NamedTuple):
    """Labels with the features (labels, n, features) of their responses, float64, and a scale."""

    features: torch.Tensor
    labels: Labels
    label_type: LabelType
    scale: float

    def rows(self, chosen: torch.Tensor) -> Problem:
        """Return the problem of the labels where `chosen (labels,)`, bool or indices."""
        labels = {field: values[chosen] for field, values in self.labels.items()}
        return self._replace(features=self.features[chosen], labels=labels)

    def surprise(self, scores: torch.Tensor) -> torch.Tensor:
        """Return minus the log-likelihood under `scores (labels, n)`; see scale_of."""
        mean = self.label_type.loss_of(scores, self.labels)['loss']
        return self.scale * len(scores) * mean


def fit(
    problem: Problem, strength: float, start: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the most probable weight (features,) and bias ().

    The prior of each weight is a Gaussian around 0 of precision `strength`, so the problem is
    strictly convex where the label type's loss is convex. start: where to begin; None: at 0.
    """
    features = problem.features
    if start is None:
        start = features.new_zeros(features.shape[-1]), features.new_zeros(())
    weight, bias = (each.clone().requires_grad_() for each in start)
    optimizer = torch.optim.LBFGS(
        [weight, bias],
        max_iter=MOST_ITERATIONS,
        tolerance_grad=SMALLEST_GRADIENT,
        tolerance_change=SMALLEST_CHANGE,
        history_size=20,
        line_search_fn='strong_wolfe',
    )

    def closure() -> torch.Tensor:
        """Return the loss, with its gradients."""
        optimizer.zero_grad()
        of_labels = problem.surprise(features @ weight + bias)
        loss = of_labels + strength / 2 * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    return weight.detach(), bias.detach()


def posterior(problem: Problem, strength: float) -> tuple[torch.Tensor, ...]:
    """Return the most probable weight and bias, and what the labels have told of the weight.

    The last is `known (directions, features)` of Head: by the curvature of the likelihood there.
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
    share = precision / (precision + strength)
    is_known = share > LEAST_KNOWN
    known = directions[is_known] * share[is_known].sqrt().unsqueeze(1)
    return weight, bias, known


def _curvature(problem: Problem, scores: torch.Tensor) -> torch.Tensor:
    """Return second derivatives (labels, n, n) of each label's surprise by its scores."""
    scores = scores.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(problem.surprise(scores), scores, create_graph=True)
    rows = []
    for column in gradient.unbind(1):
        (row,) = torch.autograd.grad(column.sum(), scores, retain_graph=True)
        rows.append(row)
    return torch.stack(rows, dim=1)
