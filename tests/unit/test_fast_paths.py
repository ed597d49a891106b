"""Network against the plain one: transformers' GPT-2 on each row alone, without padding."""

import itertools
import resource
import sys

import pytest
import torch
from compare import assert_close, assert_norm_close, logprobs_from_logits
from golden_data import load_json
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode
from trainers import loss_of, ppo_trainer, rollouts_of

from lm_human_preferences import ppo
from lm_human_preferences.distributed import comm as comms
from lm_human_preferences.errors import UserError
from lm_human_preferences.language import model
from lm_human_preferences.language.networks import attention, vocabulary
from lm_human_preferences.language.sample import Decoding
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.machine import hardware, precision
from lm_human_preferences.policy import Policy
from lm_human_preferences.training.optimizer import Adam

CPU = torch.device('cpu')
PADDING, QUERY, LENGTH, VOCABULARY = 99, 6, 5, 50
needs_bf16 = pytest.mark.skipif(
    precision._prepack_operator(torch.bfloat16) is None, reason='no bf16 on this processor'
)


@pytest.fixture(params=precision.LIBRARIES, autouse=True)
def library(request):
    kernels = precision.configure('fp32', CPU, request.param)
    if kernels.library != request.param:
        pytest.skip('oneDNN rounds float32 products on this processor')
    return request.param


@pytest.fixture
def net():
    torch.manual_seed(0)
    sizes = model.HParams(n_vocab=VOCABULARY, n_ctx=QUERY + LENGTH, n_embd=64, n_head=4, n_layer=3)
    built = model.Model(sizes, ['value', 'reward']).initialize()
    with torch.no_grad():
        for parameter in built.parameters():  # none of them zero
            parameter.add_(0.1 * torch.randn_like(parameter))
    return built


def padded(*shape, share):
    tokens = torch.randint(VOCABULARY, shape)
    tokens[..., 1:][torch.rand(*shape[:-1], shape[-1] - 1) < share] = PADDING
    return tokens


def plain(net, row):
    """Return transformers' outputs (length, n_embd); padding has that of the token before it."""
    from transformers import GPT2Config, GPT2Model  # takes seconds

    real, sizes = row != PADDING, net.sizes
    names = {'vocab_size': 'n_vocab', 'n_positions': 'n_ctx'}
    names |= {name: name for name in ('n_embd', 'n_layer', 'n_head')}
    config = GPT2Config(**{theirs: getattr(sizes, ours) for theirs, ours in names.items()})
    parameters, inputs = dict(net.transformer.named_parameters()), {'input_ids': row[real][None]}
    outputs = functional_call(GPT2Model(config).eval(), parameters, kwargs=inputs)
    return outputs.last_hidden_state[0][real.cumsum(0) - 1]


def assert_same(net, ours, reference):
    assert_norm_close(ours, reference.detach(), rtol=1e-5)
    weights, gradients = torch.randn(ours.shape), []
    for outputs in (ours, reference):
        net.zero_grad()
        (outputs * weights).sum().backward()
        gradients.append({name: p.grad for name, p in net.transformer.named_parameters()})
    for name, gradient in gradients[0].items():
        atol = 1e-5 * max(
            1, gradients[1][name].norm().item()
        )  # a bias of keys changes nothing: its gradient is noise
        assert (gradient - gradients[1][name]).norm() <= atol, name


@pytest.mark.parametrize('share', [0, 0.4], ids=['full', 'padded'])
def test_outputs_where_they_are_read(net, share):
    tokens = padded(4, QUERY + LENGTH, share=share)
    read = torch.arange(QUERY - 1, QUERY + LENGTH - 1)
    reference = torch.stack([plain(net, row)[read] for row in tokens])
    found = net.hidden(*net.mask_padding(tokens, PADDING), output_positions=read)
    assert_same(net, found, reference)


@pytest.mark.parametrize('share', [0, 0.4], ids=['full', 'padded'])
@pytest.mark.parametrize('n', [1, 4])
def test_several_responses_to_one_query(net, n, share):
    queries, responses = padded(3, QUERY, share=share), padded(3, n, LENGTH, share=share)
    if share:
        responses[0, 0] = PADDING
    rows = torch.cat([queries.repeat_interleave(n, dim=0), responses.flatten(0, 1)], dim=1)
    reference = torch.stack([plain(net, row)[QUERY - 1 :] for row in rows])
    found = net.completion_hidden(queries, responses, PADDING)
    assert_same(net, found.flatten(0, 1), reference)
    ends = net.last_hidden(queries, responses, PADDING).flatten(0, 1)
    assert_norm_close(ends.detach(), reference[:, -1].detach(), rtol=1e-5)


def test_a_context_that_is_too_long_is_refused_before_anything_is_sampled(net):
    contexts = torch.zeros(1, net.sizes.n_ctx, dtype=torch.int64)
    Decoding(net, contexts, PADDING, 1)
    with pytest.raises(ValueError, match="more than the model's context"):
        Decoding(net, contexts, PADDING, 3)


@pytest.mark.parametrize('queries, groups', [(7, 4), (7, 2), (1, 4), (1, 1)])
def test_heads_that_share_keys(queries, groups):
    torch.manual_seed(0)
    q = torch.randn(2, 4, queries, 16)
    k, v = torch.randn(2, 2, groups, 7, 16)
    bias = torch.zeros(2, 1, queries, 7).masked_fill(torch.rand(2, 1, queries, 7) < 0.5, -torch.inf)
    bias[..., 0] = 0
    for_each_head = (each.repeat_interleave(4 // groups, dim=1) for each in (k, v))
    scores = torch.einsum('bhqd,bhkd->bhqk', q, next(for_each_head)) * 0.5 + bias
    expected = torch.einsum('bhqk,bhkd->bqhd', scores.softmax(-1), next(for_each_head))
    assert_close(attention.attend(q, k, v, bias, 0.5), expected.flatten(2), atol=1e-5)


def test_products_that_lose_digits_are_not_taken(monkeypatch):
    rounding = hardware.Processor('an', 'AMD', ('avx512_bf16', 'amx_bf16'))
    monkeypatch.setattr(hardware, 'this_processor', lambda: rounding)
    kernels = precision.configure('fp32', CPU, 'onednn')
    assert torch.backends.mkldnn.matmul.fp32_precision == 'none'
    assert kernels.library == 'default' and kernels.fuses_attention


@pytest.mark.parametrize('deterministic', [True, False])
def test_gradients_of_a_gpu_are_repeatable(deterministic, monkeypatch):
    kernels = precision.Kernels(deterministic=deterministic)
    monkeypatch.setattr(precision, '_kernels', kernels)
    with precision.repeatable_gradients():
        assert torch.are_deterministic_algorithms_enabled() == deterministic
    assert not torch.are_deterministic_algorithms_enabled()
    error = UserError if deterministic else RuntimeError
    with pytest.raises(error), precision.repeatable_gradients():
        raise RuntimeError('put_ does not have a deterministic implementation')
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize('temperature', [1, 0.001])
def test_log_probabilities_of_a_large_vocabulary_are_exact(temperature):
    """log_softmax is not: after a likely word, the small terms of its sum lose their digits."""
    torch.manual_seed(0)
    logits = torch.randn(64, 50257)
    labels = torch.randint(50257, (64,))
    logits[range(64), labels] += 14
    logits[0, 7] = logits[0, labels[0]] - 0.001  # so that two words count at any temperature
    logits -= 50  # as large as a language model's
    logits /= temperature
    exact = logits.double().log_softmax(-1)
    expected = exact.gather(1, labels[:, None])[:, 0]
    entropies = -(exact * exact.exp()).sum(-1)
    assert_close(logprobs_from_logits(logits=logits, labels=labels), expected, rtol=0, atol=4e-6)
    # The product gives the logits themselves.
    found = vocabulary.logprobs_and_entropies(
        torch.zeros(64, 1), torch.zeros(50257, 1), labels, product=lambda h, weight: logits.clone()
    )
    assert_close(found[0], expected, rtol=0, atol=4e-6)
    assert_close(found[1], entropies, rtol=0, atol=4e-6)


@pytest.mark.parametrize('rows', [(1,), (5, 3)], ids=str)
def test_logits_by_pieces_of_the_vocabulary(rows, library, monkeypatch):
    monkeypatch.setattr(precision, '_VOCABULARY_PIECE', 16)
    h, table = torch.randn(*rows, 8), torch.randn(50, 8)  # 50 is not a multiple of a piece
    products = []
    multiply = torch.mm
    monkeypatch.setattr(
        torch, 'mm', lambda *args, **kwargs: products.append(args) or multiply(*args, **kwargs)
    )
    precision.configure('fp32', CPU, library)
    with torch.no_grad():
        assert_close(precision.logits(h, table), h @ table.T)
    assert len(products) == (0 if rows == (1,) or library == 'onednn' else 4)
    table.requires_grad_()
    assert precision.logits(h, table).requires_grad


@pytest.mark.parametrize('size', [64, 3001])
def test_log_probabilities_of_a_gpu_are_those_of_a_cpu(size, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(vocabulary.OnGPU, 'ROWS', 16)
    h, weight, labels = torch.randn(50, 16), torch.randn(size, 16), torch.randint(size, (50,))
    found = []
    for way in (vocabulary.OnCPU, vocabulary.OnGPU):
        h, weight = (tensor.detach().requires_grad_() for tensor in (h, weight))
        results = way.apply(h, weight, labels, torch.float32, torch.nn.functional.linear)
        results[0].square().sum().backward()
        found.append([*(each.detach() for each in results), h.grad, weight.grad])
    for ours, reference, rtol in zip(*found, (1e-7, 1e-6, 1e-6, 1e-6), strict=True):
        assert_norm_close(ours, reference, rtol=rtol)


def test_a_frozen_vocabulary_costs_no_gradient():
    h, labels = torch.randn(7, 16, requires_grad=True), torch.randint(VOCABULARY, (7,))
    weight = torch.randn(VOCABULARY, 16)
    with FlopCounterMode(display=False) as counter:
        vocabulary.logprobs_and_entropies(h, weight, labels)[0].sum().backward()
    assert counter.get_total_flops() == 2 * (2 * 7 * 16 * VOCABULARY)  # logits, gradient of `h`
    expected = logprobs_from_logits(logits=h @ weight.T, labels=labels).sum()
    assert_close(h.grad, *torch.autograd.grad(expected, h), atol=1e-5)


def gradient_of(trainer, rollouts):
    trainer.optimizer.gradients.zero_grad()
    minibatch = ppo.add_advantages(rollouts, trainer.ppo)
    loss, stats = loss_of(trainer, minibatch)
    loss.backward()
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in trainer.policy.model.parameters())
    return stats, torch.cat([p.grad.flatten() for p in trainer.policy.model.parameters()])


def test_bf16_agrees_with_float32_within_its_digits(library):
    config = load_json('ppo', 'configs.json')['configs'][0]
    trainer = ppo_trainer(config['hparams'], comms.Comm())
    rollouts = rollouts_of('ppo', config['id'], 0, 1)
    exact, gradient = gradient_of(trainer, rollouts)
    precision.configure('bf16', CPU, library)
    rounded, rounded_gradient = gradient_of(trainer, rollouts)
    for name in exact:
        assert_close(rounded[name], exact[name], rtol=0.02, atol=0.02, name=name)
    error = (rounded_gradient - gradient).norm() / gradient.norm()
    assert 1e-4 < error < 0.1, error  # the smaller is there to see that anything was rounded
    sampled = trainer.policy.respond(rollouts.queries, length=6)
    analyzed = trainer.policy.analyze_responses(rollouts.queries, sampled['responses'])
    for name in ('logprobs', 'values'):
        assert sampled[name].dtype == torch.float32
        assert_close(sampled[name], analyzed[name], rtol=0, atol=0.02, name=name)


@needs_bf16
def test_weights_laid_out_for_sampling_are_those_of_now(net, library):
    precision.configure('bf16', CPU, library)
    optimizer = Adam(dict(net.named_parameters()), comm=comms.Comm())
    tokens = padded(3, QUERY, share=0)

    def outputs():
        h = net.hidden(tokens)
        return torch.cat([h, net.logits(h)], dim=2)

    found = []
    for change in (
        lambda: None,
        lambda: optimizer.minimize(outputs().square().sum(), lr=0.1),
        lambda: net.transformer.h[1].mlp.c_fc.weight.detach().neg_(),
        net.initialize,
    ):
        change()
        with torch.no_grad():
            found.append(outputs())
        assert net.transformer.wte.weight.prepacked[1] is not None
        assert_close(found[-1], outputs().detach(), rtol=0, atol=0.05)
    assert all((a - b).abs().max() > 0.5 for a, b in itertools.pairwise(found))
    optimizer.minimize(outputs().square().sum(), lr=0.1)
    assert all(weight.prepacked[1] is None for weight in net.transformer.parameters())


@needs_bf16
def test_weights_laid_out_give_the_same_digits(net, library):
    precision.configure('bf16', CPU, library)
    x, layer = torch.randn(20, 64), net.transformer.h[0].mlp.c_fc
    with precision.autocast(CPU):
        outputs, low, logits = (layer(x), layer(x, gelu=True), net.logits(x))
        with torch.no_grad():
            assert torch.equal(layer(x), outputs) and outputs.dtype == torch.bfloat16
            assert_close(net.logits(x), logits.detach(), rtol=1e-5, atol=1e-6)
            fused = layer(x, gelu=True)
    product = x.double() @ layer.weight.double() + layer.bias
    exact = torch.nn.functional.gelu(product, approximate='tanh')
    assert (fused - exact).norm() < (low - exact).norm() < 0.02 * exact.norm()


FEW = 32


@needs_bf16
@pytest.mark.parametrize(
    'rows, learns, size, is_laid_out',
    [(2, False, 1, True), (1, False, 1, False), (FEW, True, 1, False), (FEW, False, 2**18, False)],
    ids=['two rows', 'one row', 'weights that learn', 'small weights'],
)
@torch.no_grad()
def test_few_rows_are_multiplied_by_weights_laid_out(
    net, library, monkeypatch, rows, learns, size, is_laid_out
):
    monkeypatch.setattr(precision, 'prepacked_rows', lambda *_: range(2, FEW + 1))
    monkeypatch.setattr(precision, '_LARGE_WEIGHT', size)
    precision.configure('fp32', CPU, library)
    net.requires_grad_(learns)
    x, table = torch.randn(rows, 64), net.transformer.wte.weight
    layer, other = (net.transformer.h[i].mlp.c_fc for i in (0, 1))
    transposed = torch.nn.Parameter(other.weight.T.contiguous(), requires_grad=learns)
    exact = x.double() @ layer.weight.double() + layer.bias
    exact_gelu = torch.nn.functional.gelu(exact, approximate='tanh')
    by_transposed = precision.linear_transposed(x, transposed, other.bias)
    for found, expected in (
        (layer(x), exact),
        (layer(x, gelu=True), exact_gelu),
        (net.logits(x), x.double() @ table.T.double()),
        (by_transposed, x.double() @ other.weight.double() + other.bias),
    ):
        assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    for weight in (layer.weight, table, transposed):
        assert hasattr(weight, 'prepacked') == is_laid_out


def test_without_the_operators_products_are_ordinary_ones(net, library, monkeypatch):
    monkeypatch.setattr(torch.ops, 'mkldnn', object())
    precision.configure('bf16', CPU, library)
    with torch.no_grad():
        h = net.hidden(padded(3, QUERY, share=0))
        assert_close(net.logits(h), h @ net.transformer.wte.weight.T, rtol=1e-5, atol=1e-5)
    assert not hasattr(net.transformer.wte.weight, 'prepacked')


def test_precisions():
    with pytest.raises(UserError, match='^precision tf32 needs a GPU'):
        precision.configure('tf32', CPU, 'default')
    for name in ('bf16', 'tf32', 'fp32'):
        precision.configure(name, torch.device('cuda'), 'default')
        assert torch.backends.cuda.matmul.allow_tf32 == (name != 'fp32')
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        with precision.plain():
            assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='of glibc')
def test_freed_memory_is_used_again():
    precision.configure('fp32', CPU, 'onednn')
    for _ in range(3):  # where the heap puts the first ones depends on what was freed before
        torch.ones(1 << 22)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(1 << 22)  # 4096 pages, of which some may lie elsewhere at first
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 5 * 4096


@pytest.mark.parametrize('only_samples', [False, True])
def test_weights_that_only_sample_do_not_learn(only_samples):
    """So that an Intel processor may keep them laid out for few rows."""
    policy = Policy(TrainedModel('test'), only_samples=only_samples)
    assert {each.requires_grad for each in policy.model.parameters()} == {not only_samples}
