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
    """Outcome of the training of a reward model; loss, held_out: see retraining.Outcome."""

    batch: Batch
    loss: float
    held_out: Prediction | None
    previous: Prediction | None  # accuracy of the previous model on the labels since its training
    kl_coef: float

    def statistics(self) -> dict[str, float]:
        """Return {name in TensorBoard, without TAG: number}."""
        found, way = {}, 'held_out'
        if self.held_out is not None:
            found = self.held_out.statistics()
            way = 'cross_validated' if self.held_out.is_cross_validated else way
        numbers: dict[str, float | None] = {
            'model': self.batch.model,
            'wanted': self.batch.wanted,
            'labels': self.batch.labels,
            'loss': self.loss,
            f'{way}_accuracy': found.get('accuracy'),
            f'{way}_effective_labels': found.get('effective_labels'),
            'own_accuracy': self.previous and self.previous.accuracy,
            'kl_coef_before': self.kl_coef,
        }
        return {name: value for name, value in numbers.items() if value is not None}

    def line(self, models: int, later: tuple[int, int] | None) -> str:
        """Return the line for the console.

        models: number of trainings of the run. later: step and labels of the next training; None
        after the last one.
        """
        batch = self.batch
        parts = [f'{batch.labels} labels ({batch.wanted} wanted)', f'loss {self.loss:.3f}']
        if self.held_out is not None:
            way = 'cross-validated' if self.held_out.is_cross_validated else 'held out'
            parts.append(f'{way}: {self.held_out}')
        if self.previous is not None:
            parts.append(f'the previous model on the new ones: {self.previous}')
        parts.append(f'KL coef {self.kl_coef:.4g}')
        if later is None:
            parts.append('the last one')
        else:
            parts.append(f'next before step {later[0] + 1}, from {later[1]} labels')
        when = f'reward model {batch.model} of {models}, before step {batch.step + 1}'
        return f'{when}: {"; ".join(parts)}'


def label_command(folder: str) -> str:
    """Return the command with which people answer."""
    return shell.typed('./launch.py label', os.path.abspath(folder), '--labeller', 'NAME')
