"""Labels that reward models are trained on: loaded once, split, and recorded in the run."""

from collections.abc import Mapping
from typing import Any

import torch

from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import OptionError
from lm_human_preferences.labels import label_files, simulated
from lm_human_preferences.labels.folder import are_line_counts
from lm_human_preferences.labels.held_out import Labels, split
from lm_human_preferences.language.encodings import Encoding
from lm_human_preferences.plan.phases import TrainReward
from lm_human_preferences.policy import Policy
from lm_human_preferences.runs import run_record


class TrainingLabels:
    """Labels that `phase` and the run's later reward models learn from, loaded once."""

    def __init__(self, phase: TrainReward, comm: Comm) -> None:
        self.phase = phase
        self.settings = phase.settings
        self.comm = comm
        self.learned: dict[str, torch.Tensor] = {}  # {field: (num_train, ...)}
        self.held_out: dict[str, torch.Tensor] | None = None
        self.notes: list[str] = []  # lines for the user
        self.are_recorded = False  # whether this process has recorded the labels
        self._loaded: label_files.LoadedLabels | None = None
        self._recorded: Mapping[str, Any] = {}  # record of an earlier process, then of this one
        directory, command = self.settings.run.directory, phase.command.command
        if phase.run.resume and directory is not None:
            self._recorded = comm.on_rank_0(
                lambda: run_record.training(directory, command)['labels']
            )
        # A resumed training reads only the answers that were in the folder when it began.
        lines = self._recorded.get('answers')
        self._lines = lines if are_line_counts(lines) else None  # {labeller: lines}; None: all

    def load(self, encoding: Encoding) -> None:
        """Load and check the labels, unless `split` makes them from samples of a policy."""
        if self._loaded is None and not self.settings.labels.are_sampled:
            self._loaded = label_files.load_labels(self.settings, encoding, self.comm, self._lines)

    def split(self, policy: Policy) -> None:
        """Hold some labels out; make the labels from samples of `policy` if none are loaded."""
        if self.learned:
            return
        if self._loaded is None:
            labels = simulated.simulated_labels(self.settings, policy, self.comm)
            self._loaded = label_files.made_up(labels)
        tensors = self._loaded.tensors
        self.learned, self.held_out, notes = split(tensors, self.settings, policy.encoder)
        self.notes = [*self._loaded.notes, *notes]

    def record(self, is_begun: bool) -> None:
        """Record the labels; UserError if the resumed training began with different labels."""
        assert self._loaded is not None, 'see split'
        labels, loaded = self.settings.labels, self._loaded
        now = {
            'source': labels.source,
            **loaded.about,
            **counts(self.learned, self.held_out),
            'digest': loaded.digest,
        }
        before = self._recorded
        self._recorded, self.are_recorded = now, True
        # Sampling the labels again may change their last digits, and so their digest.
        is_sampled = labels.are_sampled and before.get('source') == labels.source
        if is_begun and before and not is_sampled and now['digest'] != before.get('digest'):
            raise OptionError(
                labels.option_name('source'),
                f'{labels.source}: these are not the labels that the run was begun with,'
                f' {before.get("found")} of {before.get("source")}: restore them, or begin again'
                ' with --overwrite',
            )
        directory = self.settings.run.directory
        if self.comm.rank == 0 and directory is not None:
            run_record.write_labels(directory, self.phase.command.command, now)


def counts(learned: Labels, held_out: Labels | None) -> dict[str, int]:
    """Return {name: number} of labels learned from, of labels held out, and of their queries."""
    queries = learned['query']
    found = {'learned_from': len(queries), 'held_out': 0, 'held_out_queries': 0}
    if held_out is not None:
        queries = torch.cat([queries, held_out['query']])
        found['held_out'] = len(held_out['query'])
        found['held_out_queries'] = len(held_out['query'].unique(dim=0))
    return {**found, 'queries': len(queries.unique(dim=0))}
