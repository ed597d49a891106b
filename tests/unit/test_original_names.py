"""Names and habits of programs that were written for the original."""

import numpy as np
import torch

from lm_human_preferences import lm_tasks, rewards
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.policy import Policy
from lm_human_preferences.utils import core


def test_policy_and_reward_model_take_arrays():
    """The original's were int32, as it fed them to a graph."""
    policy, model = Policy(lm_tasks.initial_model('test')), TrainedModel('test')
    queries = np.array([[1, 2], [3, 4]], np.int32)
    core.set_mpi_seed(1)
    drawn = policy.respond(queries, length=3)
    core.set_mpi_seed(1)
    again = policy.respond(torch.from_numpy(queries).long(), length=3)
    assert torch.equal(drawn['responses'], again['responses'])
    responses = drawn['responses'].numpy().astype(np.int32)
    analyzed = policy.analyze_responses(queries, responses)
    torch.testing.assert_close(analyzed['logprobs'], drawn['logprobs'])
    reward_model = rewards.RewardModel(model)
    by_arrays = reward_model.get_rewards(queries, responses)
    by_tensors = reward_model.get_rewards(torch.from_numpy(queries).long(), drawn['responses'])
    assert torch.equal(by_arrays, by_tensors)


def test_parameters_of_a_policy():
    policy = Policy(lm_tasks.initial_model('test'))
    assert {id(each) for each in policy.get_params()} == {id(p) for p in policy.model.parameters()}
