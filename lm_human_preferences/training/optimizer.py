"""Adam as TensorFlow computes it (utils.core.minimize in OpenAI's program)."""

import inspect
from collections.abc import Mapping

import torch
from torch.optim.adam import adam

from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.machine import precision

BETAS = (0.9, 0.999)
EPSILON = 1e-5


class Adam:
    """Adam on gradients averaged over ranks, for those `parameters` that require gradients."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], *, comm: Comm) -> None:
        self.parameters = {name: each for name, each in parameters.items() if each.requires_grad}
        self.steps = 0
        self.gradients = comm.average_gradients(self.parameters.values())
        # {parameter: (count of updates, first moment, second moment)}
        self.state: dict[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def minimize(self, loss: torch.Tensor | None, lr: float) -> None:
        """Take a step on the scalar `loss`, which is None (gradient 0) on a rank without data."""
        if loss is not None:
            self.backward(loss, last=True)
        self.update(lr)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Accumulate gradients of the scalar `loss`. last: whether `update` follows next."""
        if last:
            self.gradients.require_sync()
        with precision.repeatable_gradients():
            loss.backward()

    def update(self, lr: float) -> None:
        """Average the gradients over ranks, update the parameters, and drop the gradients."""
        self.gradients.synchronize()
        self.steps += 1
        learned: list[torch.Tensor] = [p for p in self.parameters.values() if p.grad is not None]
        gradients = [p.grad for p in learned if p.grad is not None]
        states = [self._state_of(p) for p in learned]
        counts, means, squares = zip(*states)
        # Convert epsilon for PyTorch, as TensorFlow adds epsilon before the bias correction.
        epsilon = EPSILON / (1 - BETAS[1] ** self.steps) ** 0.5
        with torch.no_grad():
            # The class torch.optim.Adam would import PyTorch's compiler, which takes a second.
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
                eps=epsilon,
                weight_decay=0,
                amsgrad=False,
                maximize=False,
            )
        precision.invalidate_prepacked(learned)
        self.gradients.zero_grad()

    def _state_of(
        self, parameter: torch.Tensor, steps: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return a parameter's update count (`steps` for a new parameter) and its two moments."""
        if parameter not in self.state:
            self.state[parameter] = (
                torch.tensor(float(steps), device=parameter.device),
                torch.zeros_like(parameter),
                torch.zeros_like(parameter),
            )
        return self.state[parameter]

    def reset(self) -> None:
        """Reset the count of updates, the moments and the gradients."""
        self.steps = 0
        self.state.clear()
        self.gradients.zero_grad()

    def start_at(self, steps: int) -> None:
        """Set the count of updates to `steps`; the caller loads the `moments` afterwards."""
        self.steps = steps
        for parameter in self.parameters.values():
            self._state_of(parameter, steps)

    def moments(self) -> dict[str, torch.Tensor]:
        """Return Adam's moments as {'NAME/mean' or 'NAME/square': tensor}; zeros at first."""
        moments = {}
        for name, parameter in self.parameters.items():
            zeros = torch.zeros((), device=parameter.device).expand_as(parameter)
            _, mean, square = self.state.get(parameter, (zeros, zeros, zeros))
            moments[f'{name}/mean'] = mean
            moments[f'{name}/square'] = square
        return moments


class LBFGS(torch.optim.LBFGS):
    """PyTorch's L-BFGS, without a decorator that spends seconds importing PyTorch's compiler."""

    add_param_group = inspect.unwrap(torch.optim.LBFGS.add_param_group)
