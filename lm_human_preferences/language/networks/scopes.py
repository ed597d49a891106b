"""Networks of a training run: which of them are trained, and how much memory they take."""

# No `from __future__ import annotations`: utils.hyperparams needs the types of Sizes' fields.

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from lm_human_preferences import storage
from lm_human_preferences.runs.run_files import SIZES
from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.hyperparams import option

if TYPE_CHECKING:
    import torch
    from torch import nn

    from lm_human_preferences.distributed.comm import Comm
    from lm_human_preferences.hparams.reward_options import RunHParams

FRAGMENTATION = 1.8  # factor by which micro-batches enlarge the heap (measured: 1.1 to 1.9)
FLOAT, HALF = 4, 2  # bytes per number in float32 and in bf16


class Network(Protocol):
    """Interface of the networks in a training, such as a Policy."""

    def parameters_by_name(self) -> 'Mapping[str, nn.Parameter]':
        """Return {name without a scope prefix: parameter} for all parameters of the network."""
        ...


NetworksByScope = Mapping[str, Network | None]


@dataclass(frozen=True)
class Networks:
    """Scopes (prefixes of parameter names) of networks that learn, are frozen, or are retrained."""

    learning: tuple[str, ...]
    frozen: tuple[str, ...]  # networks that never change, and that saving need not copy
    retrained: tuple[str, ...] = ()  # networks trained between steps; their optimizer is not saved

    @property
    def scopes(self) -> tuple[str, ...]:
        """Return the scopes of all networks."""
        return self.frozen + self.retrained + self.learning

    def parameters(
        self, networks: NetworksByScope, scopes: Sequence[str] | None = None
    ) -> 'dict[str, nn.Parameter]':
        """Return {SCOPE/NAME: parameter} of the networks in `scopes`, or if None, of all."""
        parameters: dict[str, nn.Parameter] = {}
        for scope in self.scopes if scopes is None else scopes:
            network = networks[scope]
            assert network is not None, scope
            for name, parameter in network.parameters_by_name().items():
                parameters[f'{scope}/{name}'] = parameter
        return parameters

    def learning_parameters(self, networks: NetworksByScope) -> 'dict[str, nn.Parameter]':
        """Return {SCOPE/NAME: parameter} of the `networks` that learn."""
        return self.parameters(networks, self.learning)

    def broadcast(self, networks: NetworksByScope, comm: 'Comm') -> None:
        """Overwrite the parameters of `networks` on every rank with those of rank 0."""
        comm.broadcast_(list(self.parameters(networks).values()))

    def memory(
        self,
        sizes: 'Sizes',
        run: 'RunHParams',
        device: 'torch.device',
        *,
        rows: int,
        micro_batch_size: int | None,
        tokens: float,
        predicted: int,
    ) -> float:
        """Return the bytes of memory that a step takes on one rank, not counting libraries.

        Counted are weights, gradients, Adam's moments, activations for gradients, and logits.
        rows: rows of a backward pass. tokens: tokens of a row, with padding. predicted: number of
        tokens of a row whose logits are computed at once.
        """
        own = sizes.own_parameters()
        is_cpu, is_reduced = device.type == 'cpu', run.precision == 'bf16'
        # Retrained networks take turns: only one at a time has gradients and Adam's moments.
        learning = len(self.learning) + bool(self.retrained)
        number = HALF if is_reduced else FLOAT
        of_a_weight = FLOAT + HALF if is_reduced else FLOAT  # bf16 adds a copy of each weight
        lasting = own * (of_a_weight * len(self.scopes) + 3 * FLOAT * learning)
        if sizes.learned:  # On a CPU, the adapters' base model has a prepacked copy.
            lasting += number * sizes.parameters() * (2 if is_cpu else 1)
        rows = min(micro_batch_size or rows, rows)
        kept = sizes.kept_numbers
        if is_cpu:
            kept += sizes.n_head * tokens  # On a CPU, a block also keeps attention weights.
        block = number * rows * tokens * kept
        blocks = block * (sizes.n_layer if learning else 1)
        if run.gradient_checkpointing:
            blocks = FLOAT * rows * tokens * sizes.n_embd * sizes.n_layer + block
        step = blocks + FLOAT * rows * predicted * sizes.n_vocab
        return lasting + step * (FRAGMENTATION if is_cpu and micro_batch_size else 1)


REWARD_NETWORKS = Networks(learning=('reward_model',), frozen=('ref_policy',))
# POLICY_NETWORKS leaves out the networks that compute the rewards of the policy.
POLICY_NETWORKS = Networks(learning=('policy',), frozen=('ref_policy',))


@dataclass
class Sizes(hyperparams.HParams, ABC):
    """Sizes of a network, which determine its longest sequence and its memory."""

    n_vocab: int = option(0, 'tokens of the vocabulary', at_least=1)
    n_ctx: int = option(512, 'longest sequence', at_least=1)
    n_embd: int = option(768, 'width', at_least=1)
    n_head: int = option(12, 'attention heads', at_least=1)
    n_layer: int = option(12, 'blocks', at_least=1)
    learned: int = option(0, 'numbers that a training changes; 0: all', ours=True)

    @property
    @abstractmethod
    def kept_numbers(self) -> int:
        """Return how many activations a block keeps per token, not counting attention weights."""

    @abstractmethod
    def parameters(self) -> int:
        """Return the number of parameters, not counting scalar heads."""

    def write(self, directory: str) -> None:
        """Write the network's sizes as a JSON file into a model's directory."""
        sizes = self.to_nested_dict(with_unknown=True)
        storage.write_json(storage.join(directory, SIZES), sizes)

    def own_parameters(self) -> int:
        """Return how many parameters a network does not share with the run's other networks."""
        return self.learned or self.parameters()
