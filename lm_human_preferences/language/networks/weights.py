"""Reading of weights by our parameter names, from TensorFlow checkpoints or safetensors."""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from lm_human_preferences import storage
from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.checkpointing.names import VariableNames
from lm_human_preferences.checkpointing.tf_bundle import Bundle
from lm_human_preferences.errors import UserError
from lm_human_preferences.runs.run_files import FROZEN_HEAD

CAUSAL_LM = 'causal_lm.'  # prefix of our parameter names in models from transformers
EMBEDDING = 'transformer.wte.weight'  # our name for GPT-2's token embedding
SAFETENSORS = 'model.safetensors'
SAFETENSORS_INDEX = f'{SAFETENSORS}.index.json'  # the index of a model split into several files
# Tensors to ignore are masks and rotary frequencies of old models, and TRL's value head.
OF_NO_USE = re.compile(r'.*(attn|attention)\.(masked_)?bias|.*causal_mask|.*inv_freq|v_head\..*')
EMBEDDING_LAYER = re.compile(r'(.*\.)?(embed_tokens|wte|embed_in|word_embeddings)')
OUTPUT_LAYER = re.compile(r'(.*\.)?(lm_head|embed_out)')


class Weights(ABC):
    """Weights of one or more networks, read by our parameter names from files of any format."""

    path: str

    @abstractmethod
    def __contains__(self, name: object) -> bool: ...

    @abstractmethod
    def name_of(self, name: str) -> str:
        """Return what the files call our parameter `name`, even if the parameter is not in them."""

    @abstractmethod
    def load(self, name: str, parameter: torch.Tensor) -> None:
        """Copy the tensor `name` into `parameter` (float32, CPU); UserError unless it fits."""

    def scopes(self) -> list[str]:
        """Return the scopes of all networks, sorted; '' for a network without a scope."""
        return ['']

    def unread(self, names: Collection[str]) -> list[str]:
        """Return the names of tensors that belong to none of the parameters `names`."""
        return []


class CheckpointWeights(Weights):
    """Weights in the latest checkpoint in a local or remote `directory` or in its checkpoints/."""

    def __init__(self, directory: str, names: VariableNames, embedding: str = EMBEDDING) -> None:
        self._bundle = open_bundle(directory)
        self._names = names
        self.embedding = embedding
        self.path = self._bundle.prefix

    def __contains__(self, name: object) -> bool:
        return self.name_of(str(name)) in self._bundle

    def name_of(self, name: str) -> str:
        return self._names.name_of(name)

    def load(self, name: str, parameter: torch.Tensor) -> None:
        for variable, target in self._names.variables({name: parameter}).items():
            copy_value(self._bundle[variable], target, f'{self.path}: {variable}')

    def scopes(self) -> list[str]:
        """Return the scopes of all networks: the scopes that have an embedding or a scalar head."""
        scopes = set()
        for parameter in (self.embedding, 'heads.value.w', 'heads.reward.w'):
            name = self.name_of(parameter)
            suffix = f'/{name}'
            scopes |= {each.removesuffix(suffix) for each in self._bundle if each.endswith(suffix)}
            if name in self._bundle:
                scopes.add('')
        return sorted(scopes)


def safetensors_of(directory: str) -> list[str]:
    """Return local paths of a model's safetensors, downloaded if remote; UserError without any."""
    names = [SAFETENSORS]
    # Prefer a single file, as transformers does, since an outdated index may lie beside the file.
    if not storage.exists(storage.join(directory, SAFETENSORS)):
        index = storage.join(directory, SAFETENSORS_INDEX)
        if not storage.exists(index):
            raise UserError(
                f'{directory} has neither {SAFETENSORS} nor {SAFETENSORS_INDEX}; pickled weights'
                ' are not read: save the model again with save_pretrained'
            )
        names = _files_of_index(index)
    return storage.cached_paths([storage.join(directory, name) for name in names])


def has_own_output_layer(directory: str) -> bool:
    """Return whether safetensors have an output layer that differs from the token embedding."""
    values = []
    for file in map(open_safetensors, safetensors_of(directory)):
        for name in file.keys():  # noqa: SIM118
            layer = name.removesuffix('.weight')
            if EMBEDDING_LAYER.fullmatch(layer) or OUTPUT_LAYER.fullmatch(layer):
                values.append(file.get_tensor(name).float())
    return len(values) == 2 and not torch.equal(*values)


def listed(names: Sequence[str]) -> str:
    """Return 'NAME and N more' for a message: the first name and the number of other names."""
    more = f' and {len(names) - 1} more' if len(names) > 1 else ''
    return f'{names[0]}{more}'


def open_safetensors(path: str) -> Any:
    """Open a local or remote safetensors file; UserError if it is damaged or missing."""
    from safetensors import SafetensorError, safe_open

    try:
        # cached_path refuses pipes, on which safe_open would wait for ever.
        return safe_open(storage.cached_path(path), 'pt')
    except (OSError, SafetensorError, storage.StorageError) as e:
        raise UserError(f'{path} is damaged or missing: {e}') from e


def are_here(directory: str) -> bool:
    """Return whether a model's safetensors can be read without a download."""
    names = [SAFETENSORS]
    index = storage.join(directory, SAFETENSORS_INDEX)
    if not storage.is_here(storage.join(directory, SAFETENSORS)) and storage.is_here(index):
        names = _files_of_index(index)
    return all(storage.is_here(storage.join(directory, name)) for name in names)


def _files_of_index(index: str) -> list[str]:
    """Return the names of the safetensors files in an index; UserError if it is damaged."""
    content: Any = storage.read_json(index)
    try:
        names = sorted(set(content['weight_map'].values()))
        is_local = all(os.path.basename(name) == name for name in names)
    except (KeyError, AttributeError, TypeError):
        is_local, names = False, []
    if not is_local:
        raise UserError(f'{index} is damaged: it must map tensors to files in the same folder')
    return names


def copy_value(value: np.ndarray, target: torch.Tensor, what: str) -> None:
    """Copy `value` into `target` on the CPU; UserError unless `value`, named `what`, fits."""
    shape = tuple(target.shape)
    if value.shape != shape or value.dtype != np.float32:
        raise UserError(f'{what} is {value.dtype} {value.shape}, the model needs float32 {shape}')
    np.copyto(target.numpy(), value)


def scoped(scope: str, name: str) -> str:
    """Return SCOPE/NAME; if the scope is '', only NAME."""
    return f'{scope}/{name}' if scope else name


def load_parameters(
    weights: Weights, parameters: Mapping[str, torch.Tensor], scope: str
) -> list[str]:
    """Copy weights of the network `scope` into {name: parameter}; return the missing names."""
    missing = []
    for name, parameter in parameters.items():
        if scoped(scope, name) not in weights:
            missing.append(name)
            continue
        weights.load(scoped(scope, name), parameter)
        # Check the sum first, which is far faster; but a sum of finite values may overflow.
        if not parameter.sum().isfinite() and not parameter.isfinite().all():
            raise UserError(
                f'{weights.path} has values that are not finite, first in'
                f' {weights.name_of(scoped(scope, name))}'
            )
    return missing


def open_bundle(directory: str) -> Bundle:
    """Open the latest checkpoint in `directory` or its checkpoints/, local or remote."""
    for folder in (directory, storage.join(directory, 'checkpoints')):
        path = storage.join(folder, 'checkpoint')
        names = []
        if storage.exists(path):
            names = checkpoints.parse_checkpoint_file(storage.read_text(path))
        if names:
            return _fetch_bundle(folder, names[-1])
    raise UserError(
        f'{directory} has no weights: no `checkpoint` file there or in checkpoints/, and no'
        f' {FROZEN_HEAD}: restore the files, or train the model again'
    )


def _fetch_bundle(folder: str, name: str) -> Bundle:
    prefix = storage.join(folder, name)
    if storage.is_remote(folder):
        prefix = storage.cached_path(f'{prefix}.index').removesuffix('.index')
        shards = Bundle(prefix).shard_names()
        storage.cached_paths([storage.join(folder, shard) for shard in shards])
    else:
        checkpoints.restore_state(prefix)  # verifies a checksum of the checkpoint's index
    return Bundle(prefix)
