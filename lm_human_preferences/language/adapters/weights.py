"""Weights of a base with adapters merged into them, to be read like any model's weights."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from lm_human_preferences.language.adapters import record
from lm_human_preferences.language.adapters.layers import A, B
from lm_human_preferences.language.network import HEADS
from lm_human_preferences.language.weights import CheckpointWeights, Weights, scoped


@dataclasses.dataclass(eq=False)
class AdaptedWeights(Weights):
    """Weights W + alpha / rank * B A: W from the base, A and B from the checkpoint `own`."""

    _own: CheckpointWeights
    _base: Weights
    _base_scope: str
    _record: record.Record

    def __post_init__(self) -> None:
        self.path = self._own.path

    def __contains__(self, name: object) -> bool:
        if name in self._own:
            return True
        scope, _, parameter = str(name).rpartition('/')
        is_whole = self._record.options(scope) is None and scope in self._own.scopes()
        if is_whole or parameter.startswith(HEADS):
            return False
        return self._of_base(name) in self._base

    def name_of(self, name: str) -> str:
        return self._own.name_of(name)

    def scopes(self) -> list[str]:
        """Return the sorted scopes of all networks that have their own embedding or a head."""
        heads = [f'{HEADS}{kind}.w' for kind in ('value', 'reward')]
        of_heads = [scope for head in heads for scope in self._own.scopes_with(head)]
        return sorted({*self._own.scopes(), *of_heads})

    @torch.no_grad()
    def load(self, name: str, parameter: torch.Tensor) -> None:
        """Copy a tensor into `parameter`, merged with its adapter: see Weights."""
        if name in self._own:
            self._own.load(name, parameter)
            return
        self._base.load(self._of_base(name), parameter)
        scope = name.rpartition('/')[0]
        layer = name.removesuffix('.weight')
        options = self._record.options(scope)
        if options is None or f'{layer}.{A}' not in self._own:
            return
        weight = parameter.T if self._record.transposed else parameter
        outputs, inputs = weight.shape
        first = torch.empty(options.rank, inputs)
        second = torch.empty(outputs, options.rank)
        self._own.load(f'{layer}.{A}', first)
        self._own.load(f'{layer}.{B}', second)
        weight.add_(second @ first, alpha=options.alpha / options.rank)

    def _of_base(self, name: object) -> str:
        return scoped(self._base_scope, str(name).rpartition('/')[2])


def merged(own: CheckpointWeights, directory: str, open_model: Callable[[str], Any]) -> Weights:
    """Return a model's `own` weights; if they are adapters, merge them into their base."""
    of_base = record.read(directory)
    if of_base is None:
        return own
    base = open_model(record.base_of(directory, of_base))
    weights = base.open_weights()
    return AdaptedWeights(own, weights, base.scope_in(weights), of_base)
