"""Which networks a training has, and which of them learn: stated once, for all that follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import nn

    from lm_human_preferences.distributed.comm import Comm


class Network(Protocol):
    """A network of a training, such as a Policy."""

    def parameters_by_name(self) -> Mapping[str, nn.Parameter]:
        """Its parameters by their own names, without a scope."""
        ...


@dataclass(frozen=True)
class Networks:
    """The networks of a training, by the scopes that the names of their parameters have.

    learning: those that the optimizer updates. frozen: those that stay as they are loaded, of which
    a checkpoint need not copy anything before it is written. retrained: those that are trained
    between two steps, by an optimizer of their own that keeps nothing until the next training.

    What depends on it is derived: the optimizer's parameters, the checkpointer's frozen scopes, the
    memory estimate, what rank 0 broadcasts, what a checkpoint holds.
    """

    learning: tuple[str, ...]
    frozen: tuple[str, ...]
    retrained: tuple[str, ...] = ()

    @property
    def scopes(self) -> tuple[str, ...]:
        """Of all networks."""
        return self.frozen + self.retrained + self.learning

    def parameters(self, networks: Mapping[str, Network | None]) -> dict[str, nn.Parameter]:
        """The parameters of all of `networks`, {scope: network}, as {SCOPE/NAME: parameter}."""
        return _parameters(networks, self.scopes)

    def learning_parameters(
        self, networks: Mapping[str, Network | None]
    ) -> dict[str, nn.Parameter]:
        """Those of the ones among `networks` that learn, see `parameters`."""
        return _parameters(networks, self.learning)

    def broadcast(self, networks: Mapping[str, Network | None], comm: Comm) -> None:
        """Give every rank the parameters of `networks`, {scope: network}, that rank 0 has."""
        comm.broadcast_(list(self.parameters(networks).values()))


def _parameters(
    networks: Mapping[str, Network | None], scopes: tuple[str, ...]
) -> dict[str, nn.Parameter]:
    parameters: dict[str, nn.Parameter] = {}
    for scope in scopes:
        network = networks[scope]
        assert network is not None, scope
        for name, parameter in network.parameters_by_name().items():
            parameters[f'{scope}/{name}'] = parameter
    return parameters
