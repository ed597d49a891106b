"""Models and trainers built the way the recordings were made."""

import re

import numpy as np
import torch
from compare import array, assert_close, assert_norm_close, tokens
from golden_data import load_npz, require

from lm_human_preferences import lm_tasks, ppo
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.policy import Policy
from lm_human_preferences.ppo import Rollout
from lm_human_preferences.train_policy import HParams, PPOTrainer, learning_settings

PARAMETERS_ATOL = 5e-6


def hparams_of(cls, nested):
    hparams = cls()
    hparams.override_from_nested_dict(nested)
    return hparams


def trained_model(*parts):
    return TrainedModel(str(require(*parts)))


def policy_for(task, model=('train_model',), scope='policy', **settings):
    """The policy that `task` (TaskHParams) asks for, from a model directory of the set."""
    start = trained_model(*model)
    embed_queries = lm_tasks.query_formatter(task, start.encoding.get_encoder())
    usual = {'embed_queries': embed_queries, 'temperature': task.policy.temperature}
    return Policy(start, scope=scope, **{**usual, **settings})


def ppo_trainer(nested, comm):
    """Make a PPOTrainer of train_model/ on recorded hyperparameters, which samples nothing."""
    hparams = hparams_of(HParams, nested)
    return learner(policy_for(hparams.task), hparams, comm)


def learner(policy, hparams, comm, ref_policy=None):
    """Make a PPOTrainer that samples nothing; its reference is `policy` unless it is given."""
    return PPOTrainer(
        policy=policy,
        ref_policy=ref_policy or policy,
        query_sampler=None,
        score_fn=None,
        comm=comm,
        **learning_settings(hparams, policy.encoder, comm),
    )


def learner_with(policy, settings, comm=None, ref_policy=None):
    """Make a learner with settings {option: value}, which prints nothing."""
    hparams = HParams()
    hparams.override_from_dict({'run.log_interval': 10**9, **settings})
    return learner(policy, hparams, comm or Comm(), ref_policy)


def rollouts_of(folder, config, rank, size):
    """The recorded rollouts of configuration `config`, those rows that are this rank's."""
    name = 'rollouts_affix.npz' if 'affix' in config else 'rollouts.npz'
    tensors = {}
    for key, values in load_npz(folder, name).items():
        tensors[key] = tokens(values) if values.dtype.kind == 'i' else torch.from_numpy(values)
    return rollout_of(**tensors)[rank::size]


def rollout_of(**tensors):
    """A Rollout; what is not given and updates do not read is NaN."""
    nothing = torch.full_like(tensors['logprobs'], torch.nan)
    unused = dict(ref_logprobs=nothing, scores=nothing[:, 0], scored_responses=nothing)
    return Rollout(**{**unused, **tensors})


def assert_parameters(parameters, recorded, *, start=None, atol=PARAMETERS_ATOL, change_rtol=None):
    """Compare variables with recorded ones: absolutely, and their change since `start`."""
    assert recorded
    ours = {name: array(parameters[name]) for name in recorded}
    for name, values in recorded.items():
        assert_close(ours[name], values, rtol=0, atol=atol, name=name)
    if start is not None:
        changes = (
            np.concatenate([np.ravel(after[name] - start[name]) for name in recorded])
            for after in (ours, recorded)
        )
        assert_norm_close(*changes, rtol=change_rtol, name='change of all parameters')


def assert_checkpoint(ours, recorded, *, rtol=1e-4, parameters_atol=PARAMETERS_ATOL, without=()):
    """Compare two checkpoints, Adam's moments included, but for the variables `without`."""
    assert list(ours) == list(recorded)
    for name in recorded:
        if name in without:
            continue
        kind = re.search(r'/adam(_1)?$', name)
        atol = parameters_atol
        if kind:  # moments of a gradient that cancels are rounding errors of the others
            moments = [other for other in recorded if other.endswith(kind[0])]
            largest = max(np.abs(recorded[other]).max() for other in moments)
            atol = rtol * np.abs(recorded[name]).max() + 1e-6 * largest
        assert_close(ours[name], recorded[name], rtol=rtol, atol=atol, name=name)


def shapes_in(bundle):
    """Return {name: [shape, type]} of a checkpoint's variables, as recordings have it."""
    return {name: [list(bundle[name].shape), str(bundle[name].dtype)] for name in bundle}


def files_in(directory):
    paths = [path for path in directory.rglob('*') if path.is_file()]
    return {str(path.relative_to(directory)): path for path in paths}


def snapshot(variables):
    return {name: array(value).copy() for name, value in variables.items()}


def loss_of(trainer, minibatch):
    """(differentiable PPO loss of the policy as it is now, statistics), see ppo.loss."""
    outputs = trainer.policy.analyze_responses_op(minibatch.queries, minibatch.responses)
    return ppo.loss(minibatch, outputs, trainer.ppo)
