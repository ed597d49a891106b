"""The weights of a saved model: in TensorFlow's checkpoints, or in the safetensors of transformers.

Both kinds are asked by this program's own names, with a scope where they have one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch

from lm_human_preferences import storage
from lm_human_preferences.checkpointing import checkpoints, names
from lm_human_preferences.checkpointing.tf_bundle import Bundle, BundleError
from lm_human_preferences.checkpointing.variables import VariableNames
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.model_sizes import FLOAT, Sizes
from lm_human_preferences.language.safetensors_files import SavedTensors

TRANSFORMER = 'transformer.'  # what GPT-2's own names begin with, except those of its heads
EMBEDDING = f'{TRANSFORMER}wte.weight'  # which every GPT-2 has
# Of a checkpoint that is neither of a step nor in several parts: those of releases are not.
CHECKPOINT_FILES = (names.LIST, f'model.ckpt{names.INDEX}', f'model.ckpt{names.DATA}')
SLACK_BYTES = 1 << 24  # by which a model may be larger than its file


class Weights(Protocol):
    """The weights in a model's files. path: of the files, for messages."""

    path: str

    def __len__(self) -> int:
        """How many tensors there are."""
        ...

    def __contains__(self, name: object) -> bool:
        """Whether there is a tensor of this name."""
        ...

    def nbytes(self) -> int:
        """Bytes of all tensors."""
        ...

    def scopes(self) -> list[str]:
        """The scopes of all networks, sorted; '' for a network that has none."""
        ...

    def name_of(self, name: str) -> str:
        """What the files call the tensor `name`."""
        ...

    def load(self, name: str, parameter: torch.Tensor) -> None:
        """Copy the tensor `name` into `parameter` on the CPU; UserError unless it fits."""
        ...


class CheckpointWeights:
    """The latest checkpoint in `directory` or its checkpoints/, local or remote.

    Its checksums are verified. Where it is damaged, the one before it is used with a warning.
    names: what it calls tensors. embedding: the own name of a tensor that every network in it has.
    """

    def __init__(self, directory: str, names: VariableNames, embedding: str = EMBEDDING) -> None:
        self._bundle = open_bundle(directory)
        self._names = names
        self._embedding = embedding
        self.path = self._bundle.prefix

    def __len__(self) -> int:
        return len(self._bundle)

    def __contains__(self, name: object) -> bool:
        return self.name_of(str(name)) in self._bundle

    def nbytes(self) -> int:
        """Bytes of the files that hold the values."""
        return self._bundle.nbytes()

    def scopes(self) -> list[str]:
        """Those under which there is an embedding of tokens."""
        embedding = self.name_of(self._embedding)
        suffix = f'/{embedding}'
        scopes = [name.removesuffix(suffix) for name in self._bundle if name.endswith(suffix)]
        if embedding in self._bundle:
            scopes.append('')
        return sorted(scopes)

    def name_of(self, name: str) -> str:
        """The name of a variable."""
        return self._names.name_of(name)

    def load(self, name: str, parameter: torch.Tensor) -> None:
        """Copy the variable, whose shape may be another view of the parameter's."""
        for variable, target in self._names.variables({name: parameter}).items():
            copy_value(self._bundle[variable], target, f'{self.path}: {variable}')


class TransformersWeights:
    """What holds of the safetensors in a directory of transformers, whoever reads them.

    saved: the tensors by the names in its files.
    """

    def __init__(self, directory: str) -> None:
        self.saved = SavedTensors(directory)

    def __len__(self) -> int:
        return len(self.saved)

    def nbytes(self) -> int:
        """Bytes of all tensors in float32."""
        return FLOAT * self.saved.numbers()

    def scopes(self) -> list[str]:
        """That of the only network."""
        return ['']


class SafetensorsWeights(TransformersWeights):
    """The safetensors in a directory that `transformers` has saved a GPT-2 in.

    Their names are this program's own. GPT2Model leaves out what they begin with, GPT2LMHeadModel
    does not.
    """

    def __init__(self, directory: str) -> None:
        super().__init__(directory)
        self.path = self.saved.path
        is_whole = any(name.startswith(TRANSFORMER) for name in self.saved)
        self._left_out = '' if is_whole else TRANSFORMER

    def __contains__(self, name: object) -> bool:
        return self.name_of(str(name)) in self.saved

    def name_of(self, name: str) -> str:
        """The name in the files, which is the own one or what it ends with."""
        return name.removeprefix(self._left_out)

    def load(self, name: str, parameter: torch.Tensor) -> None:
        """Copy the tensor, whatever its type is in its file."""
        stored = self.name_of(name)
        value = self.saved.read(stored).float()
        what = f'{self.saved.place(stored)}: {stored}'
        copy_value(value.numpy(), parameter.detach(), what)


def copy_value(value: np.ndarray, target: torch.Tensor, what: str) -> None:
    """Copy `value` into a tensor on the CPU; UserError where shape or type differ. what: it is."""
    shape = tuple(target.shape)
    if value.shape != shape or value.dtype != np.float32:
        raise UserError(f'{what} is {value.dtype} {value.shape}, the model needs float32 {shape}')
    np.copyto(target.numpy(), value)


def scoped(scope: str, name: str) -> str:
    """The name of a parameter below a scope; '' is no scope."""
    return f'{scope}/{name}' if scope else name


def load_parameters(
    weights: Weights, parameters: Mapping[str, torch.Tensor], scope: str
) -> list[str]:
    """Copy the weights under `scope` into `parameters` {name: parameter on the CPU}.

    Returns the names that the weights lack. UserError where shape or type differ.
    """
    missing = []
    for name, parameter in parameters.items():
        if scoped(scope, name) in weights:
            weights.load(scoped(scope, name), parameter)
        else:
            missing.append(name)
    return missing


def check_size(sizes: Sizes, weights: Weights) -> None:
    """UserError if a model of these sizes is far larger than `weights`.

    It is checked before any memory is allocated for the model.
    """
    layers = sizes.n_layer
    needed = FLOAT * sizes.parameters()
    if layers > len(weights) or needed > SLACK_BYTES + 4 * weights.nbytes():
        raise UserError(
            f'{weights.path} does not hold a model of {layers} layers of width {sizes.n_embd} and'
            f' context {sizes.n_ctx}, which its hparams.json or config.json describes'
        )


def files_in(directory: str) -> list[str]:
    """The files of a reward model in a directory, as this program and the original name them.

    A checkpoint that is there already says itself which other files it has.
    """
    files = [storage.join(directory, 'hparams.json')]
    folders = (directory, storage.join(directory, 'checkpoints'))
    if not any(storage.is_here(storage.join(folder, 'checkpoint')) for folder in folders):
        files += [storage.join(directory, 'checkpoints', name) for name in CHECKPOINT_FILES]
    return files


def open_bundle(directory: str) -> Bundle:
    """The latest checkpoint that is intact in `directory` or its checkpoints/, local or remote."""
    for folder in (directory, storage.join(directory, 'checkpoints')):
        path = storage.join(folder, 'checkpoint')
        if storage.exists(path):
            names = checkpoints.parse_checkpoint_file(storage.read_text(path))
            if names:
                return _latest_intact_bundle(folder, names)
    raise UserError(
        f'{directory} has no TensorFlow checkpoint: no `checkpoint` file there or in checkpoints/'
    )


def _latest_intact_bundle(folder: str, names: list[str]) -> Bundle:
    """The last of the checkpoints `names` that is intact; BundleError where none is."""
    oldest, *newer = names
    for name in reversed(newer):
        try:
            return _fetch_bundle(folder, name)
        except BundleError as e:
            print(f'WARNING: {e}; using the checkpoint before it')
    return _fetch_bundle(folder, oldest)


def _fetch_bundle(folder: str, name: str) -> Bundle:
    prefix = storage.join(folder, name)
    if storage.is_remote(folder):
        prefix = storage.cached_path(f'{prefix}.index').removesuffix('.index')
        shards = Bundle(prefix).shard_names()
        storage.cached_paths([storage.join(folder, shard) for shard in shards])
    else:
        checkpoints.restore_state(prefix)  # notices more damage than opening does
    return Bundle(prefix)
