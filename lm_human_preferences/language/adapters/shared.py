"""Base model of a training with LoRA: all networks share one frozen copy of its parameters."""

import copy
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from lm_human_preferences import storage
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.reward_options import RunHParams
from lm_human_preferences.hparams.task_options import LoraHParams
from lm_human_preferences.language.adapters import layers, record
from lm_human_preferences.language.model import Projection
from lm_human_preferences.language.networks.network import HEADS, Network
from lm_human_preferences.language.networks.scopes import Sizes
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.machine import hardware
from lm_human_preferences.utils.core import digest_of

Adapters = dict[str, LoraHParams]  # {scope of a trainable network: its LoRA options}


class SharedBase(TrainedModel):
    """Model whose networks all share one set of frozen parameters."""

    def __init__(self, model: TrainedModel, comm: Comm) -> None:
        super().__init__(model.name, model.savedir, model.scope)
        self.adapters: Adapters = {}
        weights = self.open_weights()
        self._base = super().create(['value', 'reward']).requires_grad_(False)
        self._missing = self.fill(self._base, weights, 'base')
        named = dict(self._base.named_parameters())
        self.parameters = {name: named[name] for name in named if not name.startswith(HEADS)}
        comm.broadcast_(list(self.parameters.values()))
        self.digest: str = comm.all_gather_object(digest_of(self.parameters))[0]

    def create(self, scalar_heads: Iterable[str], scope: str = '') -> Network:
        """Create a network on the shared parameters, with any adapters of `scope` uninitialised."""
        return self._create(scalar_heads, self.adapters.get(scope))

    def _create(self, scalar_heads: Iterable[str], options: LoraHParams | None) -> Network:
        network = copy.deepcopy(self._base, {id(each): each for each in self.parameters.values()})
        heads = {name: network.heads[name] for name in scalar_heads}
        network.heads = nn.ModuleDict(heads)
        network.heads.requires_grad_()
        network.shared = frozenset(self.parameters)
        if options is not None:
            layers.attach(network, options)
        return network

    def create_like(self, saved: TrainedModel, scalar_heads: Iterable[str], scope: str) -> Network:
        """Create a network for loading `saved`, on this base model if `saved` has the same base."""
        of_saved = record.read(saved.savedir)
        if of_saved is None or of_saved.digest != self.digest:
            return saved.create(scalar_heads)
        options = of_saved.options(scope)
        if options is not None:
            self.adapters[record.without_number(scope)] = options
        return self._create(scalar_heads, options)

    def build(self, *, scope: str, scalar_heads: Iterable[str] = ()) -> Network:
        network = self.create(scalar_heads, scope)
        layers.reset(network)
        return network.initialize(self._missing)

    def write_files(self, directory: str) -> None:
        """Write the model's files, and a record of its base model and the adapters' options."""
        super().write_files(directory)
        assert self.savedir is not None
        base = self.savedir if storage.is_remote(self.savedir) else os.path.abspath(self.savedir)
        is_transposed = any(isinstance(each, Projection) for each in self._base.modules())
        record.Record(base, self.digest, is_transposed, self.adapters).write(directory)

    def check_record(self, directory: str) -> None:
        """Raise UserError if the model in `directory` has adapters for another base model."""
        recorded = record.read(directory)
        if recorded is not None and recorded.digest != self.digest:
            raise UserError(
                f'{self.savedir} differs from the model {recorded.base} on which the run in'
                f' {os.path.dirname(directory)} began: the digest is {self.digest:.12} now, and was'
                f' {recorded.digest:.12} then'
            )

    def reduce(self) -> None:
        """Convert the base model's linear layers to bfloat16, and free the unused memory."""
        layers.reduce(self._base)
        hardware.release_freed_memory()


class Bases(dict[Any, SharedBase]):
    """Base models that a command has read, so that all trainings of an ensemble share them."""

    def under(
        self,
        model: TrainedModel,
        adapters: Adapters,
        run: RunHParams,
        network: str,
        comm: Comm,
    ) -> SharedBase:
        """Return `model` as the frozen base of new adapters. The weights of a model are read once.

        run: --run options of the training. network: folder of the trained network in the run.
        """
        key = model.savedir, run.precision
        shared = copy.copy(self.get(key) or SharedBase(model, comm))
        shared.adapters = dict(adapters)
        if run.directory is not None:
            shared.check_record(os.path.join(run.directory, network))
        if run.precision == 'bf16' and key not in self:
            shared.reduce()
        self[key] = shared
        return shared


def with_learned(
    sizes: Sizes, create: Callable[[Iterable[str]], Network], adapters: Adapters
) -> Sizes:
    """Set `sizes.learned` to the largest number of adapter parameters in any network."""
    for options in adapters.values():
        with torch.device('meta'):
            network = create([])
        layers.attach(network, options)
        adapted = [each for each in network.modules() if isinstance(each, layers.Adapted)]
        numbers = sum(each.lora_A.numel() + each.lora_B.numel() for each in adapted)
        sizes.learned = max(sizes.learned, numbers)
    return sizes
