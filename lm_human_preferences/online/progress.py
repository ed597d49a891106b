"""What people see of an online run: lines on the console, and numbers in TensorBoard."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lm_human_preferences import shell
from lm_human_preferences.hparams.online_options import Schedule
from lm_human_preferences.labels.held_out import Prediction
from lm_human_preferences.online.collected_answers import Wins
from lm_human_preferences.online.decisions import Batch

TAG = 'online/'  # of the names in TensorBoard


@dataclasses.dataclass(frozen=True)
class Report:
    """What is known when a reward model has been trained.

    loss, held_out: see retraining.Outcome. previous: how the previous model predicts the labels
    that came since its training, most of them about the policy's own samples. wins: of the policy
    in the comparisons since then. kl_coef: the coefficient of the KL penalty at that moment, before
    the controller has seen what the new reward model does to the policy.
    """

    batch: Batch
    loss: float
    held_out: Prediction | None
    previous: Prediction | None
    wins: Wins
    kl_coef: float

    def statistics(self) -> dict[str, float]:
        """All of it as numbers, by their names in TensorBoard, without TAG."""
        numbers: dict[str, float | None] = {
            'model': self.batch.model,
            'wanted': self.batch.wanted,
            'labels': self.batch.labels,
            'loss': self.loss,
            'held_out_accuracy': _accuracy(self.held_out),
            'held_out_effective_labels': self.held_out and self.held_out.effective,
            'own_accuracy': _accuracy(self.previous),
            'policy_wins': self.wins.rate,
            'comparisons': self.wins.comparisons,
            'kl_coef_before': self.kl_coef,
        }
        return {name: value for name, value in numbers.items() if value is not None}

    def line(self, schedule: Schedule) -> str:
        """The same for the console, and when the next training is."""
        batch = self.batch
        parts = [f'{batch.labels} labels ({batch.wanted} wanted)', f'loss {self.loss:.3f}']
        if self.held_out is not None:
            parts.append(f'held out: {_short(self.held_out)}')
        if self.previous is not None:
            labels, prediction = self.previous.labels, _short(self.previous)
            parts.append(f'the previous model on the {labels} new ones: {prediction}')
        if self.wins.rate is not None:
            parts.append(
                f'the policy beats the initial model in {self.wins.wins} of {self.wins.comparisons}'
                f' (95 % interval {100 * self.wins.low:.0f} to {100 * self.wins.high:.0f} %)'
            )
        parts.append(f'KL coef {self.kl_coef:.4g}')
        later = schedule.next_training(batch.step)
        parts.append(
            'the last one'
            if later is None
            else f'next before step {later + 1}, from {schedule.labels_at(later)} labels'
        )
        return (
            f'reward model {batch.model} of {schedule.retrainings + 1}, before step'
            f' {batch.step + 1}: {"; ".join(parts)}'
        )


def _accuracy(prediction: Prediction | None) -> float | None:
    return None if prediction is None else prediction.accuracy


def _short(prediction: Prediction) -> str:
    low, high = prediction.interval()
    if prediction.accuracy is None:
        return f'correlation {prediction.agreement:.2f} (95 % interval {low:.2f} to {high:.2f})'
    right = 100 * prediction.accuracy
    return f'{right:.0f} % right (95 % interval {100 * low:.0f} to {100 * high:.0f} %)'


def waiting_line(missing: int, wanted: int, active: Sequence[str], folder: str) -> str:
    """A line that says how many labels the run waits for, and who is labelling."""
    who = ', '.join(active) if active else 'nobody'
    return (
        f'waiting for {missing} of {wanted} labels; active: {who}; to answer:'
        f' {label_command(folder)}'
    )


def label_command(folder: str) -> str:
    """The command with which people answer."""
    return shell.typed('./launch.py label', folder, '--labeller', 'NAME')
