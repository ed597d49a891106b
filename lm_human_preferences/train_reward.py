"""Training of a reward model from human labels (paper, section 2.1)."""

import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from lm_human_preferences import label_types, lm_tasks
from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.checkpointing.checkpointer import Checkpointer, variables_of
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.hparams.reward_options import CommandHParams as HParams
from lm_human_preferences.hparams.reward_options import CommandRunHParams
from lm_human_preferences.hparams.reward_options import LabelHParams as LabelHParams
from lm_human_preferences.labels.held_out import Labels, Prediction, predict
from lm_human_preferences.language.networks.scopes import REWARD_NETWORKS
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.plan.phases import FitHead, Plan, TrainReward
from lm_human_preferences.policy import Policy
from lm_human_preferences.rewards import RewardModel
from lm_human_preferences.runs import run_files
from lm_human_preferences.trainers.additions import console, session
from lm_human_preferences.trainers.reward_trainer import (
    RewardModelTrainer,
    TrainingLabels,
    read_labels,
    trainer_of,
)
from lm_human_preferences.training.loop import (
    Checkpoints,
    HealthMonitor,
    Hook,
    Progress,
    training_loop,
)
from lm_human_preferences.utils.core import set_seed
from lm_human_preferences.utils.logging import Logger, announce

RunHParams = CommandRunHParams  # name of this class in the original


def train(
    hparams: HParams,
    comm: Comm | None = None,
    experiment: str | None = None,
    task_options: Mapping[str, Any] | None = None,
) -> None:
    """Train a reward model in SAVE_DIR/reward_model; task_options: see announce_reward_model."""
    with session.opened(hparams, comm, experiment) as run:
        plan = run.plan()
        console.dump(hparams)
        left = unfinished(plan, run.comm)
        prediction = None
        if left:
            run.check_start(plan)
            prediction = train_models(run, left)
    if run.comm.rank == 0:
        save_dir = hparams.run.save_dir
        console.announce_reward_model(save_dir, experiment, task_options or {}, prediction)


def unfinished(plan: Plan, comm: Comm) -> list[TrainReward]:
    """Return the unfinished trainings of reward models; announce the finished ones."""
    left = []
    for phase in plan.rewards:
        # Rank 0 decides which trainings are finished: other hosts may not see the run's files.
        if not phase.run.resume or not comm.all_gather_object(phase.is_finished())[0]:
            left.append(phase)
        elif comm.rank == 0:
            announce(f'The reward model in {phase.path(phase.files.network)} is finished')
            shutil.rmtree(str(phase.path(phase.files.unfinished)), ignore_errors=True)
    return left


def train_models(run: session.Run, left: Sequence[TrainReward]) -> Prediction | None:
    """Train the unfinished reward models in `left` in turn; the first may go on from a checkpoint.

    Only one model at a time has gradients and moments. Return the held-out accuracy; None without
    held-out labels.
    """
    if isinstance(left[0], FitHead):
        from lm_human_preferences.trainers.additions import head_training  # imported only if needed

        return head_training.train(run, left[0])
    comm, labels, prediction = run.comm, None, None
    for phase in left:
        with run.checkpointer(phase.files, max_to_keep=2) as checkpointer:
            initial_model = run.prepare(phase, checkpointer)
            trainer, labels = build_trainer(phase, initial_model, comm, labels)
            run.restore(trainer, phase, initial_model, checkpointer)
            if comm.rank == 0 and phase is left[0]:
                announce(*labels.notes)
                run.record_labels(phase, labels.about)
            if comm.rank == 0 and phase.members > 1:
                announce(f'Reward model {phase.member + 1} of {phase.members}')
            trainer.prepare()
            training_loop(trainer, hooks(trainer, checkpointer, phase))
            trainer.finish()
        finished, unfinished = phase.path(phase.files.finished), phase.path(phase.files.unfinished)
        if comm.rank == 0 and finished and unfinished:
            checkpoints.save(finished, 'model.ckpt', variables_of(trainer))
            shutil.rmtree(unfinished, ignore_errors=True)
        prediction, last_step = trainer.prediction, trainer.total_steps - 1
        del trainer  # the next model needs the trainer's memory
        if phase.members > 1 and phase is left[-1] and prediction and finished and comm.rank == 0:
            prediction = _measure_mean(phase, labels.held_out, last_step, comm)
    return prediction


def hooks(
    trainer: RewardModelTrainer, checkpointer: Checkpointer, phase: TrainReward
) -> list[Hook]:
    """Return the hooks of a reward model's training."""
    columns = {'loss': ('loss', '.3f')}
    return [
        Progress(trainer, phase.name, 'labels', trainer.labels_after, columns),
        HealthMonitor(phase.run.on_anomaly, trainer, checkpointer, ['loss']),
        # No checkpoint at the end: the finished model is saved after it is normalised.
        Checkpoints(trainer, checkpointer, phase.settings.run.save_interval),
    ]


def build_trainer(
    phase: TrainReward,
    initial_model: TrainedModel,
    comm: Comm,
    labels: TrainingLabels | None = None,
) -> tuple[RewardModelTrainer, TrainingLabels]:
    """Return the trainer and the labels of a reward model; both are the same on all ranks.

    labels: labels that an earlier model of an ensemble has learned.
    """
    settings = phase.settings
    encoder = initial_model.encoding.get_encoder()
    policy_settings = lm_tasks.policy_settings(settings.task, encoder)
    ref_policy = Policy(initial_model, scope='ref_policy', **policy_settings)
    reward_model = RewardModel(initial_model)
    REWARD_NETWORKS.broadcast({'reward_model': reward_model, 'ref_policy': ref_policy}, comm)
    labels = labels or read_labels(phase, ref_policy, comm)
    if phase.member > 0:
        set_seed(phase.seed, comm.rank)
        reward_model = RewardModel(initial_model)
        comm.broadcast_(reward_model.get_params())
    reward_model.model.gradient_checkpointing = settings.run.gradient_checkpointing
    trainer = trainer_of(
        phase,
        comm,
        reward_model,
        ref_policy,
        labels.learned,
        held_out=labels.held_out,
        logger=logger_of(phase, comm),
    )
    return trainer, labels


def logger_of(phase: TrainReward, comm: Comm) -> Logger:
    """Return the logger of a reward model's training."""
    run = phase.settings.run
    return Logger(
        run.directory,
        phase.files.network,
        log_interval=run.log_interval,
        comm=comm,
        tag_prefix='train_reward/minibatch/',
    )


def _measure_mean(phase: TrainReward, held_out: Labels | None, step: int, comm: Comm) -> Prediction:
    """Log and return the accuracy of an ensemble's mean reward; only rank 0 calls this."""
    from lm_human_preferences.reward_sources import loading  # imported only if needed

    settings, directory = phase.settings, phase.settings.run.directory
    assert directory is not None and held_out is not None
    encoding = lm_tasks.initial_encoding(settings.task.policy.initial_model)
    reward = loading.load_learned(directory, encoding, phase.members)
    label_type = label_types.get(settings.labels.type)
    size = settings.micro_batch_size or settings.batch_size
    prediction = predict(reward.get_rewards, held_out, label_type, size, Comm())
    assert prediction is not None, 'the members have predicted them'
    logger = Logger(directory, run_files.REWARD.network, log_interval=1, comm=comm)
    logger.log(prediction.statistics(), step, tag_prefix='train_reward/held_out_of_mean/')
    logger.close()
    announce(f'held out, mean of {phase.members} reward models: {prediction}')
    return prediction
