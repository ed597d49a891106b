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
        """Return {name without a scope: parameter}."""
        ...


NetworksByScope = Mapping[str, Network | None]


@dataclass(frozen=True)
class Networks:
    """Scopes (prefixes of parameter names) of a training's networks, by how they change."""

    learning: tuple[str, ...]
    frozen: tuple[str, ...]  # scopes that never change: saving does not copy them
    retrained: tuple[str, ...] = ()  # retrained between steps, by an unsaved optimizer

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
        """Overwrite the parameters of `networks` on every rank with those of rank 0."""
        comm.broadcast_(list(self.parameters(networks).values()))


REWARD_NETWORKS = Networks(learning=('reward_model',), frozen=('ref_policy',))
POLICY_NETWORKS = Networks(learning=('policy',), frozen=('ref_policy',))  # a reward adds its scopes
