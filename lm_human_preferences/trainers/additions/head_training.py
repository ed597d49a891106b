"""Fitting of reward models that are heads on frozen hidden states, without training steps."""

import dataclasses
import time
from typing import Any

import torch

from lm_human_preferences import label_types, lm_tasks
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import UserError
from lm_human_preferences.labels.held_out import Labels, Prediction, predict, subjects_of
from lm_human_preferences.plan.phases import FitHead, TrainReward
from lm_human_preferences.policy import Policy
from lm_human_preferences.reward_sources.frozen_head import head as heads
from lm_human_preferences.reward_sources.frozen_head.fitting import Fitted, fit_head
from lm_human_preferences.reward_sources.frozen_head.reward import (
    FrozenReward,
    features_of,
    probe_of,
)
from lm_human_preferences.runs import run_files
from lm_human_preferences.trainers import reward_trainer
from lm_human_preferences.trainers.additions import session
from lm_human_preferences.utils.core import ceil_div, exact_div
from lm_human_preferences.utils.logging import Logger, announce, log_in_summary, progress

ROWS = 64  # number of responses in one forward pass


def train(run: session.Run, phase: FitHead) -> Prediction | None:
    """Fit and save a head; return its accuracy on held-out labels, or None without such labels."""
    settings, comm = phase.settings, run.comm
    with run.checkpointer(phase.files, max_to_keep=2) as checkpointer:
        initial_model = run.prepare(phase, checkpointer)
    encoder = initial_model.encoding.get_encoder()
    policy_settings = lm_tasks.policy_settings(settings.task, encoder)
    reference = Policy(initial_model, scope='ref_policy', only_samples=True, **policy_settings)
    if initial_model.is_random:
        comm.broadcast_(reference.get_params())
    run.begin(phase, initial_model, checkpointer.seed)
    labels = reward_trainer.read_labels(phase, reference, comm)
    if comm.rank == 0:
        announce(*labels.notes)
        run.record_labels(phase, labels.about)
    began, count = time.monotonic(), len(labels.learned['query'])
    fitted = fit(phase, reference, labels.learned, comm)
    seconds = time.monotonic() - began
    prediction = None
    if labels.held_out is not None:
        label_type = label_types.get(settings.labels.type)
        get_rewards = FrozenReward(fitted.head, reference).get_rewards
        prediction = predict(get_rewards, labels.held_out, label_type, ROWS, comm)
    if comm.rank == 0:
        log_in_summary(f'A head on frozen hidden states learned {count} labels in {seconds:.0f} s')
        _tell(phase, fitted, prediction, comm)
        if (place := phase.path(phase.files.network)) is not None:
            fitted.head.save(place, about(phase, fitted, reference, count))
    comm.barrier()
    return prediction


def fit(
    phase: TrainReward,
    reference: Policy,
    labels: Labels,
    comm: Comm,
    *,
    may_be_constant: bool = False,
) -> Fitted:
    """Fit a head to `labels` and normalise it; all ranks return the same head.

    may_be_constant: accept a head that scores all samples alike, as more labels will follow.
    """
    label_type = label_types.get(phase.settings.labels.type)
    responses = torch.stack([labels[sample] for sample in label_type.samples], dim=1)
    features = _features_of_labels(reference, labels['query'], responses, comm)
    others = torch.cat(comm.all_gather_object(_sampled(phase, reference, comm)))
    subjects = subjects_of(labels, label_type, reference.encoder)
    fitted = fit_head(features, labels, label_type, others, subjects)
    head = _normalized(phase, fitted.head, others, may_be_constant)
    comm.broadcast_(vars(head).values())  # a fit's last digits depend on the number of threads
    return fitted._replace(head=head)


def _features_of_labels(
    reference: Policy, queries: torch.Tensor, responses: torch.Tensor, comm: Comm
) -> torch.Tensor:
    """Return the features of all labels' responses, as (labels, responses, features)."""
    own = slice(comm.rank, None, comm.size)
    rows = max(1, ROWS // responses.shape[1])
    parts = zip(queries[own].split(rows), responses[own].split(rows), strict=True)
    features = torch.empty(*responses.shape[:2], heads.n_features(reference.model.sizes.n_embd))
    found = [features[:0]]
    total = _tokens(reference, queries[own], responses[own])
    with progress(total=total, comm=comm, desc='labels', unit='token', unit_scale=True) as bar:
        for part in parts:
            if len(part[0]):  # a rank may have no label
                found.append(features_of(reference, *part).cpu())
            bar.update(_tokens(reference, *part))
    for rank, share in enumerate(comm.all_gather_object(torch.cat(found))):
        features[rank :: comm.size] = share
    return features


def _tokens(reference: Policy, queries: torch.Tensor, responses: torch.Tensor) -> int:
    """Return the number of tokens to process: a query counts once for each of its responses."""
    real = [(each != reference.padding_token).sum().item() for each in (queries, responses)]
    return int(real[0] * responses.shape[1] + real[1])


def _sampled(phase: TrainReward, reference: Policy, comm: Comm) -> torch.Tensor:
    """Sample from the initial policy; return features (n, features) of this rank's samples."""
    settings = phase.settings
    query_sampler = lm_tasks.make_query_sampler(
        settings.task,
        encoder=reference.encoder,
        comm=comm,
        labels=settings.labels.source,
        batch_size=exact_div(settings.rollout_batch_size, comm.size),
    )
    found = [torch.empty(0, heads.n_features(reference.model.sizes.n_embd))]
    batches = range(ceil_div(settings.normalize_samples, settings.rollout_batch_size))
    for _ in progress(batches, comm=comm, desc='samples', unit='batch'):
        for part in query_sampler()['tokens'].split(ROWS):
            responses = reference.respond(part, settings.task.response_length)['responses']
            found.append(features_of(reference, part, responses).cpu())
    return torch.cat(found)


def _normalized(
    phase: TrainReward, head: heads.Head, others: torch.Tensor, may_be_constant: bool
) -> heads.Head:
    """Return `head`, rescaled to mean 0 and std 1 on sampled responses if normalize_after is on."""
    settings = phase.settings
    if not settings.normalize_after or len(others) == 0:
        return head
    std, mean = torch.std_mean(head(others)[0], correction=0)
    if std <= heads.SMALLEST_DEVIATION * max(mean.abs(), head.doubt) or not std.isfinite():
        if may_be_constant and std.isfinite():
            return head.rescaled(0.0, 0.0)
        raise UserError(
            f'{settings.labels.setting("source")}: all responses get the same reward, which cannot'
            ' be normalised: check the labels'
        )
    return head.rescaled((1 / std).item(), (-mean / std).item())


def _tell(phase: TrainReward, fitted: Fitted, held_out: Prediction | None, comm: Comm) -> None:
    """Log and print the head's accuracy in cross-validation and on held-out labels, if any."""
    log = Logger(phase.settings.run.directory, run_files.REWARD.network, log_interval=1, comm=comm)
    numbers = {'strength': fitted.strength, 'gain': fitted.gain, 'least_gain': fitted.least_gain}
    numbers = {name: number for name, number in numbers.items() if number is not None}
    if fitted.prediction is not None:
        numbers |= fitted.prediction.statistics()
    log.log(numbers, 0, tag_prefix='train_reward/cross_validated/')
    announce(f'By cross-validation: {fitted}')
    if held_out is not None:
        log.log(held_out.statistics(), 0, tag_prefix='train_reward/held_out/')
        announce(f'held out: {held_out}')
    log.close()
    if warning := fitted.warning():
        announce(warning)


def about(phase: TrainReward, fitted: Fitted, reference: Policy, labels: int) -> dict[str, Any]:
    """Return the JSON values saved with a head: task, initial model and accuracy."""
    settings, prediction = phase.settings, fitted.prediction
    return {
        'initial_model': settings.task.policy.initial_model,
        'task': settings.task.to_nested_dict(),
        'label_type': settings.labels.type,
        'labels': labels,
        'strength': fitted.strength,
        'gain': fitted.gain,
        'least_gain': fitted.least_gain,
        'cross_validated': {} if prediction is None else dataclasses.asdict(prediction),
        'probe': probe_of(reference).tolist(),
    }
