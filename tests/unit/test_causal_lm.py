"""Models of transformers, driven from outside: which can be, and that they compute the same."""

from dataclasses import replace

import pytest
import torch
from compare import assert_close, assert_norm_close
from tiny_causal_lms import N_VOCAB, save, tiny

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.language import trained_models
from lm_human_preferences.language.causal_lm import architecture
from lm_human_preferences.language.causal_lm.network import TransformersNetwork, rows_are_exact
from lm_human_preferences.language.causal_lm.sizes import blocks_of, sizes_of
from lm_human_preferences.language.networks.attention import BlockInputs
from lm_human_preferences.language.networks.network import Network
from lm_human_preferences.language.networks.weights import CAUSAL_LM
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.machine import precision

TAKEN = (
    'arcee codegen cohere falcon gemma3_text glm4 gpt2 gpt_bigcode gpt_neo gpt_neox gptj granite'
    ' hunyuan_v1_dense llama mistral mixtral nemotron olmo2 opt phi phi3 qwen2 qwen3 qwen3_moe'
    ' seed_oss smollm3 stablelm starcoder2'
).split()

CPU = torch.device('cpu')
PADDING = 99
needs_bf16 = pytest.mark.skipif(
    precision._prepack_operator(torch.bfloat16) is None, reason='no bf16 on this processor'
)


def network_of(family, **settings):
    model = tiny(family, **settings)
    return TransformersNetwork(model, sizes_of(model, N_VOCAB), ['value']).initialize()


@pytest.mark.parametrize('family', TAKEN)
def test_families_that_are_taken(family):
    """Padding on the left and in the middle, a cache, several responses in a row, and logits."""
    network = network_of(family)
    with torch.no_grad():
        found = [difference for difference, _ in architecture.differences(network)]
    assert len(found) == 5 and max(found) < 1e-5
    assert_gradients_ignore_padding(network)


@torch.no_grad()
@pytest.mark.parametrize('family', ['codegen', 'gemma3_text', 'gpt_neo', 'llama', 'mistral'])
def test_responses_that_fill_a_row_beyond_the_window_are_as_if_alone(family):
    """Also beyond the model's positions: GPT-Neo limits attention by columns."""
    network = network_of(family, sliding_window=16, window_size=16, use_sliding_window=True)
    prompt, responses = torch.arange(8).unsqueeze(0), torch.arange(96).reshape(1, 16, 6) % N_VOCAB
    states = BlockInputs([1])
    together = network.completion_hidden(prompt, responses, PADDING, states)
    for number, response in enumerate(responses[0]):
        own = BlockInputs([1])
        row = torch.cat([prompt[0], response]).unsqueeze(0)
        columns = torch.arange(7, 14)
        alone = network.hidden(row, None, None, columns)
        network.completion_hidden(prompt, response[None, None], PADDING, own)
        torch.testing.assert_close(together[:, number], alone, rtol=1e-4, atol=1e-5)
        kept = states.states[1].unflatten(0, (16, 7))[number]
        torch.testing.assert_close(kept, own.states[1], rtol=1e-4, atol=1e-5)


def assert_gradients_ignore_padding(network):
    tokens = torch.arange(1, 9).reshape(1, 8)
    zeros = torch.zeros(1, 3).long()
    padded = torch.cat([zeros[:, :2], tokens[:, :5], zeros, tokens[:, 5:]], 1)
    mask = torch.tensor([[False] * 2 + [True] * 5 + [False] * 3 + [True] * 3])
    gradients = []
    for h in (network.hidden(tokens), network.hidden(padded, mask)[mask].unsqueeze(0)):
        network.zero_grad()
        network.logits(h).square().sum().backward()
        gradients.append([each.grad for each in network.causal_lm.parameters()])
    for plain, with_padding in zip(*gradients, strict=True):
        if plain is not None:
            assert (plain - with_padding).abs().max() <= 1e-5 * plain.abs().max() + 2e-5


@pytest.mark.parametrize(
    'family, told',
    [
        ('bloom', 'they cannot compute with given positions, a given mask or a given cache ('),
        ('mpt', 'their positions cannot be set from outside, as padding needs'),
        ('gemma2', 'their logits are not the product of the last hidden state with an output'),
    ],
)
def test_families_that_are_refused(family, told):
    with pytest.raises(UserError) as e:
        architecture.check_network(network_of(family), 'org/name')
    refused = f'org/name: models of the family {family} are not supported: {told}'
    assert str(e.value).startswith(refused)
    assert '\n' not in str(e.value)


@torch.no_grad()
def test_a_cap_on_logits_is_noticed_where_they_are_small():
    network = network_of('gemma2')
    for parameter in network.parameters():
        parameter.mul_(0.05)
    with pytest.raises(UserError, match='their logits are not the product'):
        architecture.check_network(network, 'org/name')


def test_a_longer_context_by_longrope_is_not_used():
    """Rows of a batch would change each other, and kept keys would not fit."""
    factors = {'short_factor': [1.0] * 4, 'long_factor': [2.0] * 4}
    longest = {'original_max_position_embeddings': 16}
    rotation = {'rope_type': 'longrope', 'rope_theta': 1e4, **factors, **longest}
    assert network_of('llama', rope_parameters=rotation).sizes.n_ctx == 16
    assert network_of('phi3', rope_parameters=rotation, **longest).sizes.n_ctx == 16


@pytest.mark.parametrize(
    'config, told',
    [
        ({'model_type': 'mamba'}, 'the family mamba are not supported: they have no attention'),
        (
            {'model_type': 'gemma3', 'text_config': {'num_hidden_layers': 2}},
            r'a multimodal model \(gemma3\): only .* are supported: use a published gemma3_text',
        ),
    ],
)
def test_configs_that_are_refused(tmp_path, config, told):
    storage.write_json(str(tmp_path / 'config.json'), config)
    with pytest.raises(UserError, match=told):
        trained_models.architecture_of(str(tmp_path), N_VOCAB).sizes()


def test_a_network_that_forgets_what_is_in_the_cache_is_refused(monkeypatch):
    network = network_of('llama')
    outputs = network.outputs

    def forgetful(tokens, positions, rows):
        rows = replace(rows, bias=rows.bias[..., -tokens.shape[1] :], cache=None)
        return outputs(tokens, positions, rows)

    monkeypatch.setattr(network, 'outputs', forgetful)
    with pytest.raises(UserError, match='token by token'):
        architecture.check_network(network, 'org/name')


def test_responses_that_see_each_other_are_refused(monkeypatch):
    def all_true(same_completion, *_, **__):  # behind a prompt of 6 tokens
        return torch.ones(2 * (len(same_completion) + 6,), dtype=torch.bool)

    network = network_of('llama')
    monkeypatch.setattr('lm_human_preferences.language.networks.network.F.pad', all_true)
    with pytest.raises(UserError, match='several responses behind one query affect each other'):
        architecture.check_network(network, 'org/name')


@pytest.mark.parametrize('family, is_remote', [('llama', True), ('gpt2', False)])
def test_a_model_in_several_files_is_read(tmp_path, family, is_remote, cache, server, blobs):
    model = tiny(family).to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size='20KB')
    storage.write_json(str(tmp_path / 'encoding'), 'test')
    files = sorted(path.name for path in tmp_path.glob('*.safetensors'))
    assert len(files) > 1
    name = str(tmp_path)
    if is_remote:
        name = 'az://openaipublic/lm-human-preferences/llama'
        for path in tmp_path.iterdir():
            blobs['openaipublic/lm-human-preferences'][f'llama/{path.name}'] = path.read_bytes()
    network = TrainedModel(name).build(scope='policy')
    stored = dict(model.float().named_parameters())
    read = {name.removeprefix(CAUSAL_LM): each for name, each in network.named_parameters()}
    assert read.keys() == stored.keys()
    assert all(torch.equal(value, stored[name]) for name, value in read.items())


@pytest.mark.parametrize(
    'file, told',
    [
        ('../b', 'is damaged: it must map tensors to files in the same'),
        ('model-2.safetensors', 'model-2.safetensors: no such file or directory'),
    ],
)
def test_a_damaged_index_is_named(tmp_path, file, told):
    save(tiny('llama'), tmp_path)
    storage.write_json(str(tmp_path / 'encoding'), 'test')
    (tmp_path / 'model.safetensors').unlink()
    index = str(tmp_path / 'model.safetensors.index.json')
    storage.write_json(index, {'weight_map': {'a': file}})
    with pytest.raises(UserError, match=told):
        TrainedModel(str(tmp_path)).build(scope='policy')


def test_tokens_that_the_tokeniser_does_not_know_have_no_logits():
    network = network_of('llama')
    assert network.logits(network.hidden(torch.ones(1, 3).long())).shape == (1, 3, N_VOCAB)


@pytest.mark.parametrize(
    'family, settings',
    [('cohere', {'logit_scale': 0.3}), ('granite', {'logits_scaling': 8.0}), ('phi', {})],
)
def test_a_scale_or_a_bias_of_logits_counts(family, settings):
    network = network_of(family, **settings)
    if family == 'phi':
        torch.nn.init.normal_(network.causal_lm.lm_head.bias)
    tokens = torch.arange(6).reshape(1, 6)
    h = network.hidden(tokens)
    theirs = network.causal_lm(input_ids=tokens).logits[..., :N_VOCAB]
    torch.testing.assert_close(network.logits(h), theirs)
    if family == 'phi':
        torch.testing.assert_close(Network.logits(network, h), theirs)  # of networks like GPT-2
    expected = (theirs / 0.7).log_softmax(-1)
    logprobs, entropies = network.logprobs_and_entropies(h, tokens, 0.7)
    torch.testing.assert_close(logprobs, expected.gather(-1, tokens[..., None])[..., 0])
    torch.testing.assert_close(entropies, -(expected.exp() * expected).sum(-1))


def test_nothing_is_dropped_at_random(tmp_path):
    """Nor while blocks are computed again for the gradient, which transformers calls training."""
    save(tiny('gpt2', attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5), tmp_path)
    storage.write_json(str(tmp_path / 'encoding'), 'test')
    network = TrainedModel(str(tmp_path)).build(scope='policy', scalar_heads=['value'])
    assert isinstance(network, TransformersNetwork)
    network.gradient_checkpointing = True
    tokens = torch.arange(8).reshape(1, 8)
    torch.testing.assert_close(network.hidden(tokens), network.train().hidden(tokens))
    exported = TrainedModel(str(tmp_path)).to_transformers().config
    assert (exported.attn_pdrop, exported.resid_pdrop) == (0.5, 0.5)


FAMILIES = 'llama', 'qwen3', 'gpt_neox', 'opt'


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


@pytest.mark.parametrize('library', precision.LIBRARIES)
@pytest.mark.parametrize('family', FAMILIES)
def test_rows_are_the_models_own_pass(family, library):
    precision.configure('fp32', CPU, library)
    network = network_of(family, dropout=0.0)
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
    network, other = network_of('llama'), tiny('llama')
    tokens = torch.arange(10).reshape(2, 5)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    for each in (None, mask):
        ours = network.causal_lm(input_ids=tokens, attention_mask=each).logits
        assert_close(ours, other(input_ids=tokens, attention_mask=each).logits, atol=1e-6)
