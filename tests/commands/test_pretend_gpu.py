"""Tests on a pretended GPU, which refuses what a real one would refuse."""

from types import SimpleNamespace

import numpy as np
import pretend_gpu
import pytest
import torch
from command_line import flat, invoke, succeed
from interrupted import STEP, assert_same, failing, result_anywhere

import launch
import sample
from lm_human_preferences.commands import doctor
from lm_human_preferences.distributed import torch_comm
from lm_human_preferences.evaluation import evaluate, measure
from lm_human_preferences.language import encodings, model
from lm_human_preferences.language.adapters import layers
from lm_human_preferences.language.networks import reviews_model
from lm_human_preferences.machine import hardware
from lm_human_preferences.reward_sources import loading
from lm_human_preferences.synthetic import known_reward


@pytest.fixture
def gpu():
    with pretend_gpu.pretended() as found:
        yield found


def test_ranks_meet_in_host_memory(gpu):
    """torch.distributed takes tensors in host memory alone; here rank 0 has sevens."""
    comm = object.__new__(torch_comm.TorchComm)

    def broadcast(tensor, src):
        assert not tensor.is_cuda
        tensor.view(torch.float32).fill_(7)

    comm.dist = SimpleNamespace(broadcast=broadcast)
    layer = torch.nn.Linear(3, 2).to('cuda')
    comm.broadcast_(list(layer.parameters()))
    assert layer.bias.is_cuda and layer.bias.tolist() == [7, 7]


def test_what_is_said_of_it(gpu, monkeypatch, capsys):
    assert doctor._devices() == '1 GPU(s): NVIDIA Pretence, 40 GiB free'
    gpu.cached = pretend_gpu.MEMORY
    assert hardware.free_bytes(ranks=2) == pretend_gpu.MEMORY


def test_a_base_model_that_is_missing_changes_no_run(gpu, monkeypatch):
    """It is trained on the CPU, after the run was seeded."""
    monkeypatch.setattr(reviews_model, 'N_REVIEWS', 64)
    torch.manual_seed(5)
    before = torch.cuda.get_rng_state(), torch.get_rng_state()
    reviews_model.train(model.HParams(**reviews_model.SIZES), steps=1)
    assert all(map(torch.equal, before, (torch.cuda.get_rng_state(), torch.get_rng_state())))


def test_the_known_reward_judges_alike(gpu, monkeypatch):
    padding = encodings.Reviews.get_encoder().padding_token
    weights = torch.rand(3, padding + 1, padding + 1, dtype=torch.float64)
    monkeypatch.setattr(known_reward, '_weights', lambda: weights)
    tokens = torch.randint(padding + 1, (16, 8))
    queries, responses = tokens[:, :5], tokens[:, 5:]
    expected = known_reward.KnownReward(encodings.Reviews, 'cpu').score(queries, responses)
    reward = loading.load_reward_model('mock', encodings.Reviews)
    assert reward.weights.is_cuda
    for place in ('cpu', 'cuda'):
        scores = reward.score(queries.to(place), responses.to(place))
        assert scores.is_cuda and torch.equal(scores.cpu(), expected)


LABELS = '--labels.num_train 64 --normalize_samples 32'
POLICY = 'train_policy test run --ppo.batch_size 16 --ppo.total_episodes 32'
TEST = f'{POLICY} --rewards.train_new_model off --rewards.trained_model test'
GOING_ON = f'{TEST} --ppo.noptepochs 1 --run.save_interval 1'
RUNS = {
    'tf32': (
        f'{POLICY} {LABELS.replace("--", "--rewards.train_new_model.")} --ppo.noptepochs 1'
        ' --ppo.micro_batch_size 4 --run.gradient_checkpointing true --run.precision tf32'
        ' --ppo.whiten_rewards true --task.truncate_token 3 --task.query_prefix a'
        ' --task.query_length 2'
    ),
    'bf16': (
        f'train_reward test run {LABELS} --run.precision bf16 --micro_batch_size 16'
        ' --run.gradient_checkpointing true'
    ),
}


def ran(words, directory, cli=launch.cli):
    return succeed(f'{words} --save_dir {directory} --mpi 1', cli).stdout


@pytest.mark.parametrize('name', RUNS)
def test_the_same_as_on_the_cpu(tmp_path, name):
    """Up to rounding, relative to the norm of an array; in bf16, in the first step alone."""
    words = f'{RUNS[name]} --run.save_interval 1'
    ran(words.replace('tf32', 'fp32'), tmp_path / 'cpu')
    with pretend_gpu.pretended(shared=True):
        ran(words, tmp_path / 'gpu')
        assert torch.backends.cuda.matmul.allow_tf32
    steps, rtol = (1, 0.05) if name == 'bf16' else (None, 1e-3)
    ours, reference = (result_anywhere(tmp_path / place) for place in ('gpu', 'cpu'))
    assert ours.keys() == reference.keys()
    for what, expected in reference.items():
        if what[1] == 'state' or not isinstance(what, tuple):
            continue  # files, and the generators'
        is_weights = isinstance(expected, bytes)
        a, b = (
            np.frombuffer(value, np.float32) if is_weights else np.array(value)[:steps]
            for value in (ours[what], expected)
        )
        if not is_weights or steps is None:
            assert np.linalg.norm(a - b) <= rtol * (np.linalg.norm(b) + 0.1), what


def test_going_on(tmp_path):
    directory = tmp_path / 'cut'
    with pretend_gpu.pretended(), failing(STEP, 2, KeyboardInterrupt):
        assert invoke(f'{GOING_ON} --save_dir {directory} --mpi 1').exit_code == 130
    with pretend_gpu.pretended():
        torch.rand(1, device='cuda')
        result = invoke(f'resume {directory}/run')
    assert result.exit_code == 0, result.output
    assert 'Going on from' in result.stdout and 'note:' not in result.stdout
    with pretend_gpu.pretended():
        ran(GOING_ON, tmp_path / 'whole')
    assert_same(result_anywhere(directory), result_anywhere(tmp_path / 'whole'))


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp('trained')
    ran(f'{TEST} --task.response_length 2', directory)
    return directory / 'run'


@pytest.mark.parametrize('options', ['', '--precision bf16 --savescope ref_policy'])
def test_samples(trained, options, monkeypatch):
    reduced, reduce = [], layers.reduce
    monkeypatch.setattr(layers, 'reduce', lambda each: (reduced.append(each), reduce(each)))
    words = f'sample --nsamples 3 --batch_size 2 --seed 3 {options}'
    reference = ran(words, trained, sample.cli)
    assert len(reduced) == ('bf16' in options)
    with pretend_gpu.pretended(shared=True):
        assert ran(words, trained, sample.cli) == reference
    with pretend_gpu.pretended():
        assert ran(words, trained, sample.cli) != reference


@pytest.mark.parametrize('most', [measure.MOST_RESPONSES, 1])
def test_evaluation(trained, tmp_path, monkeypatch, most):
    monkeypatch.setattr(measure, 'MOST_RESPONSES', most)
    settings = dict(queries=1, samples=64, batch_size=16)  # a share of one query is not told
    reference = evaluate.evaluate(str(trained), output_dir=str(tmp_path), **settings)
    with pretend_gpu.pretended(shared=True):
        ours = evaluate.evaluate(str(trained), output_dir=str(tmp_path), **settings)
    assert ours['exact'] == (most > 1)
    points, expected = (
        flat(results['rewards']['reward model']['policy']) for results in (ours, reference)
    )
    unknown = {name for name, value in expected.items() if value is None}
    assert {name for name, value in points.items() if value is None} == unknown
    for name in points.keys() - unknown:
        assert points[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-4), name
