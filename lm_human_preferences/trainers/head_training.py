"""Training of a reward model that is a head on frozen hidden states: it is fitted, not stepped."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import torch

from lm_human_preferences import label_types, lm_tasks, plans, session, storage
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import UserError, about_option
from lm_human_preferences.frozen_head import head as heads
from lm_human_preferences.frozen_head.fitting import Fitted, fit_head
from lm_human_preferences.frozen_head.reward import FrozenReward, features_of, probe_of
from lm_human_preferences.hparams.policy_options import HParams as PolicyHParams
from lm_human_preferences.hparams.reward_options import HParams
from lm_human_preferences.labels import label_files, simulated
from lm_human_preferences.labels.folder import are_line_counts
from lm_human_preferences.labels.held_out import Labels, Prediction, predict, split
from lm_human_preferences.policy import Policy
from lm_human_preferences.runs import label_record, run_files
from lm_human_preferences.training import console, precision
from lm_human_preferences.utils.core import ceil_div, exact_div, set_seed
from lm_human_preferences.utils.logging import Logger, announce, log_in_summary, log_line

ROWS = 64  # responses that are passed at a time


def train(
    hparams: HParams,
    command: HParams | PolicyHParams,
    comm: Comm,
    records: Mapping[str, Any],
) -> Prediction | None:
    """Fit a head in a locked run directory, unless that is done; return its held-out accuracy.

    command: settings of the whole command, which may train a policy afterwards.
    """
    directory, network = hparams.run.directory, run_files.REWARD.network
    place = None if directory is None else storage.join(directory, network)
    is_done = command.run.resume and place is not None and heads.is_head(place)
    if comm.all_gather_object(is_done)[0]:
        if comm.rank == 0:
            log_line(f'The reward model in {place} is finished')
        return None
    is_whole_run = command.policy is None
    if is_whole_run:
        session.show_precision_notes(hparams, comm)
    session.check(hparams, comm, plans.memory_plans)
    initial_model = lm_tasks.initial_model(hparams.task.policy.initial_model)
    precision.configure_for(initial_model.hparams().n_embd, hparams.run.precision)
    set_seed(hparams.run.seed, comm.rank)
    encoder = initial_model.encoding.get_encoder()
    settings = lm_tasks.policy_settings(hparams.task, encoder)
    reference = Policy(initial_model, scope='ref_policy', only_samples=True, **settings)
    if comm.rank == 0 and is_whole_run:
        console.show_start('train_reward', hparams, comm)
        session.show_queries(hparams)
    if comm.rank == 0:
        session.record_start(
            hparams,
            initial_model,
            comm,
            records=records,
            command=command.command,
            network=network,
            seed=hparams.run.seed,
        )
    labels, held_out = _labels_of(hparams, command, reference, comm)
    began = time.monotonic()
    fitted, others = _fit(hparams, reference, labels, comm)
    head = _normalized(hparams, fitted.head, others)
    if comm.rank == 0:
        _tell(hparams, fitted, comm, len(labels['query']), time.monotonic() - began)
        if place is not None:
            head.save(place, _about(hparams, fitted, reference, len(labels['query'])))
    comm.barrier()
    if held_out is None:
        return None
    label_type = label_types.get(hparams.labels.type)
    get_rewards = FrozenReward(head, reference).get_rewards
    return predict(get_rewards, held_out, label_type, ROWS, comm)


def _labels_of(
    hparams: HParams, command: HParams | PolicyHParams, reference: Policy, comm: Comm
) -> tuple[Labels, Labels | None]:
    """Return the labels to learn from and those that are held out, once they are recorded."""
    directory, source = hparams.run.directory, hparams.labels.source
    path = directory and storage.join(directory, run_files.LEARNED)
    before = label_record.read(path, comm) if command.run.resume else None
    answers = (before or {}).get('answers')
    if source == 'mock':
        made = simulated.simulated_labels(hparams, reference, comm)
        loaded = label_files.LoadedLabels(made, [], {})
    else:
        encoding = reference.trained_model.encoding
        counted = answers if are_line_counts(answers) else None
        loaded = label_files.load_labels(hparams, encoding, comm, counted)
    record = label_record.record_of(source, loaded.tensors, loaded.folder)
    with about_option(hparams.labels.option_name('source')):
        note = label_record.check(record, before, is_begun=False)
    labels, held_out, notes = split(loaded.tensors, hparams, reference.encoder)
    if comm.rank == 0:
        log_line(*loaded.notes, *notes)
        if note:
            announce(note)
        if path:
            storage.write_json(path, record)
    return labels, held_out


def _fit(
    hparams: HParams, reference: Policy, labels: Labels, comm: Comm
) -> tuple[Fitted, torch.Tensor]:
    """Fit a head on rank 0, for all; return it with features of what the initial model samples."""
    label_type = label_types.get(hparams.labels.type)
    responses = torch.stack([labels[sample] for sample in label_type.samples], dim=1)
    own = slice(comm.rank, None, comm.size)
    parts = zip(
        labels['query'][own].split(ROWS // responses.shape[1] or 1),
        responses[own].split(ROWS // responses.shape[1] or 1),
        strict=True,
    )
    found = [features_of(reference, *part).cpu() for part in parts]
    n_features = 3 * reference.model.hparams.n_embd
    features = torch.empty(*responses.shape[:2], n_features)
    shares = comm.all_gather_object(torch.cat([features[:0], *found]))
    for rank, share in enumerate(shares):
        features[rank :: comm.size] = share
    others = torch.cat(comm.all_gather_object(_sampled(hparams, reference, comm)))
    fitted = fit_head(features, labels, label_type, others) if comm.rank == 0 else None
    return comm.all_gather_object(fitted)[0], others


def _sampled(hparams: HParams, reference: Policy, comm: Comm) -> torch.Tensor:
    """Return features (n, features) of this rank's samples of the initial policy."""
    query_sampler = lm_tasks.make_query_sampler(
        hparams=hparams.task,
        encoder=reference.encoder,
        comm=comm,
        labels=hparams.labels.source,
        batch_size=exact_div(hparams.rollout_batch_size, comm.size),
    )
    found = [torch.empty(0, 3 * reference.model.hparams.n_embd)]
    for _ in range(ceil_div(hparams.normalize_samples, hparams.rollout_batch_size)):
        queries = query_sampler()['tokens']
        for part in queries.split(ROWS):
            responses = reference.respond(part, hparams.task.response_length)['responses']
            found.append(features_of(reference, part, responses).cpu())
    return torch.cat(found)


def _normalized(hparams: HParams, head: heads.Head, others: torch.Tensor) -> heads.Head:
    """Return the head with scores 0 +- 1 of the initial policy's samples, if that is wanted."""
    if not hparams.normalize_after or len(others) == 0:
        return head
    std, mean = torch.std_mean(head(others)[0], correction=0)
    if std == 0 or not std.isfinite():
        raise UserError(
            f'{hparams.labels.setting("source")}: all responses get the same reward, so it cannot'
            ' be normalised; check the labels'
        )
    return head.rescaled((1 / std).item(), (-mean / std).item())


def _tell(hparams: HParams, fitted: Fitted, comm: Comm, labels: int, seconds: float) -> None:
    """Log and print how well the head would predict other labels."""
    log = Logger(hparams.run.directory, run_files.REWARD.network, log_interval=1, comm=comm)
    numbers = {'gain': fitted.gain, 'gain_margin': fitted.margin, 'strength': fitted.strength}
    if fitted.prediction is not None:
        numbers |= fitted.prediction.statistics()
    log.log(numbers, 0, tag_prefix='train_reward/cross_validated/')
    log.close()
    log_in_summary(f'A head on frozen hidden states learned {labels} labels in {seconds:.0f} s')
    announce(f'By cross-validation: {fitted}')
    warning = fitted.warning()
    if warning:
        announce(warning)


def _about(hparams: HParams, fitted: Fitted, reference: Policy, labels: int) -> dict[str, Any]:
    """Return what is written beside a head: its task, its model, and how well it predicts."""
    found = {}
    if fitted.prediction is not None:
        found = dataclasses.asdict(fitted.prediction)
    return {
        'initial_model': hparams.task.policy.initial_model,
        'task': hparams.task.to_nested_dict(),
        'label_type': hparams.labels.type,
        'labels': labels,
        'strength': fitted.strength,
        'gain': fitted.gain,
        'margin': fitted.margin,
        'cross_validated': found,
        'probe': probe_of(reference).tolist(),
    }
