"""Progress of an online run: lines on the console, and numbers in TensorBoard."""

from __future__ import annotations

import dataclasses
import os

from lm_human_preferences import shell
from lm_human_preferences.labels.held_out import Prediction
from lm_human_preferences.online.decisions import Batch

TAG = 'online/'  # prefix of the names in TensorBoard


@dataclasses.dataclass(frozen=True)
class Report:
    """Outcome of training one reward model; loss, held_out: see retraining.Outcome."""

    batch: Batch
    loss: float
    held_out: Prediction | None
    previous: Prediction | None  # the previous model's accuracy on labels given since its training

    def statistics(self) -> dict[str, float]:
        """Return {name in TensorBoard, without TAG: number}."""
        batch = self.batch
        numbers = {'model': batch.model, 'wanted': batch.wanted, 'labels': batch.labels}
        found: dict[str, float] = {**numbers, 'loss': self.loss}
        if self.held_out is not None:
            way = 'cross_validated' if self.held_out.is_cross_validated else 'held_out'
            measured = self.held_out.statistics()
            for name in ('accuracy', 'effective_labels'):
                if name in measured:
                    found[f'{way}_{name}'] = measured[name]
        if self.previous is not None and self.previous.accuracy is not None:
            found['own_accuracy'] = self.previous.accuracy
        return found

    def line(self, models: int) -> str:
        """Return the line for the console. models: number of reward models that the run trains."""
        batch = self.batch
        parts = [f'{batch.labels} labels ({batch.wanted} wanted)', f'loss {self.loss:.3f}']
        if self.held_out is not None:
            way = 'cross-validated' if self.held_out.is_cross_validated else 'held out'
            parts.append(f'{way}: {self.held_out}')
        if self.previous is not None:
            parts.append(f'the previous model on the new ones: {self.previous}')
        when = f'reward model {batch.model} of {models}, before step {batch.step + 1}'
        return f'{when}: {"; ".join(parts)}'


def label_command(folder: str) -> str:
    """Return the command with which people answer the questions in `folder`."""
    return shell.typed('./launch.py label', os.path.abspath(folder), '--labeller', 'NAME')
