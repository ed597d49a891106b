"""Networks of a training, and which of them learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import nn

    from lm_human_preferences.distributed.comm import Comm


class Network(Protocol):
    """Network of a training, such as a Policy."""

    def parameters_by_name(self) -> Mapping[str, nn.Parameter]:
        """Return its parameters by their own names, without a scope."""
        ...


NetworksByScope = Mapping[str, Network | None]


@dataclass(frozen=True)
class Networks:
    """Networks of a training by the scopes of their parameters' names."""

    learning: tuple[str, ...]
    frozen: tuple[str, ...]  # scopes that never change, so that saving does not copy them
    retrained: tuple[str, ...] = ()  # between two steps, by optimizers that are not saved

    @property
    def scopes(self) -> tuple[str, ...]:
        """Scopes of all networks."""
        return self.frozen + self.retrained + self.learning

    def parameters(
        self, networks: NetworksByScope, scopes: Sequence[str] | None = None
    ) -> dict[str, nn.Parameter]:
        """Return {SCOPE/NAME: parameter} of `networks`, or of those in `scopes` only."""
        parameters: dict[str, nn.Parameter] = {}
        for scope in self.scopes if scopes is None else scopes:
            network = networks[scope]
            assert network is not None, scope
            for name, parameter in network.parameters_by_name().items():
                parameters[f'{scope}/{name}'] = parameter
        return parameters

    def learning_parameters(self, networks: NetworksByScope) -> dict[str, nn.Parameter]:
        """Return {SCOPE/NAME: parameter} of the `networks` that learn."""
        return self.parameters(networks, self.learning)

    def broadcast(self, networks: NetworksByScope, comm: Comm) -> None:
        """Give every rank the parameters of `networks` that rank 0 has."""
        comm.broadcast_(list(self.parameters(networks).values()))


REWARD_NETWORKS = Networks(learning=('reward_model',), frozen=('ref_policy',))
POLICY_NETWORKS = Networks(learning=('policy',), frozen=('ref_policy',))  # and a reward's, if any
