"""Results of a GPU beside those of a CPU: `LMHP_TEST_GPU=1 pytest -n0 tests/gpu`."""

import socket
import subprocess
import sys

import pytest
import torch
from compare import assert_norm_close
from experiments import resolved
from launched import REPOSITORY, set_launcher, torch_variables
from tiny_causal_lms import tiny
from tiny_tokenisers import write_byte_level

from lm_human_preferences.distributed import torch_comm
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.language.adapters import shared
from lm_human_preferences.language.texts import tokenisers
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.machine import precision
from lm_human_preferences.plan.phases import policy_phase
from lm_human_preferences.policy import Policy

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason='no GPU is here, or LMHP_TEST_GPU=1 is not set'
)
CPU, GPU = torch.device('cpu'), torch.device('cuda')
TOLERANCES = {'fp32': 1e-4, 'tf32': 2e-2, 'bf16': 8e-2}  # of the norms of results
RESPONSE_LENGTH = 24


@pytest.fixture(params=TOLERANCES)
def tolerance(request):
    """The GPU computes in each precision; how far its results may be away."""
    precision.configure(request.param, GPU, 'default')
    yield TOLERANCES[request.param]
    precision.configure('fp32', GPU, 'default')


@pytest.fixture(scope='module', params=['gpt2', 'llama'])
def model(request, tmp_path_factory):
    """A directory of a model with 128 positions."""
    directory = tmp_path_factory.mktemp(request.param)
    write_byte_level(directory)
    rows = tokenisers.encoding_in(str(directory)).n_vocab
    positions = 'n_positions' if request.param == 'gpt2' else 'max_position_embeddings'
    tiny(request.param, vocab_size=rows, **{positions: 128}).save_pretrained(directory)
    return str(directory)


def policy_on(device, model, adapted):
    """The policy of a model with a head, and adapters if `adapted`, the same on all devices."""
    start = TrainedModel(model)
    if adapted:
        options = {'task.policy.initial_model': model, 'task.policy.lora': 'on'}
        hparams = resolved('train_policy', 'test', options)
        start = shared.Bases().under(
            start, policy_phase(hparams).adapters, hparams.run, 'policy', Comm()
        )
    policy = Policy(start, device=device)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in policy.parameters_by_name().items():
        if 'lora' in name or 'heads' in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 10)
    return policy


def queries_of(policy, length):
    """Queries (6, length), two of which begin with padding."""
    queries = torch.randint(50, (6, length), generator=torch.Generator().manual_seed(length))
    queries[1, : length // 2] = policy.padding_token
    queries[2, :3] = policy.padding_token
    return queries


def analysed(policy, queries, responses):
    """(log-probabilities, gradient of what a loss is made of), as arrays."""
    with precision.autocast(policy.device):
        found = policy.analyze_responses_op(queries, responses)
    loss = found['logprobs'].mean() + found['entropies'].mean() + found['values'].square().mean()
    learning = [each for each in policy.parameters_by_name().values() if each.requires_grad]
    gradients = torch.autograd.grad(loss, learning)
    gradient = torch.cat([each.flatten() for each in gradients])
    return found['logprobs'].detach().cpu().numpy(), gradient.cpu().numpy()


@pytest.mark.parametrize('adapted', [False, True])
@pytest.mark.parametrize('length', [41, 64])  # with responses 64 tokens, and 87, are computed
def test_log_probabilities_and_gradients_are_those_of_the_cpu(model, tolerance, length, adapted):
    theirs, ours = (policy_on(device, model, adapted) for device in (CPU, GPU))
    queries = queries_of(theirs, length)
    responses = torch.randint(50, (6, RESPONSE_LENGTH), generator=torch.Generator().manual_seed(2))
    with precision.plain():
        expected = analysed(theirs, queries, responses)
    for found, reference in zip(analysed(ours, queries, responses), expected, strict=True):
        assert_norm_close(found, reference, rtol=tolerance)


@pytest.mark.parametrize('adapted', [False, True])
def test_samples_have_the_log_probabilities_that_the_cpu_computes(model, tolerance, adapted):
    theirs, ours = (policy_on(device, model, adapted) for device in (CPU, GPU))
    queries = queries_of(theirs, 64)
    found = ours.respond(queries, RESPONSE_LENGTH)
    assert len(set(found['responses'].flatten().tolist())) > 9
    with precision.plain():
        expected = theirs.analyze_responses(queries, found['responses'].cpu())
    for name in ('logprobs', 'values'):
        assert_norm_close(found[name], expected[name].numpy(), rtol=tolerance, name=name)


def test_gradients_are_averaged_by_nccl(monkeypatch):
    """With one rank, which is all that NCCL takes on one GPU."""
    with socket.create_server(('127.0.0.1', 0)) as free:
        port = free.getsockname()[1]
    (variables,) = torch_variables(1, '127.0.0.1', port)
    set_launcher(monkeypatch, variables)
    comm = torch_comm.TorchComm('torch', 60)
    assert comm.name == 'torch (nccl)'
    layer, x = torch.nn.Linear(3, 2).to(GPU), torch.ones(4, 3, device=GPU)
    averaged = comm.average_gradients(layer.parameters())
    averaged.zero_grad()
    averaged.require_sync()
    layer(x).sum().backward()
    averaged.synchronize()
    assert layer.weight.grad.tolist() == [[4.0] * 3] * 2
    comm.close()


@pytest.mark.parametrize('more', ['', '--checkpointing', '--bf16', '--model llama'])
def test_memory_of_a_step_is_announced_within_a_quarter(more):
    words = f'benchmarks/memory.py ppo --batch 32 --micro-batch-size 8 {more}'.split()
    result = subprocess.run(
        [sys.executable, *words], cwd=REPOSITORY, capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0, result.stderr
    expected, found, *_ = result.stdout.split()
    assert float(expected) == pytest.approx(float(found), rel=0.25)
