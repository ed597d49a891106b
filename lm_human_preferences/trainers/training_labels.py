"""Labels of a training of reward models: loaded once, split, and recorded."""

from collections.abc import Mapping
from typing import Any

import torch

from lm_human_preferences import storage
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import about_option
from lm_human_preferences.labels import label_files, simulated
from lm_human_preferences.labels.folder import are_line_counts
from lm_human_preferences.language.encodings import Encoding
from lm_human_preferences.plan.phases import TrainReward
from lm_human_preferences.policy import Policy
from lm_human_preferences.runs import label_record, run_files
from lm_human_preferences.utils.logging import announce


class TrainingLabels:
    """Labels that the reward models of `phase` and those after it learn from, loaded once."""

    def __init__(self, phase: TrainReward, comm: Comm) -> None:
        self.phase = phase
        self.settings = phase.settings
        self.comm = comm
        self.learned: dict[str, torch.Tensor] = {}  # {field: (num_train, ...)}
        self.held_out: dict[str, torch.Tensor] | None = None
        self.notes: list[str] = []  # for the user
        self.are_recorded = False  # by this process
        self._loaded: label_files.LoadedLabels | None = None
        self._recorded: Mapping[str, Any] | None = None  # by an earlier process, or this one
        self._lines: dict[str, int] | None = None  # of each labeller that count; None: all

    def go_on(self) -> None:
        """Take as many answers of a folder as a resumed training has begun with."""
        if self.are_recorded:
            return
        if self.phase.run.resume:
            self._recorded = label_record.read(self.phase.path(run_files.LEARNED), self.comm)
        lines = (self._recorded or {}).get('answers')
        self._lines = lines if are_line_counts(lines) else None

    def load(self, encoding: Encoding) -> None:
        """Load and check them, unless the initial policy is to be asked for responses."""
        if self._loaded is None and not self.settings.labels.are_sampled:
            self._loaded = label_files.load_labels(self.settings, encoding, self.comm, self._lines)

    def split(self, policy: Policy) -> None:
        """Hold some out. policy: the initial one, whose responses are judged if none are loaded."""
        if self.learned:
            return
        if self._loaded is None:
            labels = simulated.simulated_labels(self.settings, policy, self.comm)
            self._loaded = label_files.LoadedLabels(labels, [], {})
        tensors = self._loaded.tensors
        self.learned, self.held_out, notes = self.phase.split(tensors, policy.encoder)
        self.notes = [*self._loaded.notes, *notes]

    def record(self, is_begun: bool) -> None:
        """Record them; UserError if they are not those that the training began with."""
        assert self._loaded is not None, 'see split'
        labels, path = self.settings.labels, self.phase.path(run_files.LEARNED)
        record = label_record.record_of(labels.source, self._loaded.tensors, self._loaded.folder)
        before = self._recorded
        if labels.are_sampled and before is not None and before.get('source') == labels.source:
            before = None  # digits of labels that are sampled anew may differ
        with about_option(labels.option_name('source')):
            note = label_record.check_same(record, before, is_begun=is_begun)
        if self.comm.rank == 0 and note:
            announce(note)
        if self.comm.rank == 0 and path:
            storage.write_json(path, record)
        self._recorded, self.are_recorded = record, True
