"""Linear head on pooled hidden states: its scores, their uncertainty, and its file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

import torch

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.task_options import TaskHParams
from lm_human_preferences.runs.run_files import FROZEN_HEAD
from lm_human_preferences.storage.schema import matches_schema

ABOUT = 'about'  # metadata key whose value is JSON about a head's model and task
DIGEST = 'sha256'  # key of the checksum within the JSON value of ABOUT
# Reading a damaged head file may raise any of these errors.
WRONG = (AttributeError, LookupError, RecursionError, TypeError, ValueError)
# Hidden states are read at these fractions of the model's depth, chosen in docs/real-run.md.
MIDDLE, LATE = 0.6, 0.9
SMALLEST_DEVIATION = 1e-6  # features or scores with a smaller deviation count as constant


@dataclasses.dataclass(frozen=True)
class Head:
    """Linear head on z = (features - mean) / scale that gives scores and their standard deviations.

    A score is z . weight + bias. Its standard deviation is doubt * sqrt(|z|^2 - |known z|^2): the
    prior's deviation, doubt * |z|, reduced by what labels have shown. mean, scale, weight:
    (features,). known: (directions, features). bias, doubt: (). usual: (), mean of the standard
    deviation over the responses that the head was fitted with.
    """

    mean: torch.Tensor
    scale: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    known: torch.Tensor
    doubt: torch.Tensor
    usual: torch.Tensor

    def standardized(self, features: torch.Tensor) -> torch.Tensor:
        """Return the standardised features z for `features (..., n)`, of the same shape."""
        return (features - self.mean) / self.scale

    def __call__(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores and their standard deviations (...) for `features (..., n)`."""
        z = self.standardized(features)
        left = z.square().sum(-1) - (z @ self.known.T).square().sum(-1)
        return z @ self.weight + self.bias, self.doubt * left.clamp(min=0).sqrt()

    def rescaled(self, gain: float, offset: float) -> Head:
        """Return a head with scores gain * score + offset, and with deviations gain * deviation."""
        return dataclasses.replace(
            self,
            weight=gain * self.weight,
            bias=gain * self.bias + offset,
            doubt=gain * self.doubt,
            usual=gain * self.usual,
        )

    def to(self, device: torch.device) -> Head:
        """Return a copy of the head on `device`, in float32."""
        return Head(**{name: each.to(device, torch.float32) for name, each in vars(self).items()})

    def save(self, directory: str, about: Mapping[str, Any]) -> None:
        """Write the head's file into `directory`. about: record of the head's model and task."""
        from safetensors.torch import save

        tensors = {name: each.float().contiguous() for name, each in vars(self).items()}
        # Only one metadata entry is written, as safetensors orders several entries arbitrarily.
        text = json.dumps({**about, DIGEST: _digest(tensors, about)})
        storage.write_bytes(storage.join(directory, FROZEN_HEAD), save(tensors, {ABOUT: text}))


def _digest(tensors: Mapping[str, torch.Tensor], about: Mapping[str, Any]) -> str:
    """Return one SHA-256 digest of both a head's tensors and `about`, the head's record."""
    digest = hashlib.sha256(json.dumps(about).encode())
    for name in sorted(tensors):
        digest.update(tensors[name].cpu().numpy().tobytes())
    return digest.hexdigest()


def unfitted(features: torch.Tensor) -> Head:
    """Return a head of weight 0 with the mean and the scale of `features (responses, n)`.

    Its scale gives a typical z the norm 1.
    """
    deviation, mean = torch.std_mean(features.double(), dim=0, correction=0)
    scale = deviation.clamp(min=SMALLEST_DEVIATION) * features.shape[1] ** 0.5
    zero = mean.new_zeros(())
    return Head(mean, scale, torch.zeros_like(mean), zero, mean.new_zeros(0, len(mean)), zero, zero)


def blocks_of(n_layer: int) -> tuple[int, int]:
    """Return the numbers, counted from 0, of the two blocks whose inputs are pooled."""
    last = n_layer - 1
    return min(round(MIDDLE * n_layer), last), min(round(LATE * n_layer), last)


def n_features(n_embd: int) -> int:
    """Return the number of features that `pooled` makes for a response."""
    return 3 * n_embd


def pooled(states: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Return the features of responses, pooled from hidden states: (batch, 3 * n_embd).

    They are the mean and the last state of the middle block, and the mean of the late block.
    states: (2, batch, length, n_embd), block inputs at the position before each token. real: bool
    (batch, length), False at padding. For an empty response, the query's last state is read.
    """
    real = real.clone()
    real[:, 0] = True
    count = real.sum(1)
    fractions = real / count.unsqueeze(1)
    middle, late = torch.einsum('kbte,bt->kbe', states.float(), fractions)
    rows = torch.arange(len(count), device=count.device)
    last = states[0, rows, count - 1].float()
    return torch.cat([middle, last, late], dim=1)


def load(directory: str) -> tuple[Head, dict[str, Any]]:
    """Return a saved head and the head's record (model, task); UserError if the file is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        path = storage.cached_path(storage.join(directory, FROZEN_HEAD))
    except storage.NotFound as e:
        raise UserError(f'{e}: restore the file of the head, or train the head again') from e
    names = [field.name for field in dataclasses.fields(Head)]
    try:
        with safe_open(path, 'pt') as file:
            about = json.loads(file.metadata()[ABOUT])
            head = Head(**{name: file.get_tensor(name) for name in names})
        if about.pop(DIGEST) != _digest(vars(head), about):
            raise ValueError('the checksum of the head does not match')
        _check(head, about)
    except (SafetensorError, *WRONG) as e:
        raise UserError(f'{os.path.join(directory, FROZEN_HEAD)} is damaged: {e}') from e
    return head, about


def task_of(about: Mapping[str, Any]) -> TaskHParams:
    """Return the task for which a head was fitted."""
    task = TaskHParams()
    task.override_from_nested_dict(about['task'], keep_unknown=True)
    task.check_values()
    return task


def _check(head: Head, about: Mapping[str, Any]) -> None:
    """Raise ValueError unless a head's tensors and metadata are valid and fit together."""
    width = head.mean.shape
    kinds = {'initial_model': str, 'task': dict, 'probe': (float,) * head.mean.numel()}
    if not matches_schema(about, kinds):
        raise ValueError(f'the metadata of the head must have a valid {", ".join(kinds)}')
    task_of(about)
    for name, tensor in vars(head).items():
        shape = tensor.shape[1:] if name == 'known' else tensor.shape
        if len(width) != 1 or shape != (() if name in ('bias', 'doubt', 'usual') else width):
            raise ValueError(f'the tensor {name} has the wrong shape {tuple(tensor.shape)}')
        if tensor.dtype != torch.float32 or not tensor.isfinite().all():
            raise ValueError(f'the tensor {name} must hold finite float32 numbers')
    if (head.scale <= 0).any() or head.doubt < 0 or head.usual < 0:
        raise ValueError('the tensor scale must be positive; doubt and usual must be at least 0')
