"""What a training consists of, and what it will take: networks, steps, memory and work.

Which networks learn and which stay frozen is declared here only. What the optimizer steps, what
checkpoints copy, what ranks broadcast and what the memory estimate counts is derived from it. A
network that learns from a loss of its own also needs an optimizer and a step of its own.
"""

import dataclasses
import os

from lm_human_preferences import label_types, rewards
from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.evaluation import measure
from lm_human_preferences.hparams import policy_options, reward_options
from lm_human_preferences.hparams.model_sizes import Sizes
from lm_human_preferences.hparams.online_options import ASKED_AT_ONCE
from lm_human_preferences.runs import run_files
from lm_human_preferences.training.memory import FLOAT, MemoryEstimate
from lm_human_preferences.training.networks import Networks
from lm_human_preferences.utils.core import ceil_div, exact_div

UNKNOWN_LABELS = 5000  # for the time left, where all labels of a file are trained on
REWARD_NETWORKS = Networks(learning=('reward_model',), frozen=('ref_policy',))


def policy_networks(hparams: policy_options.HParams) -> Networks:
    """The networks that train a policy."""
    members = range(hparams.rewards.members)
    reward_models = tuple(run_files.member_name('reward_model', member) for member in members)
    if hparams.rewards.online is not None:
        return Networks(learning=('policy',), frozen=('ref_policy',), retrained=reward_models)
    if not rewards.has_network(hparams):
        reward_models = ()
    return Networks(learning=('policy',), frozen=('ref_policy', *reward_models))


def reward_phases(members: int) -> list[str]:
    """The phases in which so many reward models are trained, as TimeLeft calls them."""
    return ['reward model', *(f'reward model {member + 1}' for member in range(1, members))]


def policy_saves(hparams: policy_options.HParams) -> int:
    """How many checkpoints the training of a policy writes."""
    return ceil_div(hparams.ppo.nupdates, hparams.run.save_interval)


def checkpoint_size(networks: Networks, sizes: Sizes) -> int:
    """Bytes that a checkpoint of a training takes, for networks of `sizes`."""
    moments = 2  # of Adam
    copies = len(networks.scopes) + moments * len(networks.learning)
    return copies * FLOAT * sizes.parameters() + checkpoints.SIZE_OF_OTHER_FILES


def check_disk_space(hparams: policy_options.HParams, sizes: Sizes) -> None:
    """UserError unless there is room for the policy's checkpoints, and for its new reward model."""
    directory = hparams.run.directory
    if directory is None:
        return
    planned = [
        checkpoints.Planned(
            os.path.join(directory, run_files.POLICY.unfinished),
            policy_saves(hparams),
            checkpoint_size(policy_networks(hparams), sizes),
        )
    ]
    if run_files.REWARD.command in hparams.writes():
        planned += [
            checkpoints.Planned(
                os.path.join(directory, run_files.REWARD.of_member(member).finished),
                1,
                checkpoint_size(REWARD_NETWORKS, sizes),
            )
            for member in range(hparams.rewards.members)
        ]
    checkpoints.check_disk_space(*planned)


def policy_memory(hparams: policy_options.HParams, sizes: Sizes, ranks: int) -> MemoryEstimate:
    """What takes memory in a PPO step of one of `ranks`, for networks of `sizes`."""
    task = hparams.task
    rows = exact_div(hparams.ppo.batch_size, ranks)
    tokens = task.query_length + task.response_length
    networks = policy_networks(hparams)
    sampled_rows = rows
    if hparams.rewards.online is not None:
        new_model = hparams.rewards.train_new_model
        assert new_model is not None
        # Rank 0 samples all responses of so many questions at a time.
        sampled_rows = max(rows, ASKED_AT_ONCE * _responses_of(new_model))
    return MemoryEstimate(
        sizes,
        networks=len(networks.scopes),
        learning=len(networks.learning),
        retrained=len(networks.retrained),
        rows=rows // hparams.ppo.nminibatches,
        tokens=tokens,
        predicted=task.response_length,
        sampled_rows=sampled_rows,
        sampled_tokens=tokens,
        micro_batch_size=hparams.ppo.micro_batch_size,
        option='--ppo.micro_batch_size',
        gradient_checkpointing=hparams.run.gradient_checkpointing,
        reduced=hparams.run.precision == 'bf16',
        batch_options=('--ppo.batch_size', '--ppo.batch_size'),
    )


def reward_memory(
    hparams: reward_options.HParams,
    sizes: Sizes,
    ranks: int,
) -> MemoryEstimate:
    """What takes memory in a step of reward training of one of `ranks`, for networks of `sizes`."""
    task = hparams.task
    return MemoryEstimate(
        sizes,
        networks=len(REWARD_NETWORKS.scopes),
        learning=len(REWARD_NETWORKS.learning),
        rows=exact_div(hparams.batch_size, ranks),
        tokens=task.query_length + _responses_of(hparams) * task.response_length,
        sampled_rows=exact_div(hparams.rollout_batch_size, ranks),
        sampled_tokens=task.query_length + task.response_length,
        micro_batch_size=hparams.micro_batch_size,
        option=hparams.option_name('micro_batch_size'),
        batch_options=(
            hparams.option_name('batch_size'),
            hparams.option_name('rollout_batch_size'),
        ),
        gradient_checkpointing=hparams.run.gradient_checkpointing,
        reduced=hparams.run.precision == 'bf16',
    )


def retraining_memory(hparams: policy_options.HParams, sizes: Sizes, ranks: int) -> MemoryEstimate:
    """What takes memory where one of `ranks` retrains a reward model while the policy waits.

    The policy keeps its gradients and moments meanwhile. Members of an ensemble learn one after
    another.
    """
    new_model = hparams.rewards.train_new_model
    assert new_model is not None
    networks = policy_networks(hparams)
    return dataclasses.replace(
        reward_memory(new_model, sizes, ranks),
        networks=len(networks.scopes),
        learning=len(networks.learning) + 1,
        retrained=len(networks.retrained) - 1,
        reduced=hparams.run.precision == 'bf16',
    )


def policy_plans(hparams: policy_options.HParams, sizes: Sizes, ranks: int) -> list[MemoryEstimate]:
    """What takes memory while a policy trains, on one of `ranks`, for networks of `sizes`: its own
    steps, and before them the trainings of a reward model from the labels that come in."""
    estimates = [policy_memory(hparams, sizes, ranks)]
    if hparams.rewards.online is not None:
        estimates.insert(0, retraining_memory(hparams, sizes, ranks))
    return estimates


def memory_plans(
    hparams: policy_options.HParams | reward_options.HParams, sizes: Sizes, ranks: int
) -> list[MemoryEstimate]:
    """What takes memory in each part of a command, on one of `ranks`, for networks of `sizes`: the
    training of the reward model, if there is one, and the policy's."""
    if isinstance(hparams, reward_options.HParams):
        return [reward_memory(hparams, sizes, ranks)]
    estimates = policy_plans(hparams, sizes, ranks)
    new_model = hparams.rewards.train_new_model
    if new_model is not None and hparams.rewards.online is None:
        estimates.insert(0, reward_memory(new_model, sizes, ranks))
    return estimates


def _responses_of(hparams: reward_options.HParams) -> int:
    """How many responses a label is about."""
    return len(label_types.get(hparams.labels.type).samples)


def work_left(hparams: policy_options.HParams, n_vocab: int) -> dict[str, float]:
    """How much each phase of the command computes: tokens that pass forward through a network.

    A backward pass counts as two. See TimeLeft.
    """
    task = hparams.task
    new_model = hparams.rewards.train_new_model
    tokens = task.query_length + task.response_length
    phases: dict[str, float] = {}
    if new_model is not None and hparams.rewards.online is None:
        row = task.query_length + _responses_of(new_model) * task.response_length
        labels = new_model.labels.num_train or UNKNOWN_LABELS
        work = 3 * row * new_model.epochs * labels
        phases |= dict.fromkeys(reward_phases(hparams.rewards.members), work)
    # Sampling, the reference and the reward; forward and backward in each epoch.
    passes = 2 + hparams.rewards.members + 3 * hparams.ppo.noptepochs
    phases['policy'] = passes * tokens * hparams.ppo.nupdates * hparams.ppo.batch_size
    if hparams.run.evaluate and hparams.run.save_dir:
        phases['evaluation'] = measure.tokens_to_compute(task, n_vocab)
    return phases
