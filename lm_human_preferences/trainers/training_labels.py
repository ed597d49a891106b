"""Labels to train reward models on: load or sample them, split them, describe them."""

from typing import Any, NamedTuple

import torch

from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import OptionError
from lm_human_preferences.labels import label_files, simulated
from lm_human_preferences.labels.held_out import Labels, split
from lm_human_preferences.plan.phases import TrainReward
from lm_human_preferences.policy import Policy
from lm_human_preferences.runs import run_record


class TrainingLabels(NamedTuple):
    """Labels {field: (labels, ...)}, notes for the user, and facts `about` for run.json."""

    learned: Labels
    held_out: Labels | None
    notes: list[str]
    about: dict[str, Any]


def read(phase: TrainReward, policy: Policy, comm: Comm) -> TrainingLabels:
    """Load the labels or sample them from `policy`, and hold some out.

    A resumed training learns from the labels with which it began; UserError if they have changed.
    """
    settings, labels = phase.settings, phase.settings.labels
    directory, before = settings.run.directory, {}
    if phase.run.resume and directory is not None:
        command = phase.command.command
        before = comm.on_rank_0(lambda: run_record.training(directory, command)['labels'])
    if labels.are_sampled:
        loaded = label_files.made_up(simulated.simulated_labels(settings, policy, comm))
    else:
        lines = before.get('answers')  # a resumed run reads no answers that were added later
        encoding = policy.trained_model.encoding
        loaded = label_files.load_labels(settings, encoding, comm, lines)
    learned, held_out, notes = split(loaded.tensors, settings, policy.encoder)
    about = {
        'source': labels.source,
        **loaded.about,
        **counts(learned, held_out),
        'digest': loaded.digest,
    }
    # Labels that are sampled again may differ in their last digits, and so in their digest.
    is_sampled = labels.are_sampled and before.get('source') == labels.source
    if before and not is_sampled and about['digest'] != before.get('digest'):
        raise OptionError(
            labels.option_name('source'),
            f'{labels.source}: these are not the labels with which the run began'
            f' ({before.get("found")} of {before.get("source")}): restore them, or begin again with'
            ' --overwrite',
        )
    return TrainingLabels(learned, held_out, [*loaded.notes, *notes], about)


def counts(learned: Labels, held_out: Labels | None) -> dict[str, int]:
    """Return {name: count} for labels learned from, held-out labels, and their queries."""
    queries = learned['query']
    found = {'learned_from': len(queries), 'held_out': 0, 'held_out_queries': 0}
    if held_out is not None:
        queries = torch.cat([queries, held_out['query']])
        found['held_out'] = len(held_out['query'])
        found['held_out_queries'] = len(held_out['query'].unique(dim=0))
    return {**found, 'queries': len(queries.unique(dim=0))}
