"""Linear layers with a low-rank adapter beside their weight."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lm_human_preferences.errors import OptionError
from lm_human_preferences.hparams.task_options import LoraHParams
from lm_human_preferences.language.causal_lm import rows
from lm_human_preferences.language.model import Projection
from lm_human_preferences.language.network import Network
from lm_human_preferences.training import precision

A, B = 'lora_A', 'lora_B'  # parameters of an adapted layer, as PEFT calls them
TRANSPOSED = (Projection,)  # layers whose weight is (inputs, outputs)


class Adapted(nn.Module):
    """A layer that adds scale * B A x, with A (rank, inputs) and B (outputs, rank) in float32."""

    weight: nn.Parameter
    lora_A: nn.Parameter
    lora_B: nn.Parameter
    scale: float

    def add_adapter(self, rank: int, scale: float) -> None:
        """Add A and B, which have no values yet."""
        outputs, inputs = self.weight.shape
        if isinstance(self, TRANSPOSED):
            inputs, outputs = self.weight.shape
        device = self.weight.device
        self.lora_A = nn.Parameter(torch.empty(rank, inputs, device=device))
        self.lora_B = nn.Parameter(torch.empty(outputs, rank, device=device))
        self.scale = scale

    @torch.no_grad()
    def reset(self) -> None:
        """Begin as the layer without adapter, as PEFT does: random A, and B of zeros."""
        bound = self.lora_A.shape[1] ** -0.5
        self.lora_A.uniform_(-bound, bound)
        self.lora_B.zero_()

    def adapt(self, outputs: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Add to the layer's `outputs ([batch,] n, outputs)` of `x`, in place."""
        low = F.linear(x, self.lora_A)
        second = self.lora_B.T.to(outputs.dtype)
        if outputs.ndim == 2:
            return outputs.addmm_(low, second, alpha=self.scale)
        return outputs.baddbmm_(low, second.expand(len(outputs), -1, -1), alpha=self.scale)


class AdaptedLinear(Adapted, rows.Linear):
    """A linear layer of transformers with an adapter."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`input (..., inputs)` -> (..., outputs)."""
        x = _rounded(input)
        return self.adapt(rows.Linear.forward(self, x), x)


class AdaptedProjection(Adapted, Projection):
    """A projection of GPT-2 with an adapter."""

    def forward(self, x: torch.Tensor, *, gelu: bool = False) -> torch.Tensor:
        """`x (n, inputs)` -> (n, outputs), or gelu of that."""
        x = _rounded(x)
        outputs = self.adapt(Projection.forward(self, x), x)
        return F.gelu(outputs, approximate='tanh') if gelu else outputs


_ADAPTED: dict[type[nn.Module], type[Adapted]] = {
    rows.Linear: AdaptedLinear,
    Projection: AdaptedProjection,
}


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """`x` in the type that layers compute in, so that layer and adapter round it only once."""
    if torch.is_autocast_enabled(x.device.type):
        return x.to(precision.autocast_dtype(x.dtype))
    return x


def attach(network: Network, options: LoraHParams) -> None:
    """Give each target layer of the network an adapter without values; OptionError for none."""
    linear = {name: each for name, each in network.named_modules() if type(each) in _ADAPTED}
    targets = {name: each for name, each in linear.items() if _is_target(name, options.targets)}
    if not targets:
        kinds = sorted({name.rpartition('.')[2] for name in linear})
        raise OptionError(
            options.option_name('targets'),
            f'{options.targets}: no linear layer is called so, only {", ".join(kinds) or "none"}',
        )
    for each in targets.values():
        layer: Any = each
        layer.__class__ = _ADAPTED[type(each)]
        layer.add_adapter(options.rank, options.alpha / options.rank)


def _is_target(name: str, targets: str | None) -> bool:
    """Return whether a layer is meant, as PEFT decides. targets: names, or a pattern; None: all."""
    if targets is None:
        return True
    if re.fullmatch(r'[\w.,]+', targets) is None:
        return re.fullmatch(targets, name) is not None
    return any(f'.{name}'.endswith(f'.{target}') for target in targets.split(','))


def reset(network: nn.Module) -> None:
    for layer in network.modules():
        if isinstance(layer, Adapted):
            layer.reset()


def reduce(network: nn.Module) -> None:
    """Keep the weights of all linear layers in bfloat16, in which autocast would multiply them."""
    for layer in network.modules():
        if type(layer) in _ADAPTED:
            weight: Any = layer.weight
            weight.data = weight.data.to(torch.bfloat16)


def is_transposed(network: nn.Module) -> bool:
    """Return whether the weights of the network's linear layers are (inputs, outputs)."""
    return any(isinstance(layer, TRANSPOSED) for layer in network.modules())
