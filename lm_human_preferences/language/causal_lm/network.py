"""Network around a causal language model of transformers, with the model's own parameters."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

import torch

from lm_human_preferences.checkpointing.names import VariableNames
from lm_human_preferences.language.causal_lm import rows as fast_pass
from lm_human_preferences.language.causal_lm.sizes import blocks_of
from lm_human_preferences.language.networks.attention import BlockInputs, KVCache, Rows
from lm_human_preferences.language.networks.network import Network
from lm_human_preferences.language.networks.scopes import Sizes
from lm_human_preferences.language.networks.weights import CAUSAL_LM
from lm_human_preferences.machine import precision
from lm_human_preferences.utils.core import index_each

ROWS_TOLERANCE = 1e-3  # accepted difference of outputs, relative to transformers' largest output


class OwnNames:
    """Names in checkpoints: transformers names its own parameters, and we name other tensors."""

    def name_of(self, name: str) -> str:
        """Return a name in checkpoints: policy/norm.weight for policy/causal_lm.norm.weight."""
        scope, slash, parameter = name.rpartition(f'/{CAUSAL_LM}')
        if slash:
            return f'{scope}/{parameter}'
        return name.removeprefix(CAUSAL_LM)

    def variables(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {self.name_of(name): tensor.detach() for name, tensor in tensors.items()}


class TransformersCache:
    """Attention keys and values in transformers' own cache. length: number of cached tokens."""

    def __init__(self, config: Any) -> None:
        from transformers import DynamicCache

        self.layers = DynamicCache(config=config)
        self.length = 0

    def keep(self, rows: torch.Tensor) -> None:
        """Keep only the rows of the batch whose indices are in `rows`."""
        self.layers.batch_select_indices(rows)


class TransformersNetwork(Network):
    """Model from AutoModelForCausalLM, without dropout; only tokens of the encoding get logits."""

    variable_names: VariableNames = OwnNames()

    def __init__(self, causal_lm: Any, sizes: Sizes, scalar_heads: Iterable[str] = ()) -> None:
        super().__init__(sizes)
        self.causal_lm = causal_lm.eval()
        config = causal_lm.config
        # check_network refuses models that scale logits by options other than the two read here.
        scale = getattr(config, 'logit_scale', None)
        self.logit_scale = scale or 1 / getattr(config, 'logits_scaling', 1)
        self._layers = _checkpointed_layers(causal_lm)
        # `takes_rows` is None until weights are loaded and the fast pass of rows.py can be tested.
        self.takes_rows: bool | None = None if fast_pass.prepare(causal_lm) else False
        constants = [name for name, each in self.named_parameters() if not each.requires_grad]
        self.constants = frozenset(constants)
        self.add_heads(scalar_heads)

    def train(self, mode: bool = True) -> Self:
        """Ignore `mode` and return self: models are trained without dropout."""
        return self

    def outputs(self, tokens: torch.Tensor, positions: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Return the last layer's outputs; use rows.py if rows.py agrees with transformers."""
        takes_rows = self._computes_by_rows()
        recomputes = self.gradient_checkpointing and torch.is_grad_enabled()
        for layer in self._layers:
            # A layer's own `training` only decides whether transformers recomputes its activations.
            # `training` stays False in the modules inside a layer, so that there is no dropout.
            layer.training = recomputes
        model, cache, kept = self.causal_lm.base_model, rows.cache, rows.kept
        with precision.autocast(tokens.device), _noted(self.causal_lm, kept):
            if takes_rows:
                h = fast_pass.outputs(model, tokens, positions, rows)
            else:
                h = model(
                    input_ids=tokens,
                    attention_mask=rows.bias,
                    position_ids=positions,
                    past_key_values=cache.layers if cache is not None else None,
                    use_cache=cache is not None,
                ).last_hidden_state
        if cache is not None:
            cache.length += tokens.shape[1]
        if kept is not None and rows.read is not None:
            for block, states in kept.states.items():
                if takes_rows:
                    kept.states[block] = rows.wanted(states[0])
                else:
                    kept.states[block] = index_each(states, rows.read).flatten(0, 1)
        # Logits and values are computed from the outputs in float32.
        h = h.float()
        if rows.read is None or takes_rows:
            return h
        return index_each(h, rows.read)

    def new_cache(self, capacity: int) -> KVCache | TransformersCache:
        if self._computes_by_rows():
            return KVCache(capacity)
        return TransformersCache(self.causal_lm.config)

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        """Return the logits (..., n_vocab) for outputs `h (..., n_embd)`."""
        # Multiply by the whole weight: a slice would lack the prepacked copy for fast products.
        table = self.causal_lm.get_output_embeddings().weight
        logits = precision.logits(self.scaled(h), table)[..., : self.sizes.n_vocab]
        _, bias = self.output_layer()
        return logits if bias is None else logits + bias

    def output_layer(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the weight and bias of the output layer, cut to the tokens of the encoding."""
        layer = self.causal_lm.get_output_embeddings()
        n_vocab = self.sizes.n_vocab
        if len(layer.weight) == n_vocab:
            return layer.weight, layer.bias
        return layer.weight[:n_vocab], None if layer.bias is None else layer.bias[:n_vocab]

    def takes_row_of(self, columns: int) -> bool:
        """Return whether several completions of a prompt may share a row of `columns` tokens."""
        # The attention of some models, such as GPT-Neo, accepts rows of at most n_ctx tokens.
        return columns <= self.sizes.n_ctx or self._computes_by_rows()

    def _computes_by_rows(self) -> bool:
        if self.takes_rows is None:
            self.takes_rows = rows_are_exact(self)
        return self.takes_rows


@torch.no_grad()
def rows_are_exact(network: TransformersNetwork) -> bool:
    """Return whether the fast forward pass of rows.py gives the same outputs as transformers."""
    try:
        with precision.plain():
            by_rows, own = (_short_outputs(network, takes_rows) for takes_rows in (True, False))
    except Exception:  # code of transformers may raise any type of error
        return False
    return bool((by_rows - own).abs().max() <= ROWS_TOLERANCE * own.abs().max())


def _short_outputs(network: TransformersNetwork, takes_rows: bool) -> torch.Tensor:
    """Return outputs for two short padded sequences, whose last token is computed with a cache."""
    device = network.device
    tokens = torch.arange(10).reshape(2, 5) % network.sizes.n_vocab
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[0, 2] = mask[1, 0] = False
    columns = torch.arange(2, 4, device=device)  # each row has an unmasked token before column 2
    network.takes_rows = takes_rows
    cache = network.new_cache(5)
    first = network.hidden(tokens[:, :4], mask[:, :4], cache, columns)
    return torch.cat([first, network.hidden(tokens[:, 4:], mask, cache)], dim=1)


@contextlib.contextmanager
def _noted(causal_lm: Any, kept: BlockInputs | None) -> Iterator[None]:
    """Within the context, store the inputs of the blocks `kept.blocks` in `kept.states`."""
    with contextlib.ExitStack() as stack:
        for number in () if kept is None else kept.blocks:

            def note(_: Any, args: Any, kwargs: Any, number: int = number) -> None:
                assert kept is not None
                kept.states[number] = args[0] if args else kwargs['hidden_states']

            # This hook runs first: another hook of the last block changes the block's arguments.
            block = blocks_of(causal_lm)[number]
            hook = block.register_forward_pre_hook(note, prepend=True, with_kwargs=True)
            stack.callback(hook.remove)
        yield


def _checkpointed_layers(causal_lm: Any) -> list[Any]:
    """Enable gradient checkpointing, and return the layers that support it."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    if causal_lm.supports_gradient_checkpointing:
        causal_lm.activation_checkpointing_enable(
            {'use_reentrant': False, 'preserve_rng_state': False}
        )
    return [each for each in causal_lm.modules() if isinstance(each, GradientCheckpointingLayer)]
