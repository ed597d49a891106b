"""Check of a model of transformers: outputs must not depend on padding, cache or packing."""

from collections.abc import Iterator
from typing import Any

import torch

from lm_human_preferences.errors import UserError
from lm_human_preferences.language.causal_lm.network import TransformersNetwork
from lm_human_preferences.training import precision

TOLERANCE = 1e-3  # relative to the largest output, in float32
LENGTH = 12  # tokens in the test sequence
SEED = 0
LARGE = 1000  # factor for the output layer; makes a soft cap on logits noticeable


@torch.no_grad()
def check_network(network: TransformersNetwork, name: str, loaded: Any = None) -> None:
    """Raise UserError unless this program's outputs agree with transformers' own forward pass.

    loaded: the model that transformers loads from the same files, or None.
    """
    family = network.causal_lm.config.model_type
    refused = f'{name}: models of the family {family} are not supported: '
    try:
        with precision.plain():
            for difference, complaint in differences(network, loaded):
                # `not ... <=` and not `>`: NaN fails, too.
                if not difference <= TOLERANCE:
                    raise UserError(refused + complaint)
    except UserError:
        raise
    except Exception as e:  # any type, as the code of a model family may raise it
        raise UserError(
            f'{refused}they cannot compute with positions, a mask or a cache that are given'
            f' ({type(e).__name__}: {e!s:.200})'
        ) from e


def differences(network: TransformersNetwork, loaded: Any = None) -> Iterator[tuple[float, str]]:
    """Yield (relative error against transformers, complaint) for each way to compute outputs."""
    sizes = network.sizes
    device = network.device
    length = min(LENGTH, sizes.n_ctx)
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(sizes.n_vocab, (1, length), generator=generator).to(device)
    model = network.causal_lm
    reference = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    logits = _large_logits(model, tokens)[..., : sizes.n_vocab]

    yield (
        _difference(LARGE * network.logits(reference), logits),
        'their logits are not the product of the last hidden state with an output layer',
    )
    if loaded is not None:
        expected = loaded(input_ids=tokens, use_cache=False).logits[..., : sizes.n_vocab]
        yield (
            _difference(logits, LARGE * expected),
            'transformers loads a model with other log-probabilities from the same files',
        )
    for start in (0, length // 2):
        padded, mask = _with_padding(tokens, start)
        yield (
            _difference(network.hidden(padded, mask)[mask], reference[0]),
            'their positions cannot be set from outside, as padding needs',
        )
    cache = network.new_cache(length)
    parts = [network.hidden(part, None, cache) for part in tokens.split([length - 2, 1, 1], dim=1)]
    yield (
        _difference(torch.cat(parts, dim=1), reference),
        'token by token, with a cache of earlier tokens, they compute something else',
    )
    prompt, completion = tokens[:, : length // 2], tokens[:, length // 2 :]
    other = completion.flip(1)
    packed = network.last_hidden(prompt, torch.stack([other, completion], dim=1), sizes.n_vocab)
    yield (
        _difference(packed[:, 1], reference[:, -1]),
        'several responses behind one query affect each other',
    )


def _large_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits for `tokens (1, length)` with an output layer LARGE times as large."""
    output_layer = model.get_output_embeddings()
    hook = output_layer.register_forward_hook(lambda _, __, given: LARGE * given)
    try:
        return model(input_ids=tokens, use_cache=False).logits
    finally:
        hook.remove()


def _with_padding(tokens: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Insert two columns of padding at `start`; return (tokens, mask of real tokens)."""
    padding = torch.zeros_like(tokens[:, :2])
    padded = torch.cat([tokens[:, :start], padding, tokens[:, start:]], dim=1)
    mask = torch.ones_like(padded, dtype=torch.bool)
    mask[:, start : start + 2] = False
    return padded, mask


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())
