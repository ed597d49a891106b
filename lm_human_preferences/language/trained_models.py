"""Where the weights of a language model come from: a released model, a directory, or `test`."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.model_sizes import Sizes
from lm_human_preferences.language import architectures, encodings, tokenisers
from lm_human_preferences.language.architectures import Architecture
from lm_human_preferences.language.gpt2 import released
from lm_human_preferences.language.gpt2.sizes import HParams, load_hparams, test_hparams
from lm_human_preferences.language.network import HEADS, Network
from lm_human_preferences.language.weights import (
    CHECKPOINT_FILES,
    CheckpointWeights,
    Weights,
    check_size,
    load_parameters,
    scoped,
)
from lm_human_preferences.utils.logging import log_as_original

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ['TrainedModel', 'load_hparams', 'test_hparams']

_REWARD_HEAD = f'{HEADS}reward.w'
_probed: set[str | None] = set()  # directories whose models this process has driven


class TrainedModel:
    """Where a model's sizes, encoding and weights are (the original's TrainedModel).

    name: a released model (124M or gpt2, ...), the path or URL of a directory, a model of the hub
        (ORG/NAME, ORG/NAME@REVISION or hf://...), or 'test' for the tiny random model.
    savedir: the directory, where that is not `name`; of a model of the hub, its hf:// path with the
        commit.
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

        Without that file it is that of `tokenisers.of_directory` for a directory of transformers,
        else `main`, as in GPT-2's releases. UserError for an unknown name.
        """
        if self.is_random:
            return encodings.Test
        assert self.savedir is not None
        path = storage.join(self.savedir, 'encoding')
        if not storage.exists(path):
            is_theirs = architectures.is_saved_by_transformers(self.savedir)
            return tokenisers.of_directory(self.savedir) if is_theirs else encodings.Main
        name = storage.read_json(path)
        try:
            return tokenisers.find(name, self.savedir)
        except UserError as e:
            raise UserError(f'{path}: {e}') from e

    def hparams(self) -> Sizes:
        """A copy of the model's sizes."""
        return copy.deepcopy(self._architecture.sizes())

    @functools.cached_property
    def _architecture(self) -> Architecture:
        return architectures.of_directory(self.savedir, self.encoding.n_vocab)

    def remote_files(self) -> list[str]:
        """The URLs of its files, and of those of its encoding, as far as they are known unread.

        Those of a released model are known.
        """
        files = []
        if self.savedir is not None and released.released_name(self.name) is not None:
            names = ('hparams.json', *CHECKPOINT_FILES)
            files = [storage.join(self.savedir, name) for name in names]
        if self.encoding.base_path is not None:
            files += [self.encoding.path(name) for name in encodings.BYTE_PAIR_FILES]
        return files

    def scopes(self) -> list[str]:
        """The scopes of the language models in the checkpoint of a training; [] for other files."""
        if self.is_random:
            return []
        weights = self.open_weights()
        scopes = [scope for scope in weights.scopes() if scope]
        return [scope for scope in scopes if scoped(scope, _REWARD_HEAD) not in weights]

    def is_reward_model(self) -> bool:
        """Whether `build` would read a network with a reward head: a reward model."""
        if self.is_random:
            return False
        weights = self.open_weights()
        return scoped(self._scope_in(weights), _REWARD_HEAD) in weights

    def write_files(self, directory: str) -> None:
        """Write the sizes and the files of the encoding, which a saved model needs to be read."""
        self._architecture.write_files(directory)
        self.encoding.write_files(directory)

    def create(self, scalar_heads: Iterable[str]) -> Network:
        """A network like this model on the CPU, whose parameters have no values yet."""
        return self._architecture.create(scalar_heads)

    def to_transformers(self) -> PreTrainedModel:
        """This model as a causal language model of transformers, without scalar heads."""
        return self.as_transformers(self.build(scope='model'))

    def as_transformers(self, network: Network) -> PreTrainedModel:
        """The same of a network that `create` has made, with the values that it has."""
        return self._architecture.to_transformers(network)

    @property
    def is_probed(self) -> bool:
        """Whether only its values tell that this program can drive it: it is no GPT-2."""
        return self._architecture.is_probed

    def check(self) -> None:
        """UserError unless this program can drive a network of this kind.

        Where it `is_probed`, all values are read for that, as `build` does.
        """
        if self.is_probed:
            self.build(scope='model')

    def build(self, *, scope: str, scalar_heads: Iterable[str] = ()) -> Network:
        """A network with these weights on the CPU.

        Heads that the checkpoint lacks start as the original's do, and a line says so.
        """
        hparams = self.hparams()
        if not self.encoding.fits(hparams.n_vocab):
            raise UserError(
                f'{self.savedir}: its sizes have n_vocab {hparams.n_vocab}, '
                f'encoding {self.encoding.name!r} has {self.encoding.n_vocab}'
            )
        if self.is_random:
            return self.create(scalar_heads).initialize()
        weights = self.open_weights()
        check_size(hparams, weights)
        built = self.create(scalar_heads)
        self.source = weights.path
        source_scope = self._scope_in(weights)
        missing = load_parameters(weights, dict(built.named_parameters()), source_scope)
        essential = [name for name in missing if not name.startswith(HEADS)]
        if essential:
            raise UserError(
                f'{weights.path} lacks {weights.name_of(essential[0])} and {len(essential) - 1}'
                ' more of the model'
            )
        for name in missing:
            variable = built.variable_names.name_of(f'{scope}/{name}')
            log_as_original(f'Param {variable} is missing from checkpoint {self.source}')
        if self._architecture.is_probed and self.savedir not in _probed:
            self._architecture.check(built, self.name)
            _probed.add(self.savedir)
        return built.initialize(missing)

    def fetch(self) -> None:
        """Have the files of a model of the hub on this machine."""
        if self.savedir is not None:
            storage.cached_directory(self.savedir)

    def open_weights(self) -> Weights:
        """The weights in the model's files, local or remote."""
        assert self.savedir is not None
        if architectures.is_saved_by_transformers(self.savedir):
            return self._architecture.saved_weights(storage.cached_directory(self.savedir))
        names = self._architecture.variable_names
        return CheckpointWeights(self.savedir, names, self._architecture.embedding)

    def _scope_in(self, weights: Weights) -> str:
        """The scope of the network in `weights`; '' where it has none.

        Checkpoints of a training hold a network under its scope, releases hold it without one.
        """
        found = weights.scopes()
        scopes = [self.scope] if self.scope else ['', 'policy', 'reward_model']
        matching = [scope for scope in scopes if scope in found]
        return matching[0] if matching else ''


def known_sizes(name: str) -> Sizes | None:
    """The sizes of a model that are known without its files, as of a released one; else None."""
    size = released.released_name(name)
    return None if size is None else HParams(**released.RELEASED[size])


def _directory_of(name: str) -> str | None:
    """The directory of the model `name`; None for 'test'."""
    if name == 'test':
        return None
    size = released.released_name(name)
    if size is not None:
        return released.directory_of(size)
    if storage.model_path(name) is not None:
        return storage.pinned(name)
    if storage.exists(storage.join(name, 'policy', 'hparams.json')):  # a run directory
        return storage.join(name, 'policy')
    if not storage.is_remote(name) and not storage.exists(name):
        raise UserError(
            f'there is no model {name!r}: give one of {", ".join(released.RELEASED)}, the directory'
            ' of a model, or ORG/NAME of the hub'
        )
    return name
