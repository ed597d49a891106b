"""Which kind of network a model's directory describes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from lm_human_preferences import storage
from lm_human_preferences.checkpointing.variables import VariableNames
from lm_human_preferences.hparams.model_sizes import Sizes
from lm_human_preferences.language.gpt2.sizes import (
    HUGGING_FACE_SIZES,
    HParams,
    is_own,
    load_config,
    load_hparams,
    test_hparams,
)
from lm_human_preferences.language.model import Model
from lm_human_preferences.language.network import Network
from lm_human_preferences.language.weights import EMBEDDING, SafetensorsWeights, Weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SIZES_FILE = 'hparams.json'  # of models that this program or the original has saved
CONFIG_FILE = 'config.json'  # of models that transformers has saved


class Architecture(Protocol):
    """A kind of network in the sizes that a model's directory says."""

    @property
    def variable_names(self) -> VariableNames:
        """What checkpoints call its tensors."""
        ...

    @property
    def embedding(self) -> str:
        """The own name of a parameter that every network of this kind has."""
        ...

    @property
    def is_probed(self) -> bool:
        """Whether only `check` tells that this program can drive such networks."""
        ...

    def check(self, network: Any, name: str) -> None:
        """UserError unless this program can drive the network.

        name: of the model, for the error.
        """
        ...

    def sizes(self) -> Sizes:
        """Its sizes; not a copy."""
        ...

    def create(self, scalar_heads: Iterable[str]) -> Network:
        """A network on the CPU whose parameters have no values yet."""
        ...

    def saved_weights(self, directory: str) -> Weights:
        """The weights in a directory of transformers' `save_pretrained`."""
        ...

    def to_transformers(self, network: Any) -> PreTrainedModel:
        """A causal language model of transformers with the network's weights, without heads."""
        ...

    def write_files(self, directory: str) -> None:
        """Write what says the kind and the sizes into the directory of a model that is saved."""
        ...


class GPT2:
    """This program's own GPT-2 (see language.model). hparams: its sizes."""

    variable_names = Model.variable_names
    embedding = EMBEDDING
    is_probed = False

    def __init__(self, hparams: HParams) -> None:
        self._hparams = hparams

    def check(self, network: Any, name: str) -> None:
        """Nothing to do: tests show it."""

    def sizes(self) -> HParams:
        """See Architecture."""
        return self._hparams

    def create(self, scalar_heads: Iterable[str]) -> Model:
        """See Architecture."""
        return Model(self._hparams, scalar_heads)

    def saved_weights(self, directory: str) -> SafetensorsWeights:
        """See Architecture."""
        return SafetensorsWeights(directory)

    def to_transformers(self, network: Model) -> PreTrainedModel:
        """See Architecture."""
        from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel

        sizes = {
            theirs: getattr(self._hparams, ours) for ours, (theirs, _) in HUGGING_FACE_SIZES.items()
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
        theirs = GPT2LMHeadModel(config)
        theirs.transformer.load_state_dict(network.transformer.state_dict())
        return theirs

    def write_files(self, directory: str) -> None:
        """See Architecture: hparams.json, as the original wrote it."""
        storage.write_json(storage.join(directory, SIZES_FILE), self._hparams.to_nested_dict())


def is_saved_by_transformers(directory: str) -> bool:
    """Whether `save_pretrained` has written the directory, and not a training."""
    if storage.exists(storage.join(directory, SIZES_FILE)):
        return False
    return storage.exists(storage.join(directory, CONFIG_FILE))


def of_directory(directory: str | None, n_vocab: int) -> Architecture:
    """The architecture in `directory`, local or remote; None: the tiny GPT-2 of tests.

    n_vocab: tokens of its encoding. UserError for one that cannot be.
    """
    if directory is None:
        return GPT2(test_hparams())
    if is_saved_by_transformers(directory):
        path = storage.join(directory, CONFIG_FILE)
        if is_own(storage.read_json(path), n_vocab):
            return GPT2(load_config(path))
        return _transformers(directory, n_vocab)
    path = storage.join(directory, SIZES_FILE)
    sizes: Any = storage.read_json(path)
    if isinstance(sizes, dict) and 'family' in sizes:
        return _transformers(directory, n_vocab)
    return GPT2(load_hparams(path))


def _transformers(directory: str, n_vocab: int) -> Architecture:
    from lm_human_preferences.language.causal_lm.architecture import CausalLM

    return CausalLM(directory, n_vocab)
