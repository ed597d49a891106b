"""Where the weights of a language model come from: a released name, a directory, or the made-up
`test`, `reviews`."""

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
from lm_human_preferences.synthetic import language_model
from lm_human_preferences.utils.logging import say_as_recorded

TINY = 128  # width of a network that one thread of the CPU computes fastest
_GPT2 = dict(n_vocab=50257, n_ctx=1024)
RELEASED = {  # sizes by name, as their hparams.json has them
    '124M': dict(**_GPT2, n_embd=768, n_head=12, n_layer=12),
    '355M': dict(**_GPT2, n_embd=1024, n_head=16, n_layer=24),
    '774M': dict(**_GPT2, n_embd=1280, n_head=20, n_layer=36),
    '1558M': dict(**_GPT2, n_embd=1600, n_head=25, n_layer=48),
}
HUGGING_FACE_SIZES = dict(  # our name: theirs, and what it is where their file leaves it out
    n_vocab=('vocab_size', 50257),
    n_ctx=('n_positions', 1024),
    n_embd=('n_embd', 768),
    n_head=('n_head', 12),
    n_layer=('n_layer', 12),
)
SPARE = 1 << 24  # bytes that a model may take beyond what its file has
TANH_GELUS = ('gelu_new', 'gelu_pytorch_tanh')  # two names of the same function


def load_hparams(path: str, sizes: dict[str, Any] | None = None) -> model.HParams:
    """The model sizes in the hparams.json at `path`, local or remote; or `sizes`, which another
    file there has."""
    hparams, found = model.HParams(), storage.read_json(path) if sizes is None else sizes
    try:
        hparams.override_from_nested_dict(found)
        hparams.validate()
    except (AttributeError, TypeError, ValueError) as e:
        raise UserError(f'{path} does not hold the sizes of a model: {e}') from e
    return hparams


def check_size(hparams: model.HParams, weights: Bundle | HuggingFaceWeights) -> None:
    """UserError where a model of these sizes is far larger than `weights`: nobody shall take memory
    for it."""
    width, layers = hparams.n_embd, hparams.n_layer
    needed = 4 * (12 * layers * width**2 + (hparams.n_vocab + hparams.n_ctx) * width)
    if layers > len(weights) or needed > SPARE + 4 * weights.nbytes():
        raise UserError(
            f'{weights.prefix} does not hold a model of {layers} layers of width {width} and'
            f' context {hparams.n_ctx}, which its hparams.json or config.json describes'
        )


def test_hparams() -> model.HParams:
    """The tiny model of the original's tests, with random weights."""
    return model.HParams(n_vocab=27, n_ctx=8, n_layer=2, n_embd=7, n_head=1)


def open_bundle(directory: str) -> Bundle:
    """The newest TensorFlow checkpoint in `directory`, or in its checkpoints/, local or remote,
    checksums verified."""
    for place in (directory, storage.join(directory, 'checkpoints')):
        if storage.exists(storage.join(place, 'checkpoint')):
            names = checkpoints.parse_checkpoint_file(
                storage.read_text(storage.join(place, 'checkpoint'))
            )
            for name in reversed(names):
                try:
                    return _fetch_bundle(place, name)
                except BundleError as e:
                    if name == names[0]:
                        raise
                    print(f'WARNING: {e}; the checkpoint before is used')
    raise UserError(
        f'{directory} has no TensorFlow checkpoint: no `checkpoint` file there or in checkpoints/'
    )


def _fetch_bundle(place: str, name: str) -> Bundle:
    prefix = storage.join(place, name)
    if storage.is_remote(place):
        prefix = storage.cached_path(f'{prefix}.index').removesuffix('.index')
        storage.cached_paths([storage.join(place, shard) for shard in Bundle(prefix).shard_names()])
    else:
        checkpoints.restore_state(prefix)  # notices more damage than opening does
    return Bundle(prefix)


class HuggingFaceWeights(dict[str, np.ndarray]):
    """The weights of a GPT-2 directory saved by `transformers`, under the names of the GPT-2
    release."""

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
            ours = 'model/' + model.tf_name(name.removeprefix('transformer.'))
            self[ours] = model.as_tf(ours, tensor.float().numpy())

    def nbytes(self) -> int:
        """Bytes of all weights in memory."""
        return sum(array.nbytes for array in self.values())


class TrainedModel:
    """The original's TrainedModel: where a model's sizes, encoding and weights are.

    name: a released model (124M ...), the path or URL of a directory, 'test' for the tiny random
    one, 'reviews'
        for the tiny one of film reviews, which is trained when it is not in the cache.
    savedir: the directory, where it is not `name`.
    scope: take only the variables under this name ('policy' of a training checkpoint).
    """

    def __init__(self, name: str, savedir: str | None = None, scope: str | None = None) -> None:
        self.name, self.scope, self.savedir = name, scope, savedir or _directory_of(name)
        self.source: str | None = None  # the checkpoint that `build` read

    @property
    def is_random(self) -> bool:
        """Whether this is the 'test' model, which has no checkpoint."""
        return self.savedir is None

    @functools.cached_property
    def encoding(self) -> encodings.Encoding:
        """The encoding named in the directory's `encoding` file; `main` where there is none, as in
        GPT-2's releases."""
        if self.is_random:
            return encodings.Test
        assert self.savedir is not None
        path = storage.join(self.savedir, 'encoding')
        return (
            encodings.by_name(storage.read_json(path)) if storage.exists(path) else encodings.Main
        )

    def hparams(self) -> model.HParams:
        """A copy of the model's sizes."""
        return copy.deepcopy(self._hparams)

    def _is_hugging_face(self) -> bool:
        assert self.savedir is not None
        return not storage.exists(storage.join(self.savedir, 'hparams.json')) and storage.exists(
            storage.join(self.savedir, 'config.json')
        )

    @functools.cached_property
    def _hparams(self) -> model.HParams:
        if self.is_random:
            return test_hparams()
        assert self.savedir is not None
        if not self._is_hugging_face():
            return load_hparams(storage.join(self.savedir, 'hparams.json'))
        path = storage.join(self.savedir, 'config.json')
        config = storage.read_json(path)
        config = config if isinstance(config, dict) else {}
        kind, activation = config.get('model_type'), config.get('activation_function', 'gelu_new')
        if kind != 'gpt2' or activation not in TANH_GELUS:
            raise UserError(
                f'{path}: only GPT-2 with gelu_new is supported, not {kind!s:.80} with'
                f' {activation!s:.80}'
            )
        return load_hparams(
            path,
            {
                ours: config.get(theirs, default)
                for ours, (theirs, default) in HUGGING_FACE_SIZES.items()
            },
        )

    def scopes(self) -> list[str]:
        """The scopes of the language models in a training's checkpoint; [] for other files."""
        if self.is_random or self._is_hugging_face():
            return []
        assert self.savedir is not None
        names = set(open_bundle(self.savedir))
        scopes = sorted(
            name.removesuffix('/model/wte') for name in names if name.endswith('/model/wte')
        )
        return [scope for scope in scopes if f'{scope}/model/heads/reward/w' not in names]

    def write_files(self, directory: str) -> None:
        """Write the hparams.json and encoding that a saved model is read back with."""
        storage.write_json(storage.join(directory, 'hparams.json'), self.hparams().to_nested_dict())
        storage.write_json(storage.join(directory, 'encoding'), self.encoding.name)

    def build(self, *, scope: str, scalar_heads: Iterable[str] = ()) -> model.Model:
        """A `Model` with these weights on the CPU; heads that the checkpoint lacks are drawn at
        random and reported."""
        hparams = self.hparams()
        if hparams.n_vocab != self.encoding.n_vocab:
            raise UserError(
                f'{self.savedir}: its sizes have n_vocab {hparams.n_vocab}, '
                f'encoding {self.encoding.name!r} has {self.encoding.n_vocab}'
            )
        if hparams.n_embd <= TINY and 'OMP_NUM_THREADS' not in os.environ:
            # Threads meet after every operation, here of microseconds: on a busy machine they
            # mostly wait for the last.
            torch.set_num_threads(1)
        if self.is_random:
            return model.Model(hparams, scalar_heads).initialize()
        assert self.savedir is not None
        weights = (
            HuggingFaceWeights(self.savedir)
            if self._is_hugging_face()
            else open_bundle(self.savedir)
        )
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
            say_as_recorded(f'Param {scope}/{name} is missing from checkpoint {self.source}')
        return built.initialize(missing)


def _directory_of(name: str) -> str | None:
    """The directory of a model by name; None for 'test'."""
    if name == 'test':
        return None
    if name == 'reviews':
        return language_model.directory()
    if name in RELEASED and not storage.exists(name):
        return f'gs://gpt-2/models/{name}'
    directory = (
        storage.join(name, 'policy')
        if storage.exists(storage.join(name, 'policy', 'hparams.json'))
        else name
    )
    if not storage.is_remote(name) and not storage.exists(name):
        raise UserError(
            f'there is no model {name!r}: give one of {", ".join(RELEASED)}, or the directory of a'
            ' model'
        )
    return directory


def _source_names(
    parameters: Mapping[str, torch.nn.Parameter],
    weights: Bundle | HuggingFaceWeights,
    scope: str | None,
) -> dict[str, tuple[str, torch.nn.Parameter]]:
    """{name in `weights`: (our name, parameter)}: training checkpoints hold a model under its
    scope, releases bare."""
    scopes = (scope,) if scope else ('', 'policy', 'reward_model')
    prefix = next(
        (f'{s}/' if s else '' for s in scopes if (f'{s}/' if s else '') + 'model/wte' in weights),
        '',
    )
    return {prefix + name: (name, parameter) for name, parameter in parameters.items()}


def load_parameters(
    weights: Bundle | HuggingFaceWeights,
    parameters: Mapping[str, tuple[str, torch.nn.Parameter]],
) -> list[str]:
    """Copy `weights` (a Bundle) into `parameters` on the CPU, {name there: (our name, Parameter)}.

    Returns those of our names that the weights lack. Raises UserError naming tensor and file where
    shape or type differ.
    """
    missing = []
    for source, (name, parameter) in parameters.items():
        if source not in weights:
            missing.append(name)
            continue
        value = weights[source]
        shape = tuple(model.as_tf(name, parameter).shape)
        if value.shape != shape or value.dtype != np.float32:
            raise UserError(
                f'{weights.prefix}: {source} is {value.dtype} {value.shape}, the model needs'
                f' float32 {shape}'
            )
        np.copyto(parameter.detach().numpy(), value.reshape(parameter.shape))
    return missing
