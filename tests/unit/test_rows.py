"""Models of transformers by rows against their own pass: padding, a cache, several responses."""

import pytest
import torch
from compare import assert_close, assert_norm_close
from tiny_causal_lms import N_VOCAB, tiny

from lm_human_preferences.language.causal_lm.network import TransformersNetwork, rows_are_exact
from lm_human_preferences.language.causal_lm.sizes import blocks_of, sizes_of
from lm_human_preferences.machine import products
from lm_human_preferences.training import precision

CPU = torch.device('cpu')
FAMILIES = 'llama', 'qwen3', 'gpt_neox', 'opt'
WITHOUT_DROPOUT = {'opt': {'dropout': 0.0}}
PADDING = 99
needs_bf16 = pytest.mark.skipif(
    precision._prepack_operator(torch.bfloat16) is None, reason='no bf16 on this processor'
)


def network_of(family):
    model = tiny(family, **WITHOUT_DROPOUT.get(family, {}))
    return TransformersNetwork(model, sizes_of(model, N_VOCAB), ['value']).initialize()


def padded(*shape):
    tokens = torch.randint(N_VOCAB, shape)
    tokens[..., 1:][torch.rand(*shape[:-1], shape[-1] - 1) < 0.3] = PADDING
    return tokens


def analyzed(network):
    torch.manual_seed(0)
    tokens, mask = network.mask_padding(padded(4, 12), PADDING)
    h = network.hidden(tokens, mask, output_positions=torch.arange(5, 12))
    ends = network.last_hidden(padded(3, 6), padded(3, 4, 5), PADDING)
    return torch.cat([h.flatten(0, 1), ends.flatten(0, 1)])


@torch.no_grad()
def sampled(network):
    torch.manual_seed(1)
    tokens, mask = network.mask_padding(padded(3, 9), PADDING)
    cache = network.new_cache(9)
    last = torch.tensor([5])
    h = [network.hidden(tokens[:, :6], mask[:, :6], cache, last)]
    for end in range(7, 10):
        h.append(network.hidden(tokens[:, end - 1 : end], mask[:, :end], cache))
    return network.logits(torch.cat(h, dim=1))


def by_both(network, compute):
    found = []
    for network.takes_rows in (True, False):
        found.append(compute(network))
    return found


def gradients(network):
    network.zero_grad()
    h = analyzed(network)
    (h * torch.randn(h.shape)).sum().backward()
    return {name: p.grad for name, p in network.named_parameters() if p.grad is not None}


@pytest.mark.parametrize('library', products.LIBRARIES)
@pytest.mark.parametrize('family', FAMILIES)
def test_rows_are_the_models_own_pass(family, library):
    precision.configure('fp32', CPU, library)
    network = network_of(family)
    assert rows_are_exact(network)
    for compute in (analyzed, sampled):
        by_rows, own = by_both(network, compute)
        assert_norm_close(by_rows, own.detach(), rtol=1e-5)
    for network.gradient_checkpointing in (False, True):
        by_rows, own = by_both(network, gradients)
        assert by_rows.keys() == own.keys() and len(own) > 10
        for name, gradient in own.items():
            # A bias of keys changes nothing: its gradient is noise.
            atol = 1e-5 * max(1, gradient.norm().item())
            assert (by_rows[name] - gradient).norm() <= atol, name


@pytest.mark.parametrize('family', FAMILIES)
def test_the_last_layer_goes_on_where_outputs_are_read(family):
    network = network_of(family)
    tokens = {}
    for i, block in enumerate(blocks_of(network.causal_lm)):
        block.register_forward_hook(lambda _, args, out, i=i: tokens.update({i: args[0].shape[1]}))
    padded = torch.tensor([[1, PADDING, 2, 3, 4, 5], [6, 7, 8, PADDING, PADDING, 9]])
    inputs, mask = network.mask_padding(padded, PADDING)
    network.hidden(inputs, mask, output_positions=torch.tensor([4]))
    *others, last = tokens.values()
    assert set(others) == {9} and last == 2
    network.hidden(inputs, mask)
    assert set(tokens.values()) == {12}


@needs_bf16
def test_rows_in_bf16_are_within_its_digits():
    network = network_of('llama')
    exact = analyzed(network).detach()
    precision.configure('bf16', CPU, 'default')
    for rounded in by_both(network, analyzed):
        error = (rounded.detach() - exact).norm() / exact.norm()
        assert 1e-4 < error < 0.03, error
    with torch.no_grad():
        assert_norm_close(analyzed(network), exact, rtol=0.03)
    by_rows, own = by_both(network, sampled)
    assert_norm_close(by_rows, own, rtol=0.03)


@pytest.mark.parametrize('family', ['nemotron', 'gpt_bigcode', 'gpt_neo'])
def test_other_families_keep_their_own_pass(family):
    """Whose attention is another class, has no interface, or is not a plain softmax of products."""
    network = network_of(family)
    with torch.no_grad():
        tokens, mask = network.mask_padding(padded(2, 8), PADDING)
        network.hidden(tokens, mask)
    assert network.takes_rows is False


def test_without_rows_attention_is_the_models_own():
    """As an exported model calls it: with a mask of two dimensions, and none at all."""
    network, other = network_of('llama'), tiny('llama')
    tokens = torch.arange(10).reshape(2, 5)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    for each in (None, mask):
        ours = network.causal_lm(input_ids=tokens, attention_mask=each).logits
        assert_close(ours, other(input_ids=tokens, attention_mask=each).logits, atol=1e-6)
