"""Where the weights of a language model come from: a released model, a directory, or `test`."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.language import encodings, model, tokenisers
from lm_human_preferences.language.gpt2.sizes import (
    RELEASED,
    load_config,
    load_hparams,
    released_name,
    test_hparams,
)
from lm_human_preferences.language.weights import (
    CHECKPOINT_FILES,
    CheckpointWeights,
    SafetensorsWeights,
    Weights,
    check_size,
    load_parameters,
    scoped,
)
from lm_human_preferences.utils.logging import log_as_original

__all__ = ['TrainedModel', 'load_hparams', 'test_hparams']

_REWARD_HEAD = 'heads.reward.w'


class TrainedModel:
    """Where a model's sizes, encoding and weights are (the original's TrainedModel).

    name: a released model (124M or gpt2, ...), the path or URL of a directory, or 'test' for the
        tiny random model.
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

        Without that file it is that of `tokenisers.of_directory` for a directory of transformers,
        else `main`, as in GPT-2's releases. UserError for an unknown name.
        """
        if self.is_random:
            return encodings.Test
        assert self.savedir is not None
        path = storage.join(self.savedir, 'encoding')
        if not storage.exists(path):
            is_theirs = self._is_hugging_face()
            return tokenisers.of_directory(self.savedir) if is_theirs else encodings.Main
        name = storage.read_json(path)
        try:
            return tokenisers.find(name, self.savedir)
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
            return load_config(storage.join(self.savedir, 'config.json'))
        return load_hparams(storage.join(self.savedir, 'hparams.json'))

    def remote_files(self) -> list[str]:
        """The URLs of its files, and of those of its encoding, as far as they are known unread.

        Those of a released model are known.
        """
        files = []
        if self.savedir is not None and released_name(self.name) is not None:
            names = ('hparams.json', *CHECKPOINT_FILES)
            files = [storage.join(self.savedir, name) for name in names]
        if self.encoding.base_path is not None:
            files += [self.encoding.path(name) for name in encodings.BYTE_PAIR_FILES]
        return files

    def scopes(self) -> list[str]:
        """The scopes of the language models in the checkpoint of a training; [] for other files."""
        if self.is_random:
            return []
        weights = self._open_weights()
        scopes = [scope for scope in weights.scopes() if scope]
        return [scope for scope in scopes if scoped(scope, _REWARD_HEAD) not in weights]

    def is_reward_model(self) -> bool:
        """Whether `build` would read a network with a reward head: a reward model."""
        if self.is_random:
            return False
        weights = self._open_weights()
        return scoped(self._scope_in(weights), _REWARD_HEAD) in weights

    def write_files(self, directory: str) -> None:
        """Write the sizes and the files of the encoding, which a saved model needs to be read."""
        storage.write_json(storage.join(directory, 'hparams.json'), self.hparams().to_nested_dict())
        self.encoding.write_files(directory)

    def build(self, *, scope: str, scalar_heads: Iterable[str] = ()) -> model.Model:
        """A `Model` with these weights on the CPU.

        Heads that the checkpoint lacks start as the original's do, and a line says so.
        """
        hparams = self.hparams()
        if not self.encoding.fits(hparams.n_vocab):
            raise UserError(
                f'{self.savedir}: its sizes have n_vocab {hparams.n_vocab}, '
                f'encoding {self.encoding.name!r} has {self.encoding.n_vocab}'
            )
        if self.is_random:
            return model.Model(hparams, scalar_heads).initialize()
        weights = self._open_weights()
        check_size(hparams, weights)
        built = model.Model(hparams, scalar_heads)
        self.source = weights.path
        source_scope = self._scope_in(weights)
        missing = load_parameters(weights, dict(built.named_parameters()), source_scope)
        essential = [name for name in missing if not name.startswith('heads.')]
        if essential:
            raise UserError(
                f'{weights.path} lacks {weights.name_of(essential[0])} and {len(essential) - 1}'
                ' more of the model'
            )
        for name in missing:
            variable = built.variable_names.name_of(f'{scope}/{name}')
            log_as_original(f'Param {variable} is missing from checkpoint {self.source}')
        return built.initialize(missing)

    def _open_weights(self) -> Weights:
        assert self.savedir is not None
        if self._is_hugging_face():
            return SafetensorsWeights(self.savedir)
        return CheckpointWeights(self.savedir, model.Model.variable_names)

    def _scope_in(self, weights: Weights) -> str:
        """The scope of the network in `weights`; '' where it has none.

        Checkpoints of a training hold a network under its scope, releases hold it without one.
        """
        found = weights.scopes()
        scopes = [self.scope] if self.scope else ['', 'policy', 'reward_model']
        matching = [scope for scope in scopes if scope in found]
        return matching[0] if matching else ''


def _directory_of(name: str) -> str | None:
    """The directory of the model `name`; None for 'test'."""
    if name == 'test':
        return None
    released = released_name(name)
    if released is not None:
        return f'gs://gpt-2/models/{released}'
    if storage.exists(storage.join(name, 'policy', 'hparams.json')):  # a run directory
        return storage.join(name, 'policy')
    if not storage.is_remote(name) and not storage.exists(name):
        raise UserError(
            f'there is no model {name!r}: give one of {", ".join(RELEASED)}, or the directory of a'
            ' model'
        )
    return name
