"""A causal language model of transformers as a Network: nothing of the model itself is changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from lm_human_preferences.checkpointing.variables import VariableNames
from lm_human_preferences.hparams.model_sizes import Sizes
from lm_human_preferences.language.network import Network
from lm_human_preferences.training import precision
from lm_human_preferences.utils.core import index_each

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CAUSAL_LM = 'causal_lm.'  # what own names of the model's parameters begin with


class OwnNames:
    """transformers' names of parameters, and the program's own of everything else.

    See `checkpointing.variables.VariableNames`.
    """

    def name_of(self, name: str) -> str:
        """'policy/causal_lm.model.norm.weight' -> 'policy/model.norm.weight'."""
        scope, slash, parameter = name.rpartition(f'/{CAUSAL_LM}')
        if slash:
            return f'{scope}/{parameter}'
        return name.removeprefix(CAUSAL_LM)

    def variables(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """`tensors` {own name: tensor} by their names in checkpoints, as they are."""
        return {self.name_of(name): tensor.detach() for name, tensor in tensors.items()}


class TransformersCache:
    """Keys and values of the tokens so far, as transformers keeps them."""

    def __init__(self, config: Any) -> None:
        from transformers import DynamicCache

        self.layers = DynamicCache(config=config)
        self.length = 0


class TransformersNetwork(Network):
    """A model of `AutoModelForCausalLM`, in which nothing is random.

    hparams: its sizes, whose n_vocab is that of the encoding: the embedding may have more rows, and
    their tokens are never predicted. scalar_heads: see Network.add_heads.
    """

    variable_names: VariableNames = OwnNames()

    def __init__(
        self, causal_lm: PreTrainedModel, hparams: Sizes, scalar_heads: Iterable[str] = ()
    ) -> None:
        super().__init__(hparams)
        self.causal_lm: Any = causal_lm.eval()
        self.logit_scale = _logit_scale(causal_lm.config)
        self._layers = _checkpointed_layers(causal_lm)
        self.add_heads(scalar_heads)

    def train(self, mode: bool = True) -> TransformersNetwork:
        """Nothing changes: there is no dropout in any training."""
        return self

    def outputs(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        allowed: torch.Tensor,
        real: torch.Tensor,
        output_positions: torch.Tensor | None,
        cache: TransformersCache | None = None,
    ) -> torch.Tensor:
        """See Network.outputs. All columns are computed, and those that are wanted are returned."""
        dtype = precision.autocast_dtype(torch.float32)
        # As small as can be, not -inf: some families add masks of their own.
        smallest = torch.finfo(dtype).min
        bias = torch.zeros(allowed.shape, dtype=dtype, device=tokens.device)
        bias = bias.masked_fill_(~allowed, smallest).unsqueeze(1).expand(len(tokens), -1, -1, -1)
        recomputes = self.gradient_checkpointing and torch.is_grad_enabled()
        for layer in self._layers:
            # What transformers calls training means for a layer itself only that it recomputes: its
            # parts, which might have dropout, are never in training.
            layer.training = recomputes
        with precision.autocast(tokens.device):
            h = self.causal_lm.base_model(
                input_ids=tokens,
                attention_mask=bias,
                position_ids=positions,
                past_key_values=cache.layers if cache is not None else None,
                use_cache=cache is not None,
            ).last_hidden_state
        if cache is not None:
            cache.length += tokens.shape[1]
        # In float32 like the logits and values that are made of it.
        h = h.float()
        return h if output_positions is None else index_each(h, output_positions)

    def new_cache(self) -> TransformersCache:
        """See Network.new_cache."""
        return TransformersCache(self.causal_lm.config)

    def output_layer(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The rows of the model's own tokens: see Network.output_layer."""
        layer = self.causal_lm.get_output_embeddings()
        n_vocab = self.hparams.n_vocab
        if len(layer.weight) == n_vocab:
            return layer.weight, layer.bias
        return layer.weight[:n_vocab], None if layer.bias is None else layer.bias[:n_vocab]


def _logit_scale(config: Any) -> float:
    """What a model multiplies its logits by, as its config may say; the probe tells if it does."""
    return getattr(config, 'logit_scale', None) or 1 / getattr(config, 'logits_scaling', 1)


def _checkpointed_layers(causal_lm: PreTrainedModel) -> list[Any]:
    """The layers that can recompute what a backward pass needs of them, set up to do so."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    if causal_lm.supports_gradient_checkpointing:
        causal_lm.activation_checkpointing_enable(
            {'use_reentrant': False, 'preserve_rng_state': False}
        )
    return [each for each in causal_lm.modules() if isinstance(each, GradientCheckpointingLayer)]
