"""Less memory for the same gradients."""
import pytest
import torch

from golden_data import load_json
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.rewards import RewardModel
from lm_human_preferences.utils import comm as comms
from lm_human_preferences.utils import precision
from trainers import ppo_trainer, rollouts_of

CPU = torch.device('cpu')


@pytest.fixture(params=['fp32', 'bf16'])
def computed_in(request):
    precision.prepare(request.param, CPU)
    yield
    precision.prepare('fp32', CPU)
    torch.backends.mkldnn.matmul.fp32_precision = 'none'


def gradients_and_bytes(model, loss):
    """The gradients of `loss()`, and how much was kept for them."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor
    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        value = loss()
    value.backward()
    return [parameter.grad for parameter in model.parameters()], sum(kept.values())


def assert_checkpointing_only_saves_memory(model, loss):
    model.checkpointed = False
    plain, much = gradients_and_bytes(model, loss)
    model.checkpointed = True
    again, little = gradients_and_bytes(model, loss)
    assert all(map(torch.equal, plain, again)) and any(gradient.any() for gradient in plain)
    assert little < much / 2


def test_gradient_checkpointing_of_a_policy(computed_in):
    config = load_json('ppo', 'configs.json')['configs'][0]
    trainer, rollouts = ppo_trainer(config['hparams'], comms.SingleProcess()), rollouts_of('ppo', config['id'], 0, 1)
    assert_checkpointing_only_saves_memory(trainer.policy.model, lambda: trainer.loss(rollouts)[0])


def test_gradient_checkpointing_of_a_reward_model(computed_in):
    torch.manual_seed(0)
    reward_model = RewardModel(TrainedModel('test'))
    queries, responses = torch.randint(28, (8, 3)).clamp_(max=27), torch.randint(27, (8, 2, 2))
    queries[:, 0] = 5
    assert_checkpointing_only_saves_memory(
        reward_model.model, lambda: reward_model.get_rewards_op(queries, responses).square().sum())
