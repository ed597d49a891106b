"""Linear layers with a low-rank adapter beside their weight."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.task_options import LoraHParams
from lm_human_preferences.language.model import Projection
from lm_human_preferences.language.networks.network import Linear, Network
from lm_human_preferences.machine import precision

A, B = 'lora_A', 'lora_B'  # PEFT's names for the parameters of an adapted layer


class Adapted(nn.Module):
    """Layer that adds scale * B A x to its outputs; A (rank, inputs) and B (outputs, rank)."""

    weight: nn.Parameter
    lora_A: nn.Parameter
    lora_B: nn.Parameter
    scale: float

    def add_adapter(self, rank: int, scale: float) -> None:
        """Add an adapter's matrices A and B, whose values are undefined until `reset` sets them."""
        weight = self.weight.T if isinstance(self, Projection) else self.weight
        outputs, inputs = weight.shape
        device = self.weight.device
        self.lora_A = nn.Parameter(torch.empty(rank, inputs, device=device))
        self.lora_B = nn.Parameter(torch.empty(outputs, rank, device=device))
        self.scale = scale

    @torch.no_grad()
    def reset(self) -> None:
        """Initialise A at random and B to 0, as PEFT does, so that outputs start unchanged."""
        bound = self.lora_A.shape[1] ** -0.5
        self.lora_A.uniform_(-bound, bound)
        self.lora_B.zero_()

    def adapt(self, outputs: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Add the adapter's outputs for `x` to the layer's `outputs ([batch,] n, outputs)`."""
        low = F.linear(x, self.lora_A)
        second = self.lora_B.T.to(outputs.dtype)
        if outputs.ndim == 2:
            return outputs.addmm_(low, second, alpha=self.scale)
        return outputs.baddbmm_(low, second.expand(len(outputs), -1, -1), alpha=self.scale)


class AdaptedLinear(Adapted, Linear):
    """Linear layer of a transformers model, with an adapter."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map `input (..., inputs)` to (..., outputs)."""
        x = _rounded(input)
        return self.adapt(Linear.forward(self, x), x)


class AdaptedProjection(Adapted, Projection):
    """Projection of GPT-2, with an adapter."""

    def forward(self, x: torch.Tensor, *, gelu: bool = False) -> torch.Tensor:
        """Map `x (n, inputs)` to (n, outputs). gelu: whether to apply GELU to the result."""
        x = _rounded(x)
        outputs = self.adapt(Projection.forward(self, x), x)
        return F.gelu(outputs, approximate='tanh') if gelu else outputs


_ADAPTED: dict[type[nn.Module], type[Adapted]] = {
    Linear: AdaptedLinear,
    Projection: AdaptedProjection,
}


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """Return `x` in autocast's dtype, so that it is cast once for both layer and adapter."""
    if torch.is_autocast_enabled(x.device.type):
        return x.to(precision.autocast_dtype(x.dtype))
    return x


def attach(network: Network, options: LoraHParams) -> None:
    """Add an uninitialised adapter to each linear layer; UserError if there is no such layer."""
    linear: list[Any] = [each for each in network.modules() if type(each) in _ADAPTED]
    if not linear:
        raise UserError('--task.policy.lora: the model has no linear layers that take adapters')
    for layer in linear:
        layer.__class__ = _ADAPTED[type(layer)]
        layer.add_adapter(options.rank, options.alpha / options.rank)


def reset(network: nn.Module) -> None:
    for layer in network.modules():
        if isinstance(layer, Adapted):
            layer.reset()


@torch.no_grad()
def reduce(network: Network) -> None:
    """Convert weights and biases of linear layers to bfloat16, as autocast would at each use."""
    # Run the network before rounding, as its first forward pass tests the fast pass of rows.py.
    with precision.plain():  # prepacked copies of these weights would soon be out of date
        network.hidden(torch.zeros(1, 1, dtype=torch.int64))
    for layer in network.modules():
        if type(layer) in _ADAPTED:
            layer.to(torch.bfloat16)
