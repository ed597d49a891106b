"""How the tensors of a training are called in its checkpoints.

The program calls a tensor by its own name, and only checkpoints may call it otherwise:

    SCOPE/NAME                  a parameter, NAME as torch's `named_parameters` gives it
    SCOPE/NAME/mean, /square    its first and second moment, of Adam
    TRAINING/optimizer_steps    how many updates Adam has made
    TRAINING/step, ...          counts and times of a training
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class VariableNames(Protocol):
    """What checkpoints of a kind of network call its tensors; the network supplies it.

    Whatever else they change, checkpoints keep the scope that a name begins with.
    """

    def name_of(self, name: str) -> str:
        """What checkpoints call the parameter or moment `name`, such as 'policy/heads.value.w'."""
        ...

    def variables(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """`tensors` {own name: tensor} as a checkpoint has them: {its name: tensor}.

        They are detached views, so that what is read into them is read into `tensors`.
        """
        ...
