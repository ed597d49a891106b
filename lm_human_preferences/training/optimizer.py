"""Adam as TensorFlow computes it (the original's utils.core.minimize)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch.optim.adam import adam

from lm_human_preferences.training import precision

if TYPE_CHECKING:
    from lm_human_preferences.distributed.comm import Comm

BETAS = (0.9, 0.999)
EPSILON = 1e-5


class Adam:
    """Minimises a loss over parameters; gradients are averaged over ranks.

    parameters: {name: Parameter}; `moments` has the same names.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], *, comm: Comm) -> None:
        self.parameters = parameters
        self.steps = 0
        self.gradients = comm.average_gradients(parameters.values())
        # Of each parameter: its count of updates, first and second moment.
        self.state: dict[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def minimize(self, loss: torch.Tensor | None, lr: float) -> None:
        """One update against the gradient of the scalar `loss`.

        None: this rank has nothing to learn from, so its gradient is 0; another rank has a loss.
        """
        self.gradients.zero_grad()
        if loss is not None:
            self.backward(loss, last=True)
        self.update(lr)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the gradient of the scalar `loss`; `last`: it is the last one before the update."""
        if last:
            self.gradients.require_sync()
        loss.backward()

    def update(self, lr: float) -> None:
        """Average the gradients since `gradients.zero_grad()` over ranks; update the parameters.

        This calls torch.optim's function: its class imports the compiler, which takes a second.
        """
        self.gradients.synchronize()
        self.steps += 1
        learned: list[torch.Tensor] = [p for p in self.parameters.values() if p.grad is not None]
        gradients = [p.grad for p in learned if p.grad is not None]
        states = [self._state_of(p) for p in learned]
        counts, means, squares = zip(*states)
        with torch.no_grad():
            adam(
                learned,
                gradients,
                list(means),
                list(squares),
                [],
                list(counts),
                fused=True,
                lr=lr,
                beta1=BETAS[0],
                beta2=BETAS[1],
                eps=_epsilon(self.steps),
                weight_decay=0,
                amsgrad=False,
                maximize=False,
            )
        precision.invalidate_prepacked(learned)

    def _state_of(
        self,
        parameter: torch.Tensor,
        steps: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The state of a parameter, created if there is none, as after `steps` updates."""
        if parameter not in self.state:
            self.state[parameter] = (
                torch.tensor(float(steps), device=parameter.device),
                torch.zeros_like(parameter),
                torch.zeros_like(parameter),
            )
        return self.state[parameter]

    def reset(self) -> None:
        """Forget all updates: their count, the moments and the gradients."""
        self.steps = 0
        self.state.clear()
        self.gradients.zero_grad()

    def start_at(self, steps: int) -> None:
        """Prepare to resume after `steps` updates.

        The caller then fills in the `moments`.
        """
        self.steps = steps
        if steps == 0:
            return
        for parameter in self.parameters.values():
            self._state_of(parameter, steps)

    def moments(self) -> dict[str, torch.Tensor]:
        """The first and second moment of each parameter, as 'NAME/mean' and 'NAME/square'.

        They are zeros before the first update.
        """
        moments = {}
        for name, parameter in self.parameters.items():
            zeros = torch.zeros((), device=parameter.device).expand_as(parameter)
            _, mean, square = self.state.get(parameter, (zeros, zeros, zeros))
            moments[f'{name}/mean'] = mean
            moments[f'{name}/square'] = square
        return moments


def _epsilon(step: int) -> float:
    """PyTorch's `eps` that makes update `step` (from 1) equal TensorFlow's.

    TensorFlow adds epsilon before bias correction.
    """
    return EPSILON / (1 - BETAS[1] ** step) ** 0.5
