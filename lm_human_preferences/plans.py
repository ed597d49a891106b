"""Plans of trainings: memory, work, and the networks that learn, declared here only."""

import dataclasses
import os

from lm_human_preferences import label_types
from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.evaluation import measure
from lm_human_preferences.hparams import policy_options, reward_options
from lm_human_preferences.hparams.model_sizes import Sizes
from lm_human_preferences.hparams.online_options import ASKED_AT_ONCE
from lm_human_preferences.policy import responses_in_a_row
from lm_human_preferences.reward_sources import source_of
from lm_human_preferences.runs import run_files
from lm_human_preferences.training.memory import FLOAT, MemoryEstimate, of_sampling
from lm_human_preferences.training.networks import REWARD_NETWORKS, Networks
from lm_human_preferences.utils.core import ceil_div, exact_div

UNKNOWN_LABELS = 5000  # for the time left, where all labels of a file are trained on


def policy_networks(hparams: policy_options.HParams) -> Networks:
    """Return the networks that train a policy."""
    return source_of(hparams).networks


def reward_phases(members: int) -> list[str]:
    """Return the phases, as TimeLeft calls them, of training `members` reward models."""
    return ['reward model', *(f'reward model {member + 1}' for member in range(1, members))]


def policy_saves(hparams: policy_options.HParams) -> int:
    """Return the number of checkpoints that the training of a policy writes."""
    return ceil_div(hparams.ppo.nupdates, hparams.run.save_interval)


def checkpoint_size(networks: Networks, sizes: Sizes) -> int:
    """Bytes that a checkpoint of a training takes, for networks of `sizes`."""
    moments = 2  # of Adam
    copies = len(networks.scopes) + moments * len(networks.learning)
    return copies * FLOAT * sizes.own_parameters() + checkpoints.SIZE_OF_OTHER_FILES


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
    training = hparams.reward_training
    if training is not None and training.features != reward_options.FROZEN:
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
    """Estimate the memory of a PPO step on one of `ranks`, for networks of `sizes`."""
    task = hparams.task
    rows = exact_div(hparams.ppo.batch_size, ranks)
    tokens = task.query_length + task.response_length
    networks = policy_networks(hparams)
    sampled_rows = rows
    if hparams.rewards.online is not None:
        new_model = hparams.new_reward_model
        assert new_model is not None
        # Rank 0 samples all responses of this many questions at a time.
        sampled_rows = max(rows, ASKED_AT_ONCE * _responses_of(new_model))
    return MemoryEstimate(
        sizes,
        networks=len(networks.scopes),
        learning=len(networks.learning),
        retrained=len(networks.retrained),
        rows=rows // hparams.ppo.nminibatches,
        tokens=tokens,
        predicted=task.response_length,
        together=responses_in_a_row(hparams.ppo.samples_per_query),
        sampled_rows=sampled_rows,
        sampled_tokens=tokens,
        micro_batch_size=hparams.ppo.micro_batch_size,
        option='--ppo.micro_batch_size',
        gradient_checkpointing=hparams.run.gradient_checkpointing,
        reduced=hparams.run.precision == 'bf16',
        batch_options=('--ppo.batch_size', '--ppo.batch_size'),
        snapshot=_snapshot(hparams),
    )


def _snapshot(hparams: policy_options.HParams) -> int:
    """Return the number of network-sized tensors copied for checkpoints before the last."""
    if hparams.run.save_dir is None or policy_saves(hparams) == 1:
        return 0
    networks = policy_networks(hparams)
    return 3 * len(networks.learning) + len(networks.retrained)


def reward_memory(hparams: reward_options.HParams, sizes: Sizes, ranks: int) -> MemoryEstimate:
    """Estimate the memory of a step of reward training on one of `ranks`."""
    if hparams.features == reward_options.FROZEN:
        rows, precision = exact_div(hparams.rollout_batch_size, ranks), hparams.run.precision
        task = hparams.task
        return of_sampling(sizes, task, rows, networks=1, sampling=1, precision=precision)
    labels = hparams.labels.num_train or UNKNOWN_LABELS
    steps = hparams.epochs * ceil_div(labels, hparams.batch_size)
    is_saved = hparams.run.save_dir is not None and steps > hparams.run.save_interval
    step = _reward_step(hparams, sizes, ranks)
    copies = 3 + (hparams.keep == reward_options.BEST)
    return dataclasses.replace(step, snapshot=copies if is_saved else 0)


def _reward_step(hparams: reward_options.HParams, sizes: Sizes, ranks: int) -> MemoryEstimate:
    """Estimate the same without checkpoints."""
    task = hparams.task
    return MemoryEstimate(
        sizes,
        networks=len(REWARD_NETWORKS.scopes) + (hparams.keep == reward_options.BEST),
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
    """Estimate the memory of retraining a reward model while the policy waits."""
    new_model = hparams.new_reward_model
    assert new_model is not None
    networks = policy_networks(hparams)
    return dataclasses.replace(
        _reward_step(new_model, sizes, ranks),
        networks=len(networks.scopes),
        learning=len(networks.learning) + 1,  # the policy keeps its moments
        retrained=len(networks.retrained) - 1,
        snapshot=_snapshot(hparams),
        reduced=hparams.run.precision == 'bf16',
    )


def policy_plans(hparams: policy_options.HParams, sizes: Sizes, ranks: int) -> list[MemoryEstimate]:
    """Estimate the memory of a policy's steps, and before them of retraining its reward model."""
    estimates = [policy_memory(hparams, sizes, ranks)]
    if hparams.rewards.online is not None:
        estimates.insert(0, retraining_memory(hparams, sizes, ranks))
    return estimates


def memory_plans(
    hparams: policy_options.HParams | reward_options.HParams, sizes: Sizes, ranks: int
) -> list[MemoryEstimate]:
    """Estimate the memory of each part of a command, on one of `ranks`."""
    estimates = []
    if hparams.reward_training is not None:
        estimates.append(reward_memory(hparams.reward_training, sizes, ranks))
    if hparams.policy is not None:
        estimates += policy_plans(hparams.policy, sizes, ranks)
    return estimates


def _responses_of(hparams: reward_options.HParams) -> int:
    """Return the number of responses of a label."""
    return len(label_types.get(hparams.labels.type).samples)


def work_left(hparams: policy_options.HParams, n_vocab: int) -> dict[str, float]:
    """Return the work of each phase: tokens passed forward, a backward pass counting as two."""
    task = hparams.task
    # A backward pass without gradients of the base's weights counts as one.
    passes_of_training = 3 if task.policy.lora is None else 2
    tokens = task.query_length + task.response_length
    phases: dict[str, float] = {}
    training = hparams.reward_training
    if training is not None:
        row = task.query_length + _responses_of(training) * task.response_length
        labels = training.labels.num_train or UNKNOWN_LABELS
        work = passes_of_training * row * training.epochs * labels
        if training.features == reward_options.FROZEN:
            work = row * labels + tokens * training.normalize_samples
        phases |= dict.fromkeys(reward_phases(hparams.rewards.members), work)
    # Sampling, the reference and the reward; forward and backward in each epoch.
    passes = 2 + hparams.rewards.members + passes_of_training * hparams.ppo.noptepochs
    phases['policy'] = passes * tokens * hparams.ppo.nupdates * hparams.ppo.batch_size
    if hparams.run.evaluate and hparams.run.save_dir:
        phases['evaluation'] = measure.tokens_to_compute(task, n_vocab)
    return phases
