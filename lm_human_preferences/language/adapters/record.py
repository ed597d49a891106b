"""Record of adapters and their base model (adapter.json), and weights with adapters merged in."""

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.task_options import LoraHParams
from lm_human_preferences.language.adapters.layers import A, B
from lm_human_preferences.language.networks.model_kinds import has_adapters
from lm_human_preferences.language.networks.network import HEADS
from lm_human_preferences.language.networks.weights import CheckpointWeights, Weights, scoped
from lm_human_preferences.runs.run_files import ADAPTER
from lm_human_preferences.storage.schema import matches_schema
from lm_human_preferences.utils.hyperparams import reading

_SCHEMA = {'base': str, 'digest': str, 'transposed': bool, 'adapters': dict}


@dataclasses.dataclass(frozen=True)
class Record:
    """Record of a base model (path or URL, digest) and of the adapter options of each network."""

    base: str
    digest: str
    transposed: bool
    adapters: Mapping[str, LoraHParams]

    def options(self, scope: str) -> LoraHParams | None:
        """Return a network's adapter options, if any; an ensemble's models have equal options."""
        return self.adapters.get(without_number(scope))

    def write(self, directory: str) -> None:
        adapters = {scope: each.to_nested_dict() for scope, each in self.adapters.items()}
        content = {**vars(self), 'adapters': adapters}
        storage.write_json(storage.join(directory, ADAPTER), content)


def without_number(scope: str) -> str:
    """Return a network's scope without the number of the reward model in its ensemble."""
    return re.sub(r'_\d+$', '', scope)


def read(directory: str | None) -> Record | None:
    """Return a model directory's record of adapters, if any; UserError if the record is damaged."""
    if directory is None or not has_adapters(directory):
        return None
    path = storage.join(directory, ADAPTER)
    content: Any = storage.read_json(path)
    if not matches_schema(content, _SCHEMA):
        raise UserError(f'{path} is damaged: it does not describe adapters')
    adapters = {}
    for scope, options in content['adapters'].items():
        with reading(path):
            adapters[scope] = LoraHParams()
            adapters[scope].override_from_nested_dict(options, keep_unknown=True)
            adapters[scope].validate()
    return Record(content['base'], content['digest'], content['transposed'], adapters)


def base_of(directory: str, record: Record) -> str:
    """Return the path or URL of a record's base model; UserError if that path does not exist."""
    if storage.is_remote(record.base) or os.path.exists(record.base):
        return record.base
    raise UserError(
        f'{directory} holds adapters of the model {record.base}, which is not on this machine: copy'
        ' the model there'
    )


@dataclasses.dataclass(eq=False)
class AdaptedWeights(Weights):
    """Weights W + alpha / rank * B A, with a base model's W and a checkpoint's adapters A and B."""

    _own: CheckpointWeights
    _base: Weights
    _base_scope: str
    _record: Record

    def __post_init__(self) -> None:
        self.path = self._own.path

    def __contains__(self, name: object) -> bool:
        if name in self._own:
            return True
        scope, _, parameter = str(name).rpartition('/')
        is_whole = scoped(scope, self._own.embedding) in self._own
        if is_whole or parameter.startswith(HEADS):
            return False
        return self._of_base(name) in self._base

    def name_of(self, name: str) -> str:
        return self._own.name_of(name)

    def scopes(self) -> list[str]:
        return self._own.scopes()

    @torch.no_grad()
    def load(self, name: str, parameter: torch.Tensor) -> None:
        """Copy a tensor, merged with its adapter if it has one, into `parameter`: see Weights."""
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
    """Return a model's weights `own`, after merging any adapters into the base model's weights."""
    of_base = read(directory)
    if of_base is None:
        return own
    base = open_model(base_of(directory, of_base))
    weights = base.open_weights()
    return AdaptedWeights(own, weights, base.scope_in(weights), of_base)
