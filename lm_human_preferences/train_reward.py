"""Training a reward model from human labels: the command (paper, section 2.1)."""

import copy
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lm_human_preferences import lm_tasks, plans, session, storage
from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.checkpointing.checkpointer import Checkpointer, variables_of
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import about_option
from lm_human_preferences.hparams.policy_options import HParams as PolicyHParams
from lm_human_preferences.hparams.reward_options import HParams, LabelHParams, RunHParams
from lm_human_preferences.labels import label_files, simulated
from lm_human_preferences.labels.folder_labels import open_folder, recorded_answers, to_record
from lm_human_preferences.labels.held_out import split
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.policy import Policy
from lm_human_preferences.reward_trainer import STATE, RewardModelTrainer
from lm_human_preferences.rewards import RewardModel
from lm_human_preferences.runs import label_record, run_dir, run_files, run_settings
from lm_human_preferences.training import console, memory
from lm_human_preferences.training.hooks import reward_hooks
from lm_human_preferences.training.loop import training_loop
from lm_human_preferences.training.time_left import TimeLeft
from lm_human_preferences.utils.core import exact_div, set_seed
from lm_human_preferences.utils.logging import log_line

MEMBER_SEED_STRIDE = 1_000_003  # as that of ranks, no seed of a run comes near it

__all__ = ['HParams', 'LabelHParams', 'RewardModelTrainer', 'RunHParams', 'train']


def train(
    hparams: HParams,
    comm: Comm | None = None,
    experiment: str | None = None,
    task_options: Mapping[str, Any] | None = None,
) -> None:
    """Train a reward model and save it to SAVE_DIR/reward_model: `./launch.py train_reward`.

    experiment: that the hyperparameters are of, for the record. task_options: see
    console.announce_reward_model.
    """
    comm = session.connect(hparams, comm)
    with run_dir.lock_run_dir(hparams, comm):
        session.pin(hparams, comm)
        records = run_settings.records(hparams, experiment=experiment, ranks=comm.size)
        clock = TimeLeft(dict.fromkeys(plans.reward_phases(hparams.ensemble), 1))
        train_in_run(hparams, comm, hparams.run, records, clock)
    if comm.rank == 0:
        console.announce_reward_model(hparams.run.save_dir, experiment, task_options or {})


def member_seed(seed: int | None, member: int) -> int:
    """The seed of the member of an ensemble that has this number, from 0, where that of the run is
    `seed`; see run_settings.pins about None."""
    assert seed is not None, 'members learn the same labels, which a seed may have made'
    return seed + member * MEMBER_SEED_STRIDE


def with_reward_model_in(directory: str, hparams: PolicyHParams) -> PolicyHParams:
    """The same settings with the path of the reward model that is trained in `directory`.

    As the original wrote them to the run's files: with both ways to a reward model.
    """
    placed = copy.deepcopy(hparams)
    new_model = placed.rewards.train_new_model
    assert new_model is not None
    new_model.run.save_dir = directory
    new_model.ensemble = placed.rewards.members
    placed.rewards.trained_model = storage.join(directory, run_files.REWARD.network)
    return placed


def train_for_policy(
    hparams: PolicyHParams, comm: Comm, clock: TimeLeft, experiment: str | None
) -> None:
    """Train the reward model of `rewards.train_new_model`, for the policy to use.

    hparams: see with_reward_model_in. clock: of the whole command, see train_in_run. experiment:
    that the hyperparameters are of.
    """
    new_model = hparams.rewards.train_new_model
    assert new_model is not None
    records = run_settings.records(hparams, experiment=experiment, ranks=comm.size)
    train_in_run(new_model, comm, hparams.run, records, clock)
    comm.barrier()


def train_in_run(
    hparams: HParams,
    comm: Comm,
    run: RunHParams,
    records: dict[str, dict],
    clock: TimeLeft,
) -> None:
    """Train a reward model in a run directory that is locked already; resumes what is there.

    Those of an ensemble are trained one after another, so that one of them at a time has gradients
    and moments. run: settings of the command, of which this may be the first half. records: JSON
    files of the run by name, written before the first step. clock: of the command, with the phases
    that plans.reward_phases names.
    """
    console.dump(hparams)
    record = None
    for member in range(hparams.ensemble):
        record = _train_member(hparams, comm, run, records, clock, member, record)


def _train_member(
    hparams: HParams,
    comm: Comm,
    run: RunHParams,
    records: dict[str, dict],
    clock: TimeLeft,
    member: int,
    record: Mapping[str, Any] | None,
) -> Mapping[str, Any] | None:
    """Train the member of an ensemble that has this number, from 0; see train_in_run.

    record: of the labels that this process has trained the member before it on; all learn the same
    ones. Returns their record.
    """
    is_whole_run = run is hparams.run
    is_first = record is None  # of those that this process trains
    files = _Files.of(hparams.run.directory, member)
    if run.resume and _is_finished(files, comm):
        return record
    with (
        memory.explain_oom(hparams.option_name('micro_batch_size')),
        Checkpointer(
            files.unfinished if run.save_dir else None,
            comm,
            resume=run.resume,
            schema=STATE,
            frozen_scopes=plans.REWARD_NETWORKS.frozen,
            max_to_keep=2,
            stop_timeout=run.stop_timeout,
        ) as checkpointer,
    ):
        if is_whole_run and is_first:
            session.show_precision_notes(hparams, comm)
        session.check(hparams, comm, lambda sizes: [plans.reward_memory(hparams, sizes, comm.size)])
        before = label_record.read(files.labels, comm) if is_first and run.resume else record
        answers = recorded_answers(before or checkpointer.state.get('trainer', {}))
        trainer = session.start(
            lambda initial_model: build_trainer(hparams, initial_model, comm, answers, member),
            hparams,
            checkpointer,
            comm,
            records=records,
            model_dir=run_files.REWARD.of_member(member).network,
        )
        if comm.rank == 0 and is_first:
            _show_start(trainer, is_whole_run=is_whole_run)
        if comm.rank == 0 and hparams.ensemble > 1:
            log_line(f'Reward model {member + 1} of {hparams.ensemble}')
        is_begun = member > 0 or checkpointer.prefix is not None
        _record_labels(trainer, before, files.labels, is_begun=is_begun)
        trainer.prepare()
        phase = plans.reward_phases(hparams.ensemble)[member]
        training_loop(trainer, reward_hooks(trainer, checkpointer, run.on_anomaly, clock, phase))
        trainer.finish()
    if comm.rank == 0 and files.finished is not None:
        checkpoints.save(files.finished, 'model.ckpt', variables_of(trainer))
        _delete_checkpoints(files.unfinished)
    return trainer.label_record


@dataclass(frozen=True)
class _Files:
    """Where a run keeps its reward model; all None where nothing is saved.

    directory: of the model. finished, unfinished: of checkpoints. labels: the record of the labels,
    which the members of an ensemble share.
    """

    directory: str | None = None
    finished: str | None = None
    unfinished: str | None = None
    labels: str | None = None

    @classmethod
    def of(cls, run_directory: str | None, member: int) -> '_Files':
        """Those of a run in that directory, of the member of its ensemble with this number."""
        if run_directory is None:
            return cls()
        files = run_files.REWARD.of_member(member)
        return cls(
            directory=storage.join(run_directory, files.network),
            finished=storage.join(run_directory, files.finished),
            unfinished=storage.join(run_directory, files.unfinished),
            labels=storage.join(run_directory, run_files.LEARNED),
        )


def _show_start(trainer: RewardModelTrainer, *, is_whole_run: bool) -> None:
    """Print what a run begins with, and what its labels are; a policy's run has begun before."""
    if is_whole_run:
        console.show_start('train_reward', trainer.hparams, trainer.comm)
        session.show_queries(trainer.hparams)
    log_line(*trainer.label_notes)


def _record_labels(
    trainer: RewardModelTrainer,
    before: Mapping[str, Any] | None,
    path: str | None,
    *,
    is_begun: bool,
) -> None:
    """Write to `path` which labels are learned; see label_record.check about those of `before`."""
    assert trainer.label_record is not None
    with about_option(trainer.hparams.labels.option_name('source')):
        note = label_record.check(trainer.label_record, before, is_begun=is_begun)
    if trainer.comm.rank == 0 and note:
        log_line(note)
    if trainer.comm.rank == 0 and path is not None:
        storage.write_json(path, trainer.label_record)


def _is_finished(files: _Files, comm: Comm) -> bool:
    """Whether rank 0 sees the checkpoint of a finished reward model; if so, tells the user."""
    latest = checkpoints.latest(files.finished) if files.finished is not None else None
    is_finished = comm.all_gather_object(latest is not None)[0]
    if is_finished and comm.rank == 0:
        log_line(f'The reward model in {files.directory} is finished')
        _delete_checkpoints(files.unfinished)
    return is_finished


def _delete_checkpoints(directory: str | None) -> None:
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)


def build_trainer(
    hparams: HParams,
    initial_model: TrainedModel,
    comm: Comm,
    answers: dict[str, int] | None = None,
    member: int = 0,
) -> RewardModelTrainer:
    """The trainer of a run, whose reward model begins as `initial_model`, the same on all ranks.

    answers: of a folder of labels, {labeller: how many lines count}; None: all that it has. member:
    of an ensemble. The random numbers of the run's seed are its first member's, whose labels all
    learn; then each of the others has a head of its own, and whatever is drawn later.
    """
    encoding = initial_model.encoding
    labels, label_notes = None, []
    source = hparams.labels.source
    folder = open_folder(source, comm, answers)
    if source != 'mock':
        labels, label_notes = label_files.load_labels(hparams, encoding, folder)
    ref_policy = Policy(
        initial_model,
        scope='ref_policy',
        temperature=hparams.task.policy.temperature,
        embed_queries=lm_tasks.query_formatter(hparams.task, encoding.get_encoder()),
    )
    reward_model = RewardModel(initial_model)
    plans.REWARD_NETWORKS.broadcast({'reward_model': reward_model, 'ref_policy': ref_policy}, comm)
    if labels is None:
        labels = simulated.simulated_labels(hparams, ref_policy, comm)
    if member > 0:
        set_seed(member_seed(hparams.run.seed, member), comm.rank)
        reward_model = RewardModel(initial_model)
        comm.broadcast_(reward_model.get_params())
    reward_model.model.gradient_checkpointing = hparams.run.gradient_checkpointing
    of_folder = to_record(folder, hparams) if folder is not None else {}
    record = label_record.record_of(source, labels, of_folder)
    labels, held_out, split_notes = split(labels, hparams)
    query_sampler = lm_tasks.make_query_sampler(
        hparams=hparams.task,
        encoder=encoding.get_encoder(),
        comm=comm,
        labels=source,
        batch_size=exact_div(hparams.rollout_batch_size, comm.size),
    )
    return RewardModelTrainer(
        reward_model=reward_model,
        policy=ref_policy,
        labels=labels,
        held_out=held_out,
        label_notes=[*label_notes, *split_notes],
        label_record=record,
        hparams=hparams,
        comm=comm,
        query_sampler=query_sampler,
        member=member,
    )
