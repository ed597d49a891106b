"""Reward models with random weights, saved as train_reward saves them."""

import torch

from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.language.networks.network import HEADS
from lm_human_preferences.language.trained_models import TrainedModel

GAIN, BIAS, HEAD_BIAS = -1.7, 3.0, 0.5  # none of which would go unnoticed


def save_reward_model(directory, model='test', seed=0):
    """The language model `model` with a head, in `directory`; returns the TrainedModel of it."""
    trained = TrainedModel(str(model))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = trained.build(scope='reward_model', scalar_heads=['reward'])
        own = dict(network.named_parameters())
        with torch.no_grad():
            own[f'{HEADS}reward.w'].normal_()
            own[f'{HEADS}reward.b'].fill_(HEAD_BIAS)
    directory.mkdir(parents=True, exist_ok=True)
    trained.write_files(str(directory))
    tensors = {f'reward_model/{name}': value for name, value in own.items()}
    tensors['reward_model/reward_gain'] = torch.tensor(GAIN)
    tensors['reward_model/reward_bias'] = torch.tensor(BIAS)
    variables = network.variable_names.variables(tensors)
    checkpoints.save(str(directory / 'checkpoints'), 'model.ckpt', variables)
    return TrainedModel(str(directory))
