"""Training of a policy by PPO (the original's train_policy.py; paper, section 2.2)."""

import dataclasses
import os
from typing import Any

from lm_human_preferences import lm_tasks, rewards
from lm_human_preferences.checkpointing.checkpointer import Checkpointer
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.policy_options import AdaptiveKLParams as AdaptiveKLParams
from lm_human_preferences.hparams.policy_options import HParams
from lm_human_preferences.hparams.policy_options import PpoHParams as PpoHParams
from lm_human_preferences.hparams.policy_options import RewardHParams as RewardHParams
from lm_human_preferences.language.encodings import Encoder
from lm_human_preferences.language.texts import tokenisers
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.plan.phases import Plan, TrainPolicy
from lm_human_preferences.policy import Policy
from lm_human_preferences.rewards import make_score_fn
from lm_human_preferences.runs import curves, run_files, run_settings
from lm_human_preferences.trainers.additions import console, session, tracked_samples
from lm_human_preferences.trainers.policy_trainer import (
    AdaptiveKLController as AdaptiveKLController,
)
from lm_human_preferences.trainers.policy_trainer import FixedKLController as FixedKLController
from lm_human_preferences.trainers.policy_trainer import PPOTrainer, Responses, make_kl_controller
from lm_human_preferences.training.loop import (
    KL,
    KL_COEF,
    Checkpoints,
    HealthMonitor,
    Hook,
    Progress,
    training_loop,
)
from lm_human_preferences.utils.core import exact_div
from lm_human_preferences.utils.logging import Logger, announce

KL_TARGETS = 10  # an alarm is raised if the KL divergence exceeds this multiple of its target
KL_PER_TOKEN = 2  # without a KL target, an alarm is raised above this KL in nats per response token
FINITE = ('ppo/loss/total', KL, 'objective/score')


def build_trainer(phase: TrainPolicy, initial_model: TrainedModel, comm: Comm) -> PPOTrainer:
    """Return the trainer of a policy that starts as `initial_model`. All ranks start equal."""
    settings, source = phase.settings, phase.source
    encoder = initial_model.encoding.get_encoder()
    policy_settings = lm_tasks.policy_settings(settings.task, encoder)
    ref_policy = Policy(initial_model, scope='ref_policy', **policy_settings)
    policy = Policy(initial_model, scope='policy', **policy_settings)
    policy.model.gradient_checkpointing = settings.run.gradient_checkpointing
    reward_model = source.for_training(comm, ref_policy)
    query_sampler = lm_tasks.make_query_sampler(
        hparams=settings.task,
        encoder=encoder,
        comm=comm,
        labels=source.label_source(),
        batch_size=exact_div(settings.ppo.batch_size, comm.size * settings.ppo.samples_per_query),
    )
    trainer = PPOTrainer(
        policy=policy,
        ref_policy=ref_policy,
        query_sampler=query_sampler,
        score_fn=make_score_fn(settings.task, reward_model),
        roles=source.networks,
        reward_networks=rewards.networks_of(reward_model),
        reward_blocks=reward_model.blocks if isinstance(reward_model, rewards.HasStats) else (),
        comm=comm,
        **learning_settings(settings, encoder, comm),
    )
    trainer.roles.broadcast(trainer.networks, comm)
    return trainer


def learning_settings(settings: HParams, encoder: Encoder, comm: Comm) -> dict[str, Any]:
    """Return the arguments of PPOTrainer that follow from the settings alone: {name: value}."""
    task, run = settings.task, settings.run
    responses = Responses(
        task.response_length,
        has_end=lm_tasks.filter_fn_from_hparams(task, encoder, anywhere=True),
        is_valid=lm_tasks.filter_fn_from_hparams(task, encoder),
        are_logged=task.stops or bool(task.truncate_text),
    )
    return dict(
        responses=responses,
        ppo=settings.ppo,
        kl_ctl=make_kl_controller(settings.rewards.kl_coef, settings.rewards.adaptive_kl),
        relative_kl_coef=settings.rewards.relative_kl_coef,
        logger=Logger(run.directory, 'ppo', log_interval=run.log_interval, comm=comm),
    )


def train(hparams: HParams, comm: Comm | None = None, experiment: str | None = None) -> None:
    """Train a policy in SAVE_DIR/policy (`./launch.py train_policy`). experiment: name or None."""
    with session.opened(hparams, comm, experiment) as run:
        comm = run.comm
        with run.checkpointer(run_files.POLICY, hparams.run.keep_checkpoints) as checkpointer:
            has_steps = _has_steps(hparams, checkpointer, comm)
            if has_steps:
                # Settings do not change from here on.
                plan = run.plan()
                assert plan.policy is not None
                # Check the whole plan now, before a reward model trains for hours.
                run.check_start(plan)
                if plan.rewards:
                    _train_rewards(run, plan)
                console.dump(hparams)
                phase = dataclasses.replace(plan.policy, source=plan.policy.source.pinned(comm))
                # Build the networks and the optimizer.
                initial_model = run.prepare(phase, checkpointer)
                trainer = build_trainer(phase, initial_model, comm)
                run.restore(trainer, phase, initial_model, checkpointer)
                training_loop(trainer, hooks(trainer, phase, checkpointer))
        comm.on_rank_0(lambda: _evaluate(hparams, has_trained=has_steps))


def _has_steps(hparams: HParams, checkpointer: Checkpointer, comm: Comm) -> bool:
    """Return whether steps are left; if not, say so, and list the resumed checkpoint as latest."""
    done = checkpointer.steps_done
    if checkpointer.prefix is None and comm.rank == 0:
        _warn_of_lost_steps(hparams)
    if done < hparams.ppo.nupdates:
        return True
    checkpointer.make_latest()
    if comm.rank == 0:
        announce(f'The policy in {hparams.run.save_dir} is finished, at step {done}')
    return False


def _evaluate(hparams: HParams, *, has_trained: bool) -> None:
    """Evaluate the policy if requested and not done yet; print commands for the next steps."""
    run = hparams.run
    try:
        is_evaluated = os.path.exists(os.path.join(str(run.directory), run_files.RESULTS))
        if run.is_evaluated and (has_trained or not is_evaluated):
            from lm_human_preferences.evaluation import evaluate  # imported only if needed

            rewards = {'function': hparams.rewards.function}
            evaluate.evaluate(str(run.save_dir), directory=run.directory, rewards=rewards)
    finally:  # the policy is saved even if its evaluation cannot be written
        console.announce_policy(hparams)


def _warn_of_lost_steps(hparams: HParams) -> None:
    """Warn of logged steps without a checkpoint; UserError if checkpoints must have been lost."""
    run = hparams.run
    if not run.resume or run.directory is None:
        return
    log = curves.read(run.directory, run_files.POLICY.events)
    steps = round(max(log.curves.get('elapsed/updates', {0: 0}).values()))
    lost = f'{run.save_dir} logged {steps} steps of the policy but has no checkpoints'
    # After 2 * save_interval steps, the second checkpoint has begun, so the first is complete.
    if steps > 2 * run_settings.as_recorded(hparams).run.save_interval:
        raise UserError(f'{lost}: restore them, or begin again with --overwrite')
    if steps:
        announce(f'WARNING: {lost}: it begins with the first step again')


def _train_rewards(run: session.Run, plan: Plan) -> None:
    """Train the unfinished reward models of a policy's run."""
    from lm_human_preferences import train_reward

    console.dump(plan.rewards[0].settings)
    left = train_reward.unfinished(plan, run.comm)
    if left:
        train_reward.train_models(run, left)
    run.comm.barrier()


def hooks(trainer: PPOTrainer, phase: TrainPolicy, checkpointer: Checkpointer) -> list[Hook]:
    """Return the hooks of a policy's training; packages that few runs need are imported here."""
    run, batch_size = phase.run, trainer.ppo.batch_size
    reader = tokenisers.for_people(trainer.policy.encoder, phase.settings.task.chat)
    found: list[Hook] = []
    if phase.retraining is not None:
        from lm_human_preferences.online.collection import Collection

        found.append(Collection(trainer, phase, checkpointer))
    if run.sample_queries and run.directory is not None and trainer.comm.rank == 0:
        found.append(tracked_samples.TrackedSamples(trainer, phase, checkpointer.seed, reader))
    columns = {'score': ('objective/score', '.2f')}
    if trainer.reward_blocks:  # the reward is a head on hidden states
        columns['spread'] = 'objective/score_std', '.2f'
    columns |= {'KL': (KL, 'z.2f'), 'KL coef': (KL_COEF, '.4g'), 'loss': ('ppo/loss/total', '.3f')}
    return [
        *found,
        tracked_samples.OriginalSamples(trainer, reader),
        Progress(trainer, phase.name, 'episodes', lambda steps: steps * batch_size, columns),
        HealthMonitor(run.on_anomaly, trainer, checkpointer, FINITE, most_kl(phase.settings)),
        Checkpoints(trainer, checkpointer, run.save_interval, phase.settings),
    ]


def most_kl(settings: HParams) -> float:
    """Return the KL divergence, in nats per response, above which an alarm is raised."""
    adaptive_kl = settings.rewards.adaptive_kl
    if adaptive_kl is not None:
        return KL_TARGETS * adaptive_kl.target
    return KL_PER_TOKEN * settings.task.response_length
