"""Names of tensors in checkpoints: SCOPE/NAME, and NAME/mean and NAME/square for Adam."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class VariableNames(Protocol):
    """Checkpoint names, supplied by each kind of network; scopes stay as they are."""

    def name_of(self, name: str) -> str:
        """Return the name of a parameter or moment, such as 'policy/heads.value.w'."""
        ...

    def variables(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return {name in checkpoints: detached view} of {own name: tensor}."""
        ...
