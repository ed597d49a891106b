"""Checks that a command makes once, cheap ones first, before it spends time or disk space."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lm_human_preferences import lm_tasks
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.language.adapters import shared
from lm_human_preferences.language.encodings import Encoder
from lm_human_preferences.language.network import Network
from lm_human_preferences.machine import process
from lm_human_preferences.plan.phases import Plan, Settings
from lm_human_preferences.training import precision
from lm_human_preferences.training.model_sizes import Sizes
from lm_human_preferences.utils.core import default_device
from lm_human_preferences.utils.logging import announce


def check_settings(settings: Settings, ranks: int) -> None:
    """Raise UserError for settings that do not suit each other, the machine or the ranks."""
    settings.check_ranks(ranks)
    for name in _precisions(settings):
        precision.check_available(name, default_device())


def check_start(plan: Plan, comm: Comm) -> None:
    """Warn if networks may not fit in memory; UserError if the initial model cannot be used."""
    initial_model = lm_tasks.initial_model(plan.settings.task.policy.initial_model)
    sizes = sizes_of(plan, initial_model.sizes(), initial_model.create)
    lm_tasks.check_task(plan.settings.task, initial_model.encoding, sizes)
    free = min(comm.all_gather_object(process.free_bytes(comm.local_size)))
    if comm.rank == 0:
        line = plan.memory_line(sizes, comm.size, free)
        if line.startswith('WARNING'):
            announce(line)
        initial_model.check_runs()


def sizes_of(plan: Plan, sizes: Sizes, create: Callable[[Iterable[str]], Network]) -> Sizes:
    """Return the initial model's `sizes`, with the number of parameters that adapters learn."""
    return shared.with_learned(sizes, create, plan.trainings[-1].adapters)


def check_queries(plan: Plan, encoder: Encoder, *, with_test: bool = False) -> list[str]:
    """Return notes on the ends of responses and on the queries; UserError if these are unusable.

    with_test: also return notes on the evaluation's queries, which a training does not check.
    """
    notes = lm_tasks.end_notes(plan.settings.task, encoder)
    notes += lm_tasks.query_notes(plan.settings.task, encoder, 'train')
    if plan.policy is not None and plan.policy.run.is_evaluated:
        of_test = lm_tasks.query_notes(plan.settings.task, encoder, 'test')
        notes += of_test if with_test else []
    return notes


def notes(settings: Settings) -> list[str]:
    """Return a note for the user on a KL coefficient of 0."""
    rewards = settings.policy and settings.policy.rewards
    if rewards and rewards.adaptive_kl and not rewards.kl_coef:
        kl_coef = rewards.setting('kl_coef')
        return [f'note: {kl_coef} stays 0 however it adapts: the KL costs nothing']
    return []


def _precisions(settings: Settings) -> list[str]:
    """Return the precision of a training, and that of its new reward model."""
    found = [settings.run.precision]
    if settings.new_reward_model is not None:
        found.append(settings.new_reward_model.run.precision)
    return found
