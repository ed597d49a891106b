"""Training a reward model from human labels: the command (paper, section 2.1)."""

import copy
import dataclasses
import itertools
import os
import shutil
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from lm_human_preferences import label_types, lm_tasks, plans, session, storage
from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.checkpointing.checkpointer import Checkpointer, variables_of
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import about_option
from lm_human_preferences.hparams.policy_options import HParams as PolicyHParams
from lm_human_preferences.hparams.reward_options import BEST, FROZEN, HParams
from lm_human_preferences.hparams.reward_options import LabelHParams as LabelHParams
from lm_human_preferences.hparams.reward_options import RunHParams as RunHParams
from lm_human_preferences.labels import label_files, simulated
from lm_human_preferences.labels.folder import are_line_counts
from lm_human_preferences.labels.held_out import Prediction, prediction_of, rewards_of, split
from lm_human_preferences.language.adapters import shared
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.language.weights import open_bundle
from lm_human_preferences.policy import Policy
from lm_human_preferences.reward_models import locations
from lm_human_preferences.rewards import RewardModel, TrainedRewardModel
from lm_human_preferences.runs import label_record, run_dir, run_files, run_settings
from lm_human_preferences.trainers import head_training
from lm_human_preferences.trainers.hooks import reward_hooks
from lm_human_preferences.trainers.reward_trainer import STATE, RewardModelTrainer, counted
from lm_human_preferences.training import console, memory
from lm_human_preferences.training.loop import training_loop
from lm_human_preferences.training.networks import REWARD_NETWORKS
from lm_human_preferences.training.time_left import TimeLeft
from lm_human_preferences.utils.core import exact_div, random_stream, set_seed
from lm_human_preferences.utils.logging import Logger, announce, log_line

# Like that of ranks: no seed of a run comes near it
MEMBER_SEED_STRIDE = 1_000_003
NORM = ('reward_gain', 'reward_bias')


def train(
    hparams: HParams,
    comm: Comm | None = None,
    experiment: str | None = None,
    task_options: Mapping[str, Any] | None = None,
) -> None:
    """Train a reward model in SAVE_DIR/reward_model; task_options: see announce_reward_model."""
    comm = session.connect(hparams, comm)
    with run_dir.lock_run_dir(hparams, comm), shared.read_once():
        session.pin(hparams, comm)
        records = run_settings.records(hparams, experiment=experiment, ranks=comm.size)
        clock = TimeLeft(dict.fromkeys(plans.reward_phases(hparams.ensemble), 1))
        prediction = train_in_run(hparams, hparams, comm, records, clock)
    if comm.rank == 0:
        save_dir = hparams.run.save_dir
        console.announce_reward_model(save_dir, experiment, task_options or {}, prediction)


def train_for_policy(
    hparams: PolicyHParams, directory: str, comm: Comm, clock: TimeLeft, experiment: str | None
) -> PolicyHParams:
    """Train the reward model of a policy's run in `directory`; return settings with its path."""
    hparams = copy.deepcopy(hparams)
    new_model = hparams.reward_training
    assert new_model is not None
    new_model.run.save_dir = directory
    new_model.ensemble = hparams.rewards.members
    hparams.rewards.trained_model = storage.join(directory, run_files.REWARD.network)
    records = run_settings.records(hparams, experiment=experiment, ranks=comm.size)
    train_in_run(new_model, hparams, comm, records, clock)
    comm.barrier()
    return hparams


def train_in_run(
    hparams: HParams,
    command: HParams | PolicyHParams,
    comm: Comm,
    records: dict[str, dict],
    clock: TimeLeft,
) -> Prediction | None:
    """Train reward models in a locked run directory, or resume; return the held-out accuracy.

    Only one model at a time has gradients and moments. command: settings of the whole command,
    which may train a policy afterwards. None without held-out labels, and where it was finished
    before.
    """
    console.dump(hparams)
    if hparams.features == FROZEN:
        return head_training.train(hparams, command, comm, records)
    members = _Members(hparams, command, comm, records, clock)
    prediction = held_out = None
    last_step = 0
    for member in range(hparams.ensemble):
        trainer = members.train(member)
        if trainer is not None:
            prediction, held_out = trainer.prediction, trainer.held_out
            last_step = trainer.total_steps - 1
        del trainer  # its memory is the next one's
    if hparams.ensemble == 1 or prediction is None or hparams.run.directory is None:
        return prediction
    assert held_out is not None
    return _measure_mean(hparams, comm, held_out, last_step) if comm.rank == 0 else None


@dataclasses.dataclass
class _Members:
    """Training of the reward models of a run, one after another."""

    hparams: HParams
    command: HParams | PolicyHParams  # see train_in_run
    comm: Comm
    records: dict[str, dict]
    clock: TimeLeft
    label_record: Mapping[str, Any] | None = None  # of the last model that this process trained

    def train(self, member: int) -> RewardModelTrainer | None:
        """Train model `member`; return its trainer, None if it was finished before."""
        hparams, run = self.hparams, self.command.run
        files = run_files.REWARD.of_member(member)
        finished, unfinished = self._path(files.finished), self._path(files.unfinished)
        if run.resume and self._is_finished(finished):
            if self.comm.rank == 0 and unfinished:
                log_line(f'The reward model in {self._path(files.network)} is finished')
                shutil.rmtree(unfinished, ignore_errors=True)
            return None
        with (
            memory.explain_oom(hparams.option_name('micro_batch_size')),
            Checkpointer(
                unfinished if run.save_dir else None,
                self.comm,
                resume=run.resume,
                schema=STATE,
                frozen_scopes=REWARD_NETWORKS.frozen,
                max_to_keep=2,
                stop_timeout=run.stop_timeout,
                complete=self._counted,
            ) as checkpointer,
        ):
            trainer = self._start(member, checkpointer)
            trainer.prepare()
            phase = plans.reward_phases(hparams.ensemble)[member]
            hooks = reward_hooks(trainer, checkpointer, run, self.clock, phase)
            training_loop(trainer, hooks)
            trainer.finish()
            if 0 < member == hparams.ensemble - 1 and trainer.is_normalized:
                self._normalize_mean(trainer)
        if self.comm.rank == 0 and finished and unfinished:
            checkpoints.save(finished, 'model.ckpt', variables_of(trainer))
            shutil.rmtree(unfinished, ignore_errors=True)
        return trainer

    def _normalize_mean(self, trainer: RewardModelTrainer) -> None:
        """Scale all models so that their mean has the scale of one, before the last is saved.

        A pure function of their weights: where it was interrupted, it is done again.
        """
        hparams, directory = self.hparams, self.hparams.run.directory
        if self.comm.rank != 0 or directory is None:
            return
        encoding = lm_tasks.initial_encoding(hparams.task.policy.initial_model)
        places = locations.locations_of(directory, hparams.ensemble)[:-1]
        earlier = (TrainedRewardModel(place.directory, encoding) for place in places)
        with random_stream(hparams.run.seed, 'mean of an ensemble'):
            scales = trainer.scales_of_mean(itertools.chain(earlier, [trainer.reward_model]))
        trainer.reward_model.set_scale(*scales.pop())
        # By another name, as files of one checkpoint are replaced one after the other.
        checkpoint = f'model.ckpt-{trainer.steps_done}'
        for place, scale in zip(places, scales, strict=True):
            bundle = open_bundle(place.directory)
            variables = dict(bundle)
            for name, value in zip(NORM, scale, strict=True):
                variable = trainer.variable_names.name_of(f'{locations.SCOPE}/{name}')
                variables[variable] = np.array(value, np.float32)
            directory = os.path.dirname(bundle.prefix)
            checkpoints.save(directory, checkpoint, variables, max_to_keep=1)

    def _counted(self, state: dict[str, Any]) -> dict[str, Any]:
        return counted(state, run_settings.as_recorded(self.hparams).batch_size)

    def _path(self, name: str) -> str | None:
        """Return the path of a file of the run; None if nothing is saved."""
        directory = self.hparams.run.directory
        return directory and storage.join(directory, name)

    def _is_finished(self, directory: str | None) -> bool:
        """Return whether rank 0 sees the checkpoint of a finished reward model."""
        latest = checkpoints.latest(directory) if directory else None
        return self.comm.all_gather_object(latest is not None)[0]

    def _start(self, member: int, checkpointer: Checkpointer) -> RewardModelTrainer:
        """Return the trainer of a model before its next step, once its labels are recorded."""
        hparams, comm = self.hparams, self.comm
        is_first = self.label_record is None  # of those that this process trains
        is_whole_run = self.command.policy is None
        if is_first and is_whole_run:
            session.show_precision_notes(hparams, comm)
        if is_first:
            session.check(hparams, comm, plans.memory_plans)
        if is_first and self.command.run.resume:
            self.label_record = label_record.read(self._path(run_files.LEARNED), comm)
        # Earlier versions had them in the trainer's state of a checkpoint.
        recorded = self.label_record or checkpointer.state.get('trainer', {})
        answers = recorded.get('answers')
        if not are_line_counts(answers):
            answers = None
        trainer = session.start(
            lambda initial_model: build_trainer(hparams, initial_model, comm, answers, member),
            hparams,
            checkpointer,
            comm,
            records=self.records,
            command=self.command.command,
            network=run_files.REWARD.of_member(member).network,
            saves=lambda trainer: 1 + trainer.total_steps // hparams.run.save_interval,
        )
        if comm.rank == 0 and is_first:
            if is_whole_run:
                console.show_start('train_reward', hparams, comm)
                session.show_queries(hparams)
            log_line(*trainer.label_notes)
        if comm.rank == 0 and hparams.ensemble > 1:
            log_line(f'Reward model {member + 1} of {hparams.ensemble}')
        self._record_labels(trainer, is_begun=member > 0 or checkpointer.prefix is not None)
        return trainer

    def _record_labels(self, trainer: RewardModelTrainer, is_begun: bool) -> None:
        """Record the labels; UserError if they are not those that the training began with."""
        record, path = trainer.label_record, self._path(run_files.LEARNED)
        assert record is not None
        with about_option(self.hparams.labels.option_name('source')):
            note = label_record.check(record, self.label_record, is_begun=is_begun)
        if self.comm.rank == 0 and note:
            announce(note)
        if self.comm.rank == 0 and path:
            storage.write_json(path, record)
        self.label_record = record


def member_seed(seed: int | None, member: int) -> int:
    """Return the seed of model number `member` of an ensemble; `seed` is the run's."""
    assert seed is not None, 'run_settings.pins sets it: members learn the same labels'
    return seed + member * MEMBER_SEED_STRIDE


def build_trainer(
    hparams: HParams,
    initial_model: TrainedModel,
    comm: Comm,
    answers: dict[str, int] | None = None,
    member: int = 0,
) -> RewardModelTrainer:
    """Return the trainer of model `member`; answers: {labeller: lines that count}, None: all."""
    encoding = initial_model.encoding
    encoder = encoding.get_encoder()
    source = hparams.labels.source
    loaded = None
    if source != 'mock':
        loaded = label_files.load_labels(hparams, encoding, comm, answers)

    settings = lm_tasks.policy_settings(hparams.task, encoder)
    ref_policy = Policy(initial_model, scope='ref_policy', **settings)
    reward_model = RewardModel(initial_model)
    REWARD_NETWORKS.broadcast({'reward_model': reward_model, 'ref_policy': ref_policy}, comm)

    if loaded is None:
        labels = simulated.simulated_labels(hparams, ref_policy, comm)
        loaded = label_files.LoadedLabels(labels, [], {})
    record = label_record.record_of(source, loaded.tensors, loaded.folder)
    labels, held_out, split_notes = split(loaded.tensors, hparams, encoder)

    if member > 0:
        set_seed(member_seed(hparams.run.seed, member), comm.rank)
        reward_model = RewardModel(initial_model)
        comm.broadcast_(reward_model.get_params())
    reward_model.model.gradient_checkpointing = hparams.run.gradient_checkpointing
    query_sampler = lm_tasks.make_query_sampler(
        hparams=hparams.task,
        encoder=encoder,
        comm=comm,
        labels=source,
        batch_size=exact_div(hparams.rollout_batch_size, comm.size),
    )
    return RewardModelTrainer(
        reward_model=reward_model,
        policy=ref_policy,
        query_sampler=query_sampler,
        labels=labels,
        held_out=held_out,
        label_notes=[*loaded.notes, *split_notes],
        label_record=record,
        settings=hparams,
        logger=logger_of(hparams, comm, member),
        comm=comm,
    )


def logger_of(hparams: HParams, comm: Comm, member: int = 0) -> Logger:
    """Return the log of the training of model `member`."""
    return Logger(
        hparams.run.directory,
        run_files.REWARD.of_member(member).network,
        log_interval=hparams.run.log_interval,
        comm=comm,
        tag_prefix='train_reward/minibatch/',
    )


def _measure_mean(
    hparams: HParams, comm: Comm, held_out: dict[str, torch.Tensor], step: int
) -> Prediction:
    """Log and return the accuracy of an ensemble's mean; its models are loaded one by one."""
    directory = hparams.run.directory
    assert directory is not None
    label_type = label_types.get(hparams.labels.type)
    labels = label_type.without_ties(held_out)
    encoding = lm_tasks.initial_encoding(hparams.task.policy.initial_model)
    size = hparams.micro_batch_size or hparams.batch_size
    found = []
    for place in locations.locations_of(directory, hparams.ensemble):
        model = TrainedRewardModel(place.directory, encoding, scope=place.scope)
        found.append(rewards_of(model.get_rewards, labels, label_type, size))
    prediction = prediction_of(torch.stack(found).mean(0), labels, label_type)
    prediction = dataclasses.replace(prediction, is_selected=hparams.keep == BEST)
    logger = Logger(
        directory,
        run_files.REWARD.network,
        log_interval=hparams.run.log_interval,
        comm=comm,
        tag_prefix='train_reward/held_out_of_mean/',
    )
    logger.log(prediction.statistics(), step)
    logger.close()
    log_line(f'held out, mean of {hparams.ensemble} reward models: {prediction}')
    return prediction
