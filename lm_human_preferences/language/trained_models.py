"""Language models by name: released GPT-2, a directory, a model on the hub, or `test`."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.language import encodings
from lm_human_preferences.language.adapters import peft_files, record
from lm_human_preferences.language.causal_lm.library import (
    LibraryWeights,
    PretrainedWeights,
    config_of,
    empty_model,
)
from lm_human_preferences.language.model import Model
from lm_human_preferences.language.networks import model_kinds
from lm_human_preferences.language.networks.gpt2_files import (
    HUGGING_FACE_SIZES,
    HParams,
    is_own,
    load_config,
    load_hparams,
    test_hparams,
)
from lm_human_preferences.language.networks.model_kinds import (
    CONFIG_FILE,
    is_model,
    is_saved_by_transformers,
)
from lm_human_preferences.language.networks.network import HEADS, Network
from lm_human_preferences.language.networks.scopes import Sizes
from lm_human_preferences.language.networks.weights import (
    EMBEDDING,
    CheckpointWeights,
    Weights,
    are_here,
    has_own_output_layer,
    listed,
    load_parameters,
    scoped,
)
from lm_human_preferences.language.texts import tokenisers
from lm_human_preferences.runs.run_files import SIZES
from lm_human_preferences.utils.logging import log_as_original

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lm_human_preferences.language.causal_lm.architecture import CausalLM

_REWARD_HEAD = f'{HEADS}reward.w'
_probed: set[str | None] = set()  # directories whose models this process has checked


@dataclasses.dataclass(frozen=True)
class GPT2:
    """Architecture of this program's own GPT-2. embedding: parameter name of the embedding."""

    _sizes: HParams
    variable_names = Model.variable_names
    embedding = EMBEDDING

    def sizes(self) -> HParams:
        return self._sizes

    def create(self, scalar_heads: Iterable[str]) -> Model:
        return Model(self._sizes, scalar_heads)

    def to_transformers(self, network: Any) -> PreTrainedModel:
        """Return a causal language model of transformers with the network's weights."""
        from transformers.models.gpt2 import GPT2Config

        sizes = {
            theirs: getattr(self._sizes, ours) for ours, (theirs, _) in HUGGING_FACE_SIZES.items()
        }
        config = GPT2Config(
            **sizes,
            activation_function='gelu_pytorch_tanh',
            layer_norm_epsilon=1e-5,
            embd_pdrop=0,
            attn_pdrop=0,
            resid_pdrop=0,
            bos_token_id=None,
            eos_token_id=None,
        )
        theirs = empty_model(config)  # empty_model draws no random numbers
        theirs.transformer.load_state_dict(network.transformer.state_dict())
        return theirs

    def write_files(self, directory: str) -> None:
        self._sizes.write(directory)


Architecture: TypeAlias = 'GPT2 | CausalLM'


class TrainedModel:
    """Sizes, encoding and weights of a model (the original's TrainedModel).

    name: a released model (124M or gpt2, ...), a directory or URL, a model on the hub (ORG/NAME,
        ORG/NAME@REVISION or hf://...), or 'test' for the tiny random model.
    savedir: the model's directory (default: found from `name`); on the hub, hf:// with a commit.
    scope: name of the network in a training's checkpoint, such as 'policy'; None: find it.
    """

    def __init__(self, name: str, savedir: str | None = None, scope: str | None = None) -> None:
        self.name = name
        self.scope = scope
        self.savedir = savedir or _directory_of(name)
        self.source: str | None = None  # path of the checkpoint that `build` read

    @property
    def is_random(self) -> bool:
        """Return whether this is the 'test' model, which has no checkpoint."""
        return self.savedir is None

    @functools.cached_property
    def _adapted(self) -> TrainedModel | None:
        """Return the base model of a directory that holds a PEFT adapter; None for whole models."""
        if self.savedir is None or not model_kinds.is_peft(self.savedir):
            return None
        base = TrainedModel(peft_files.base_of(self.savedir))
        if base.savedir is None or model_kinds.is_peft(base.savedir):
            raise UserError(
                f'the base of the adapter {self.savedir}, {base.name!r:.80}, is not a whole model:'
                f' merge the base with `export`, and name the result in {model_kinds.PEFT_CONFIG}'
            )
        return base

    @functools.cached_property
    def encoding(self) -> encodings.Encoding:
        """Return the encoding that the model's files name, or GPT-2's if the files name none."""
        if self.is_random:
            return encodings.Test
        assert self.savedir is not None
        if model_kinds.is_directory(self.savedir):  # released models have GPT-2's encoding
            return encodings.Main
        if self._adapted is not None:
            return tokenisers.encoding_of_adapter(self.savedir, self._adapted.encoding)
        path = storage.join(self.savedir, 'encoding')
        if not storage.exists(path):
            is_theirs = is_saved_by_transformers(self.savedir)
            return tokenisers.encoding_in(self.savedir) if is_theirs else encodings.Main
        try:
            return tokenisers.find(storage.read_json(path), self.savedir)
        except UserError as e:
            raise UserError(f'the encoding in {path} cannot be used: {e}') from e

    def sizes(self) -> Sizes:
        return copy.deepcopy(self.architecture.sizes())

    @functools.cached_property
    def architecture(self) -> Architecture:
        """Return the network's architecture, which includes its sizes."""
        n_vocab = self.encoding.n_vocab
        if self.savedir is None or self._adapted is None:
            return architecture_of(self.savedir, n_vocab)
        changes = peft_files.changes_of(self.savedir)
        return architecture_of(self._adapted.savedir, n_vocab, changes)

    def scopes(self) -> list[str]:
        """Return the scopes (name prefixes) of all saved networks that lack a reward head."""
        if self.is_random:
            return []
        weights = self.open_weights()
        scopes = [scope for scope in weights.scopes() if scope]
        return [scope for scope in scopes if scoped(scope, _REWARD_HEAD) not in weights]

    def is_reward_model(self) -> bool:
        """Return whether the network has a reward head."""
        if self.is_random:
            return False
        weights = self.open_weights()
        return scoped(self.scope_in(weights), _REWARD_HEAD) in weights

    def write_files(self, directory: str) -> None:
        self.architecture.write_files(directory)
        self.encoding.write_files(directory)

    def create(self, scalar_heads: Iterable[str], scope: str = '') -> Network:
        """Create an uninitialised network on the CPU. scope: used only by SharedBase."""
        return self.architecture.create(scalar_heads)

    def create_like(self, saved: TrainedModel, scalar_heads: Iterable[str], scope: str) -> Network:
        """Create a network to load the model `saved` into. scope: used only by SharedBase."""
        return saved.create(scalar_heads)

    def to_transformers(self) -> PreTrainedModel:
        """Load this model as a causal language model of transformers, without scalar heads."""
        return self.as_transformers(self.build(scope='model'))

    def as_transformers(self, network: Network) -> PreTrainedModel:
        """Convert a network made by `create` to a causal language model of transformers."""
        return self.architecture.to_transformers(network)

    def check_runs(self) -> None:
        """Raise UserError unless this program can run the network; the check may load weights."""
        if not isinstance(self.architecture, GPT2):
            self.build(scope='model')

    def build(self, *, scope: str, scalar_heads: Iterable[str] = ()) -> Network:
        """Load a network on the CPU; heads that the files lack start with initial values."""
        sizes = self.sizes()
        if not self.encoding.fits(sizes.n_vocab):
            raise UserError(
                f'{self.savedir}: n_vocab is {sizes.n_vocab}, but the encoding'
                f' {self.encoding.name!r} has {self.encoding.n_vocab} tokens'
            )
        if self.is_random:
            return self.create(scalar_heads).initialize()
        weights = self.open_weights()
        built = self.create(scalar_heads)
        return built.initialize(self.fill(built, weights, scope))

    def fill(self, built: Network, weights: Weights, scope: str) -> list[str]:
        """Load `weights` into `built`; return the names of missing head parameters."""
        self.source = weights.path
        source_scope = self.scope_in(weights)
        parameters = dict(built.named_parameters())
        missing = load_parameters(weights, parameters, source_scope)
        lacking = [weights.name_of(name) for name in missing if not name.startswith(HEADS)]
        if lacking:
            raise UserError(f'{weights.path} lacks tensors of the model: {listed(lacking)}')
        unread = weights.unread(parameters)
        if unread:
            raise UserError(f'{weights.path} has tensors that do not fit: {listed(unread)}')
        for name in missing:
            variable = built.variable_names.name_of(f'{scope}/{name}')
            log_as_original(f'Param {variable} is missing from checkpoint {self.source}')
        if not isinstance(self.architecture, GPT2) and self.savedir not in _probed:
            loaded = weights.model if isinstance(weights, LibraryWeights) else None
            self.architecture.check_network(built, self.name, loaded)
            _probed.add(self.savedir)
        return missing

    def fetch(self) -> None:
        """Download the files of a model on the hub, and those of its base model."""
        for model in (self, self._adapted):
            if model is not None and model.savedir is not None:
                storage.cached_directory(model.savedir)
        # Find the architecture again, as the downloaded weights may show an untied output layer.
        vars(self).pop('architecture', None)

    def has_weights_here(self) -> bool:
        """Return whether no download from the hub is needed; False for an adapter on the hub."""
        directory, base = str(self.savedir), self._adapted
        if base is not None:
            return not storage.is_hub(directory) and base.has_weights_here()
        return not storage.is_hub(directory) or are_here(directory)

    def open_weights(self) -> Weights:
        """Open the weights in the model's files, local or remote."""
        self.fetch()
        architecture = self.architecture
        assert self.savedir is not None
        if self._adapted is not None:
            path = storage.join(self.savedir, peft_files.WEIGHTS)
            return LibraryWeights(path, self._merged)
        if is_saved_by_transformers(self.savedir):
            path = storage.join(self.savedir, CONFIG_FILE)
            config = config_of(storage.read_json(path), path)
            return PretrainedWeights(storage.cached_directory(self.savedir), config)
        own = CheckpointWeights(self.savedir, architecture.variable_names, architecture.embedding)
        if not model_kinds.has_adapters(self.savedir):
            return own
        return record.merged(own, self.savedir, TrainedModel)

    def _merged(self) -> PreTrainedModel:
        """Return the base model with the directory's PEFT adapter merged into it."""
        base, directory = self._adapted, self.savedir
        assert base is not None and directory is not None
        model = base.to_transformers()
        path = storage.join(str(base.savedir), CONFIG_FILE)
        if not peft_files.changes_of(directory) and storage.exists(path):
            # An adapter that trains rows of the embedding also changes an output layer tied to it.
            # PEFT changes both only if the base model's config says that they are tied.
            config = config_of(storage.read_json(path), path)
            model.config.tie_word_embeddings = config.tie_word_embeddings
        return peft_files.merged(directory, model)

    def scope_in(self, weights: Weights) -> str:
        """Return the network's scope in `weights`; '' if it has none, as in OpenAI's models."""
        found = weights.scopes()
        scopes = [self.scope] if self.scope else ['', 'policy', 'reward_model']
        matching = [scope for scope in scopes if scope in found]
        return matching[0] if matching else ''


def architecture_of(
    directory: str | None, n_vocab: int, changes: Mapping[str, Any] = MappingProxyType({})
) -> Architecture:
    """Return the architecture of the model in `directory`; for None, that of the tiny model `test`.

    n_vocab: number of tokens. changes: {setting: value} that override config.json.
    """
    if directory is None:
        return GPT2(test_hparams())
    if is_saved_by_transformers(directory):
        path = storage.join(directory, CONFIG_FILE)
        config = storage.read_json(path)
        is_tied = isinstance(config, dict) and config.get('tie_word_embeddings', True)
        # Look at local weights: the output layer may be untied although the config says it is tied.
        if is_tied and are_here(directory) and has_own_output_layer(directory):
            changes = {**changes, 'tie_word_embeddings': False}
        if is_own(config, n_vocab) and not changes:
            return GPT2(load_config(path))
        return _of_transformers(directory, n_vocab, changes)
    path = storage.join(directory, SIZES)
    sizes: Any = storage.read_json(path)
    if isinstance(sizes, dict) and 'family' in sizes:
        return _of_transformers(directory, n_vocab, {})
    return GPT2(load_hparams(path))


def _of_transformers(directory: str, n_vocab: int, changes: Mapping[str, Any]) -> CausalLM:
    # This import is local, as GPT-2 needs neither CausalLM nor transformers.
    from lm_human_preferences.language.causal_lm.architecture import CausalLM

    return CausalLM(directory, n_vocab, changes)


def known_sizes(name: str) -> HParams | None:
    size = model_kinds.released_name(name)
    return None if size is None else HParams(**model_kinds.RELEASED[size])


def _directory_of(name: str) -> str | None:
    """Return the directory of the model `name`; None for 'test'."""
    if name == 'test':
        return None
    size = model_kinds.released_name(name)
    if size is not None:
        return model_kinds.directory_of(size)
    if storage.model_path(name) is not None:
        return storage.pinned(name)
    if is_model(storage.join(name, 'policy')):  # A run directory holds its policy in policy/.
        return storage.join(name, 'policy')
    if not storage.is_remote(name) and not storage.exists(name):
        raise UserError(
            f'unknown model {name!r}: give one of {", ".join(model_kinds.RELEASED)}, the directory'
            ' of a model, or ORG/NAME on the hub'
        )
    return name
