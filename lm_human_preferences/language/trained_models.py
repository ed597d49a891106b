"""Where the weights of a language model come from: a released model, a directory, or `test`."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from lm_human_preferences import storage
from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.checkpointing.tf_bundle import Bundle, BundleError
from lm_human_preferences.errors import UserError
from lm_human_preferences.language import encodings, model
from lm_human_preferences.language.parameters import as_tf, tf_name
from lm_human_preferences.utils.logging import log_as_original

ONE_THREAD_WIDTH = 128  # a network no wider than this is fastest on one thread of the CPU
_GPT2 = dict(n_vocab=50257, n_ctx=1024)
# Sizes of the released models by name, as in their hparams.json.
RELEASED = {
    '124M': dict(**_GPT2, n_embd=768, n_head=12, n_layer=12),
    '355M': dict(**_GPT2, n_embd=1024, n_head=16, n_layer=24),
    '774M': dict(**_GPT2, n_embd=1280, n_head=20, n_layer=36),
    '1558M': dict(**_GPT2, n_embd=1600, n_head=25, n_layer=48),
}
# The name of each size in config.json of `transformers`, and its value where that omits it.
HUGGING_FACE_SIZES = dict(
    n_vocab=('vocab_size', 50257),
    n_ctx=('n_positions', 1024),
    n_embd=('n_embd', 768),
    n_head=('n_head', 12),
    n_layer=('n_layer', 12),
)
SLACK_BYTES = 1 << 24  # by which a model may be larger than its file
TANH_GELUS = ('gelu_new', 'gelu_pytorch_tanh')  # two names of the same function


def load_hparams(path: str, sizes: dict[str, Any] | None = None) -> model.HParams:
    """The model sizes in the hparams.json at `path`, local or remote.

    sizes: those read from another kind of file at `path`, which are used instead.
    """
    hparams = model.HParams()
    settings = storage.read_json(path) if sizes is None else sizes
    try:
        hparams.override_from_nested_dict(settings)
        hparams.validate()
    except (AttributeError, TypeError, ValueError) as e:
        raise UserError(f'{path} does not hold the sizes of a model: {e}') from e
    return hparams


def check_size(hparams: model.HParams, weights: Bundle | HuggingFaceWeights) -> None:
    """UserError if a model of these sizes is far larger than `weights`.

    It is checked before any memory is allocated for the model.
    """
    width = hparams.n_embd
    layers = hparams.n_layer
    needed = 4 * (12 * layers * width**2 + (hparams.n_vocab + hparams.n_ctx) * width)
    if layers > len(weights) or needed > SLACK_BYTES + 4 * weights.nbytes():
        raise UserError(
            f'{weights.prefix} does not hold a model of {layers} layers of width {width} and'
            f' context {hparams.n_ctx}, which its hparams.json or config.json describes'
        )


def test_hparams() -> model.HParams:
    """The tiny model of the original's tests, with random weights."""
    return model.HParams(n_vocab=27, n_ctx=8, n_layer=2, n_embd=7, n_head=1)


def open_bundle(directory: str) -> Bundle:
    """The latest TensorFlow checkpoint in `directory` or its checkpoints/, local or remote.

    Its checksums are verified. Where it is damaged, the one before it is used with a warning.
    """
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


class HuggingFaceWeights(dict[str, np.ndarray]):
    """The weights of a GPT-2 directory saved by `transformers`.

    They have the names of the GPT-2 release.
    """

    def __init__(self, directory: str) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        self.prefix = storage.join(directory, 'model.safetensors')
        try:
            weights = load_file(storage.cached_path(self.prefix))
        except storage.NotFound as e:
            raise UserError(
                f'{directory} has a config.json but no model.safetensors; pickled weights are not'
                ' read: save it again with save_pretrained'
            ) from e
        except SafetensorError as e:
            raise UserError(f'{self.prefix} is damaged: {e}') from e
        for name, tensor in weights.items():
            release_name = 'model/' + tf_name(name.removeprefix('transformer.'))
            self[release_name] = as_tf(release_name, tensor.float().numpy())

    def nbytes(self) -> int:
        """Bytes of all weights in memory."""
        return sum(array.nbytes for array in self.values())


class TrainedModel:
    """Where a model's sizes, encoding and weights are (the original's TrainedModel).

    name: a released model (124M ...), the path or URL of a directory, or 'test' for the tiny random
        model.
    savedir: the directory, where that is not `name`.
    scope: read only the variables under this name ('policy' in the checkpoint of a training).
    """

    def __init__(self, name: str, savedir: str | None = None, scope: str | None = None) -> None:
        self.name = name
        self.scope = scope
        self.savedir = savedir or _directory_of(name)
        self.source: str | None = None  # the checkpoint that `build` read

    @property
    def is_random(self) -> bool:
        """Whether this is the 'test' model, which has no checkpoint."""
        return self.savedir is None

    @functools.cached_property
    def encoding(self) -> encodings.Encoding:
        """The encoding that the directory's file `encoding` names.

        Without that file it is `main`, as in GPT-2's releases. UserError for an unknown name.
        """
        if self.is_random:
            return encodings.Test
        assert self.savedir is not None
        path = storage.join(self.savedir, 'encoding')
        if not storage.exists(path):
            return encodings.Main
        name = storage.read_json(path)
        try:
            return encodings.by_name(name)
        except UserError as e:
            raise UserError(f'{path}: {e}') from e

    def hparams(self) -> model.HParams:
        """A copy of the model's sizes."""
        return copy.deepcopy(self._hparams)

    def _is_hugging_face(self) -> bool:
        assert self.savedir is not None
        if storage.exists(storage.join(self.savedir, 'hparams.json')):
            return False
        return storage.exists(storage.join(self.savedir, 'config.json'))

    @functools.cached_property
    def _hparams(self) -> model.HParams:
        if self.is_random:
            return test_hparams()
        assert self.savedir is not None
        if self._is_hugging_face():
            return _hugging_face_hparams(storage.join(self.savedir, 'config.json'))
        return load_hparams(storage.join(self.savedir, 'hparams.json'))

    def scopes(self) -> list[str]:
        """The scopes of the language models in the checkpoint of a training; [] for other files."""
        if self.is_random or self._is_hugging_face():
            return []
        assert self.savedir is not None
        names = set(open_bundle(self.savedir))
        suffix = '/model/wte'
        scopes = sorted(name.removesuffix(suffix) for name in names if name.endswith(suffix))
        return [scope for scope in scopes if f'{scope}/model/heads/reward/w' not in names]

    def write_files(self, directory: str) -> None:
        """Write the files hparams.json and encoding, which a saved model needs to be read."""
        storage.write_json(storage.join(directory, 'hparams.json'), self.hparams().to_nested_dict())
        storage.write_json(storage.join(directory, 'encoding'), self.encoding.name)

    def build(self, *, scope: str, scalar_heads: Iterable[str] = ()) -> model.Model:
        """A `Model` with these weights on the CPU.

        Heads that the checkpoint lacks start as the original's do, and a line says so.
        """
        hparams = self.hparams()
        if hparams.n_vocab != self.encoding.n_vocab:
            raise UserError(
                f'{self.savedir}: its sizes have n_vocab {hparams.n_vocab}, '
                f'encoding {self.encoding.name!r} has {self.encoding.n_vocab}'
            )
        if hparams.n_embd <= ONE_THREAD_WIDTH and 'OMP_NUM_THREADS' not in os.environ:
            # Threads synchronise after every operation, and here each takes microseconds: on a busy
            # machine they mostly wait for the last one.
            torch.set_num_threads(1)
        if self.is_random:
            return model.Model(hparams, scalar_heads).initialize()
        weights = self._open_weights()
        check_size(hparams, weights)
        built = model.Model(hparams, scalar_heads)
        self.source = weights.prefix
        missing = load_parameters(
            weights, _source_names(built.tf_parameters(), weights, self.scope)
        )
        essential = [name for name in missing if not name.startswith('model/heads/')]
        if essential:
            raise UserError(
                f'{weights.prefix} lacks {essential[0]} and {len(essential) - 1} more of the model'
            )
        for name in missing:
            log_as_original(f'Param {scope}/{name} is missing from checkpoint {self.source}')
        return built.initialize(missing)

    def _open_weights(self) -> Bundle | HuggingFaceWeights:
        assert self.savedir is not None
        if self._is_hugging_face():
            return HuggingFaceWeights(self.savedir)
        return open_bundle(self.savedir)


def _hugging_face_hparams(path: str) -> model.HParams:
    """The sizes in a config.json of `transformers`; UserError unless it describes a GPT-2."""
    config = storage.read_json(path)
    if not isinstance(config, dict):
        config = {}
    model_type = config.get('model_type')
    activation = config.get('activation_function', 'gelu_new')
    if model_type != 'gpt2' or activation not in TANH_GELUS:
        raise UserError(
            f'{path}: only GPT-2 with gelu_new is supported, not {model_type!s:.80} with'
            f' {activation!s:.80}'
        )
    sizes = {name: config.get(key, default) for name, (key, default) in HUGGING_FACE_SIZES.items()}
    return load_hparams(path, sizes)


def _directory_of(name: str) -> str | None:
    """The directory of the model `name`; None for 'test'."""
    if name == 'test':
        return None
    if name in RELEASED and not storage.exists(name):
        return f'gs://gpt-2/models/{name}'
    if storage.exists(storage.join(name, 'policy', 'hparams.json')):  # a run directory
        return storage.join(name, 'policy')
    if not storage.is_remote(name) and not storage.exists(name):
        raise UserError(
            f'there is no model {name!r}: give one of {", ".join(RELEASED)}, or the directory of a'
            ' model'
        )
    return name


def _source_names(
    parameters: Mapping[str, torch.nn.Parameter],
    weights: Bundle | HuggingFaceWeights,
    scope: str | None,
) -> dict[str, tuple[str, torch.nn.Parameter]]:
    """{name in `weights`: (name in the model, parameter)}.

    Checkpoints of a training hold a model under its scope, releases hold it without one.
    """
    prefixes = [f'{scope}/'] if scope else ['', 'policy/', 'reward_model/']
    matching = [prefix for prefix in prefixes if f'{prefix}model/wte' in weights]
    prefix = matching[0] if matching else ''
    return {prefix + name: (name, parameter) for name, parameter in parameters.items()}


def load_parameters(
    weights: Bundle | HuggingFaceWeights,
    parameters: Mapping[str, tuple[str, torch.nn.Parameter]],
) -> list[str]:
    """Copy `weights` into `parameters` on the CPU.

    parameters: {name in `weights`: (name in the model, Parameter)}. Returns the names in the model
    that the weights lack. Raises UserError naming tensor and file where shape or type differ.
    """
    missing = []
    for source, (name, parameter) in parameters.items():
        if source not in weights:
            missing.append(name)
            continue
        value = weights[source]
        shape = tuple(as_tf(name, parameter).shape)
        if value.shape != shape or value.dtype != np.float32:
            raise UserError(
                f'{weights.prefix}: {source} is {value.dtype} {value.shape}, the model needs'
                f' float32 {shape}'
            )
        np.copyto(parameter.detach().numpy(), value.reshape(parameter.shape))
    return missing
