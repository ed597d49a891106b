"""Training of a policy by PPO (the original's train_policy.py; paper, section 2.2)."""

from collections.abc import Mapping
from typing import Any

from lm_human_preferences import (
    lm_tasks,
    plans,
    rewards,
    session,
    storage,
    tracked_samples,
    train_reward,
)
from lm_human_preferences.checkpointing.checkpointer import Checkpointer
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import UserError
from lm_human_preferences.evaluation import evaluate
from lm_human_preferences.hparams.algorithm_options import AdaptiveKLParams as AdaptiveKLParams
from lm_human_preferences.hparams.algorithm_options import PpoHParams as PpoHParams
from lm_human_preferences.hparams.policy_options import HParams
from lm_human_preferences.hparams.policy_options import RewardHParams as RewardHParams
from lm_human_preferences.language import tokenisers
from lm_human_preferences.language.adapters import shared
from lm_human_preferences.language.encodings import Encoder
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.online import collection
from lm_human_preferences.policy import Policy
from lm_human_preferences.reward_sources import RewardSource, source_of
from lm_human_preferences.rewards import make_score_fn
from lm_human_preferences.runs import curves, run_dir, run_files, run_settings
from lm_human_preferences.trainers import health
from lm_human_preferences.trainers.hooks import policy_hooks
from lm_human_preferences.trainers.policy_trainer import STATE, PPOTrainer, Responses, counted
from lm_human_preferences.training import console, memory
from lm_human_preferences.training.kl_control import AdaptiveKLController as AdaptiveKLController
from lm_human_preferences.training.kl_control import FixedKLController as FixedKLController
from lm_human_preferences.training.kl_control import make_kl_controller
from lm_human_preferences.training.loop import training_loop
from lm_human_preferences.training.time_left import TimeLeft
from lm_human_preferences.utils.core import ceil_div, exact_div
from lm_human_preferences.utils.logging import Logger, announce


def build_trainer(
    hparams: HParams,
    initial_model: TrainedModel,
    comm: Comm,
    source: RewardSource,
) -> PPOTrainer:
    """Return the trainer of a policy that starts as `initial_model`, the same on all ranks."""
    encoding = initial_model.encoding
    encoder = encoding.get_encoder()
    settings = lm_tasks.policy_settings(hparams.task, encoder)
    ref_policy = Policy(initial_model, scope='ref_policy', **settings)
    graphs = hparams.run.graphs
    policy = Policy(initial_model, scope='policy', graphs=graphs, **settings)
    policy.model.gradient_checkpointing = hparams.run.gradient_checkpointing
    reward_model = source.for_training(initial_model, comm, ref_policy)
    query_sampler = lm_tasks.make_query_sampler(
        hparams=hparams.task,
        encoder=encoder,
        comm=comm,
        labels=source.label_source(),
        batch_size=exact_div(hparams.ppo.batch_size, comm.size * hparams.ppo.samples_per_query),
    )
    trainer = PPOTrainer(
        policy=policy,
        ref_policy=ref_policy,
        query_sampler=query_sampler,
        score_fn=make_score_fn(hparams.task, reward_model),
        roles=source.networks,
        reward_networks=rewards.networks_of(reward_model),
        reward_blocks=rewards.blocks_of(reward_model),
        comm=comm,
        **learning_settings(hparams, encoder, comm),
    )
    trainer.roles.broadcast(trainer.networks, comm)
    return trainer


def learning_settings(hparams: HParams, encoder: Encoder, comm: Comm) -> dict[str, Any]:
    """Return the arguments of a PPOTrainer that say how it learns, and from which responses."""
    task, run = hparams.task, hparams.run
    responses = Responses(
        task.response_length,
        has_end=lm_tasks.filter_fn_from_hparams(task, encoder, anywhere=True),
        is_valid=lm_tasks.filter_fn_from_hparams(task, encoder),
        are_logged=task.stops or bool(task.truncate_text),
    )
    return dict(
        responses=responses,
        ppo=hparams.ppo,
        kl_ctl=make_kl_controller(hparams.rewards.kl_coef, hparams.rewards.adaptive_kl),
        relative_kl_coef=hparams.rewards.relative_kl_coef,
        logger=Logger(run.directory, 'ppo', log_interval=run.log_interval, comm=comm),
    )


def train(hparams: HParams, comm: Comm | None = None, experiment: str | None = None) -> None:
    """Train a policy in SAVE_DIR/policy: `./launch.py train_policy`. experiment: for the record."""
    comm = session.connect(hparams, comm)
    with run_dir.lock_run_dir(hparams, comm), memory.explain_oom('--ppo.micro_batch_size'):
        has_trained = _train_unless_finished(hparams, comm, experiment)
        if comm.rank != 0:
            return
        try:
            if hparams.run.evaluate:
                evaluate.after_training(hparams, has_trained=has_trained)
        finally:  # the policy is saved even if its evaluation cannot be written
            console.announce_policy(hparams)


def _train_unless_finished(hparams: HParams, comm: Comm, experiment: str | None) -> bool:
    """Train the rest of this run; return False if it was finished before."""
    directory = hparams.run.directory
    with Checkpointer(
        directory and storage.join(directory, run_files.POLICY.unfinished),
        comm,
        resume=hparams.run.resume,
        schema=STATE,
        frozen_scopes=plans.policy_networks(hparams).frozen,
        stop_timeout=hparams.run.stop_timeout,
        complete=lambda state: _counted(state, run_settings.as_recorded(hparams)),
    ) as checkpointer:
        state = checkpointer.state.get('trainer')
        if state is None and comm.rank == 0:
            _tell_lost_steps(hparams)
        if state is None or hparams.ppo.steps_after(state['done'][0]):
            _train_both(hparams, checkpointer, comm, experiment)
            return True
        checkpointer.make_latest()
    if comm.rank == 0:
        done, episodes = state['step'], state['done'][0]
        steps = ceil_div(done * hparams.ppo.total_episodes, episodes)  # of their mean size
        wanted = f'{steps} steps.' if done == steps else f'the {steps} that are asked for.'
        more = 'of' if done == steps else 'steps, more than'
        announce(f'The policy in {hparams.run.save_dir} is finished: {done} {more} {wanted}')
    return False


def _counted(state: Mapping[str, Any], recorded: HParams) -> dict[str, Any]:
    return counted(
        state,
        batch_size=recorded.ppo.batch_size,
        response_length=recorded.task.response_length,
        relative_kl_coef=recorded.rewards.relative_kl_coef,
    )


def _tell_lost_steps(hparams: HParams) -> None:
    """Warn of steps that are logged, and not saved; UserError where they had been saved."""
    run = hparams.run
    if not run.resume or run.directory is None:
        return
    log = curves.read(run.directory, run_files.POLICY.events)
    steps = round(log.curves['elapsed/updates'].last) if 'elapsed/updates' in log.curves else 0
    lost = f'no checkpoint of the policy in {run.save_dir} is left, of {steps} steps in its log'
    # The first was complete before the second was begun, and that before the next step.
    if steps > 2 * run_settings.as_recorded(hparams).run.save_interval:
        raise UserError(f'{lost}: restore them, or begin again with --overwrite')
    if steps:
        announce(f'WARNING: {lost}: it begins with the first step again')


def _train_both(
    hparams: HParams, checkpointer: Checkpointer, comm: Comm, experiment: str | None
) -> None:
    """Train the reward model, if a new one is asked for, and the policy."""
    session.pin(hparams, comm)
    session.show_precision_notes(hparams, comm)
    # Check the policy's needs, too, before hours go into its reward model.
    sizes = session.check(hparams, comm, plans.policy_plans)
    if comm.rank == 0:
        plans.check_disk_space(hparams, sizes)
        console.show_start('train_policy', hparams, comm)
        session.show_queries(hparams)
    clock = TimeLeft(plans.work_left(hparams, sizes.n_vocab))
    with shared.read_once(), session.saved_or_scratch(hparams.run.save_dir, comm) as directory:
        if hparams.reward_training is not None:
            hparams = train_reward.train_for_policy(hparams, directory, comm, clock, experiment)
        trainer = start(hparams, checkpointer, comm, experiment)
    take_steps(trainer, hparams, checkpointer, clock)


def start(
    hparams: HParams, checkpointer: Checkpointer, comm: Comm, experiment: str | None = None
) -> PPOTrainer:
    """Return the trainer of a run before its next step; see session.start."""
    console.dump(hparams)
    source = source_of(hparams).pinned(hparams.run, comm)
    settings = run_settings.records(
        hparams, experiment=experiment, ranks=comm.size, commands=[run_files.POLICY.command]
    )
    return session.start(
        lambda initial_model: build_trainer(hparams, initial_model, comm, source),
        hparams,
        checkpointer,
        comm,
        records={**source.records(), **settings},
        command=hparams.command,
        network=run_files.POLICY.network,
        saves=lambda _: plans.policy_saves(hparams),
    )


def take_steps(
    trainer: PPOTrainer, hparams: HParams, checkpointer: Checkpointer, clock: TimeLeft
) -> None:
    """Take the remaining steps. clock: of the whole command, with a phase 'policy'."""
    reader = tokenisers.reader(trainer.policy.encoder, hparams.task.chat)
    limits = health.policy_limits(hparams.task, hparams.rewards.adaptive_kl)
    has_spread = hparams.rewards.members > 1 or bool(trainer.reward_blocks)
    hooks = [
        *collection.hooks(trainer, hparams, checkpointer, clock),
        *tracked_samples.hooks(trainer, hparams, checkpointer.seed, reader),
        *policy_hooks(trainer, checkpointer, clock, reader, hparams.run, limits, has_spread),
    ]
    training_loop(trainer, hooks)
