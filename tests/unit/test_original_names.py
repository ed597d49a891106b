"""Names and habits of programs that were written for the original."""

import json
import re

import numpy as np
import pytest
import torch
from command_line import error_of, invoke, last_error_of, succeed
from events import events_of

from lm_human_preferences import label_types, lm_tasks, rewards
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
    reward_model = rewards.RewardModelTrainer(model)
    by_arrays = reward_model.get_rewards(queries, responses)
    by_tensors = reward_model.get_rewards(torch.from_numpy(queries).long(), drawn['responses'])
    assert torch.equal(by_arrays, by_tensors)


def test_parameters_of_a_policy():
    policy = Policy(lm_tasks.initial_model('test'))
    assert {id(each) for each in policy.get_params()} == {id(p) for p in policy.model.parameters()}


class Preferred(label_types.LabelType):
    """What the original asks of a label type, and no more."""

    name = 'preferred'

    def question_schemas(self, *, query_length, response_length):
        responses = {sample: core.Schema(torch.int64, (response_length,)) for sample in 'ab'}
        return dict(query=core.Schema(torch.int64, (query_length,)), **responses)

    def label_schemas(self):
        return dict(degree=core.Schema(torch.float32, ()))

    def target_scales(self, labels):
        return None

    def loss(self, reward_model, labels):
        a = reward_model(labels['query'], labels['a'])
        b = reward_model(labels['query'], labels['b'])
        error = torch.mean((a - b - labels['degree']) ** 2)
        return dict(loss=error, error=error)


def test_a_label_type_with_the_methods_of_the_original_learns(tmp_path, monkeypatch):
    monkeypatch.setattr(label_types, 'TYPES', dict(label_types.TYPES))
    label_types.register(Preferred)
    label = {'query': [1, 2, 3], 'a': [4] * 4, 'b': [5] * 4, 'degree': 1.5}
    path = tmp_path / 'labels.json'
    path.write_text(json.dumps([label] * 64))
    words = f'--labels.type preferred --labels.source {path} --save_dir {tmp_path} --mpi 1'
    command = f'train_reward test learned {words} --lr 0.01 --labels.num_train None --batch_size 8'
    succeed(command)
    events = events_of(tmp_path / 'learned/tb/reward_model')
    (_, loss), *_, (_, last) = events['train_reward/minibatch/loss']
    assert last < 0.9 * loss
    wrong = tmp_path / 'wrong.json'
    wrong.write_text(json.dumps([label | {'degree': [1.5]}] * 64))
    told = last_error_of(invoke(command.replace(str(path), str(wrong)) + ' --overwrite'))
    assert "label 0, field 'degree' must be a number, not [1.5]" in told
    told = error_of(invoke(f'ask test {tmp_path}/f --labels.type preferred'))
    assert told.startswith('--labels.type preferred can only learn from labels in files')


@pytest.mark.parametrize(
    'statement, advice',
    [
        ('from lm_human_preferences.utils import launch', 'in launch.py, list trials in policy_ex'),
        ('import lm_human_preferences.utils.gcs', 'call storage.cached_path(url), read_text(url)'),
        ('from lm_human_preferences.utils.core import minimize', 'use training.optimizer.Adam;'),
        ('core.mpi_session', 'PyTorch has no session: functions take tensors or arrays;'),
        ('from lm_human_preferences.language.datasets import Books', "call get_dataset('books')"),
    ],
)
def test_names_that_are_gone_say_what_to_write(statement, advice):
    with pytest.raises(ImportError, match=f'of the original: {re.escape(advice)}') as told:
        exec(statement, {'core': core})
    assert str(told.value).endswith('; see docs/from-the-original.md')


def test_other_names_are_missing_as_ever():
    assert not hasattr(core, 'nonsense')
    with pytest.raises(AttributeError, match=r"utils\.core' has no attribute 'nonsense'"):
        core.nonsense  # noqa: B018
