"""Operators that sampling and updates start, and values that they read, counted on a CPU."""

import collections
import dataclasses
import itertools

import pretend_gpu
import pytest
import torch
from compare import assert_norm_close
from pretend_gpu import pretended
from tiny_causal_lms import save, tiny
from tiny_tokenisers import write_byte_level
from torch.utils._python_dispatch import TorchDispatchMode
from trainers import learner_with

from lm_human_preferences import train_policy
from lm_human_preferences.language import model, sample
from lm_human_preferences.language.networks import attention
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.machine import precision
from lm_human_preferences.policy import Policy
from lm_human_preferences.rewards import RewardModel, make_score_fn

READS = {'_local_scalar_dense', 'nonzero', 'item', 'is_nonzero', 'equal'}
LAYERS = 4
QUERY = 6


class Counter(TorchDispatchMode):
    """Counts operators that are no views, and those that read values."""

    def __init__(self):
        super().__init__()
        self.operators, self.reads = collections.Counter(), collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix('aten::')
        if name in READS:
            self.reads[name] += 1
        # The one that its schema does not call a view.
        elif not func.is_view and name != '_unsafe_view':
            self.operators[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def as_on_a_gpu():
    """Take the kernels that a GPU would."""
    precision.configure('fp32', torch.device('cuda'), 'default')
    yield
    precision.configure('fp32', torch.device('cpu'), 'default')


@pytest.fixture(scope='module')
def policy_of(tmp_path_factory):
    """Function that makes a policy of GPT-2 or of a family of transformers, with 4 layers."""
    saved = {}

    def policy_of(kind):
        if kind == 'gpt2':
            policy = Policy(TrainedModel('test'))
            sizes = model.HParams(n_vocab=27, n_ctx=32, n_embd=16, n_head=2, n_layer=LAYERS)
            policy.model = model.Model(sizes, ['value']).initialize()
            return policy
        if kind not in saved:
            saved[kind] = tmp_path_factory.mktemp(kind)
            write_byte_level(saved[kind])
            save(tiny(kind, vocab_size=512, num_hidden_layers=LAYERS), saved[kind])
        return Policy(TrainedModel(str(saved[kind])))

    return policy_of


def counted(function, *args):
    with Counter() as counter:
        function(*args)
    return counter


def queries_for(policy):
    tokens = torch.randint(1, 25, (10, QUERY), generator=torch.Generator().manual_seed(0))
    tokens[1, :3] = tokens[2, 4] = policy.padding_token
    return tokens


@pytest.mark.parametrize('kind, most', [('gpt2', 63), ('llama', 169)])
def test_a_token_starts_few_operators_and_reads_nothing(kind, most, policy_of, monkeypatch):
    policy = policy_of(kind)
    contexts = queries_for(policy)
    policy.respond(contexts, 2)  # the first pass tells whether a model computes by rows
    few, many = (counted(policy.respond, contexts, length) for length in (4, 12))
    assert (many.operators.total() - few.operators.total()) / 8 <= most
    assert not many.reads
    # With an end, what has ended is all that is read, every few tokens.
    copies, copy_to_host = [], torch.Tensor.cpu
    monkeypatch.setattr(
        torch.Tensor, 'cpu', lambda tensor: copies.append(1) or copy_to_host(tensor)
    )
    monkeypatch.setitem(sample.LOOK_EVERY, 'cpu', 4)
    policy.is_end = lambda tokens, position: tokens == policy.padding_token
    found = []
    for length in (4, 12):
        assert not counted(policy.respond, contexts, length).reads
        found.append(len(copies))
        copies.clear()
    assert found[1] - found[0] == 2


def row_by_row(q, k, v, starts, longest, scale):
    """Stand-in for flash attention, whose arguments these are."""
    rows = itertools.pairwise(starts.tolist())
    assert starts.dtype == torch.int32 and starts[-1] == len(q)
    found = []
    for start, end in rows:
        assert end - start <= longest
        parts = [each[start:end].transpose(0, 1) for each in (q, k, v)]
        attended = torch.nn.functional.scaled_dot_product_attention(
            *parts, is_causal=True, scale=scale, enable_gqa=True
        )
        found.append(attended.transpose(0, 1).flatten(1))
    return torch.cat(found)


@pytest.mark.parametrize(
    'kind, pads, checkpointing',
    [('gpt2', False, False), ('gpt2', True, True), ('llama', True, True)],
)
def test_attention_without_padding_is_that_with_it(
    kind, pads, checkpointing, policy_of, monkeypatch
):
    """In float32: log-probabilities, gradients, the rewards' outputs, and what is sampled."""
    policy, calls = policy_of(kind), []
    network = policy.model
    network.gradient_checkpointing = checkpointing
    queries = queries_for(policy)
    if not pads:
        queries[:] = queries[:1]
    policy.respond(queries, 2)  # the first pass tells whether a model computes by rows
    policy.is_end = (lambda tokens, position: tokens % 4 == 0) if pads else None

    def results():
        torch.manual_seed(0)
        sampled = policy.respond(queries, 6)
        found = policy.analyze_responses_op(queries, sampled['responses'])
        ends = network.last_hidden(queries, sampled['responses'][:, None], policy.padding_token)
        loss = found['logprobs'].mean() + found['values'].square().mean() + ends.square().mean()
        learning = [each for name, each in network.named_parameters() if 'lm_head' not in name]
        gradients = torch.autograd.grad(loss, learning, allow_unused=True)
        gradient = torch.cat([each.flatten() for each in gradients if each is not None])
        return sampled['responses'], found['logprobs'].detach(), sampled['logprobs'], ends, gradient

    def counted(*args):
        calls.append(args)
        return row_by_row(*args)

    expected = results()
    monkeypatch.setattr(attention, 'attend_within_rows', counted)
    kernels = dataclasses.replace(precision._kernels, flash_attention=True)
    monkeypatch.setattr(precision, '_kernels', kernels)
    sampled, *found = results()
    blocks = LAYERS if kind == 'gpt2' else LAYERS - 1
    assert len(calls) >= 3 * blocks
    assert torch.equal(sampled, expected[0])
    of_logprobs = 1e-7 if kind == 'gpt2' else 5e-7
    tolerances = of_logprobs, of_logprobs, 5e-6, 5e-6
    for ours, reference, rtol in zip(found, expected[1:], tolerances, strict=True):
        assert_norm_close(ours.detach(), reference.detach(), rtol=rtol)


def test_an_update_reads_little_whatever_its_micro_batches(monkeypatch):
    """On a pretended GPU, where what is read is told from what is in host memory already."""
    reads = []

    def compute(func, args, kwargs, own=pretend_gpu._compute):
        from_gpu = any(isinstance(each, pretend_gpu.Tensor) for each in args)
        name = func._schema.name.removeprefix('aten::')
        to_host = name == '_to_copy' and torch.device(kwargs.get('device') or 'cuda').type == 'cpu'
        if from_gpu and (to_host or name in READS):
            reads.append(name)
        return own(func, args, kwargs)

    monkeypatch.setattr(pretend_gpu, '_compute', compute)
    counts = []
    for size in (8, 2):
        with pretended():
            policy = Policy(TrainedModel('test'))
            policy.is_end = lambda tokens, position: tokens % 5 == 0
            settings = {'ppo.batch_size': 8, 'ppo.nminibatches': 2, 'ppo.noptepochs': 1}
            settings |= {'task.query_length': 2, 'task.response_length': 3}
            trainer = learner_with(policy, {**settings, 'ppo.micro_batch_size': size})
            trainer.steps_done = 1  # the first one logs
            reward_model = RewardModel(policy.trained_model)
            trainer.score_fn = make_score_fn(train_policy.HParams().task, reward_model)
            trainer.query_sampler = lambda: {'tokens': torch.arange(16).view(8, 2)}
            reads.clear()
            trainer.step()
            counts.append(len(reads))
    assert counts[0] <= 4
    assert counts[1] == counts[0]
