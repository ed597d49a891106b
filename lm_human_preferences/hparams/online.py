"""Options of labels that are collected while a policy trains, and the schedule that they set."""

from dataclasses import dataclass

from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.hyperparams import option

SOURCES = ('people', 'mock')
ASKED_AT_ONCE = 16  # training questions, so that few steps are held up by sampling them
INITIAL_SHARE, AHEAD_SHARE = 4, 50  # labels are divided by these where the options do not say


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Schedule:
    """When an online run wants labels and trains its reward model anew (paper, section 2.3).

    Before `step` of `steps`, from 0, it needs l(n) = initial + (labels - initial) * (1 - (1 -
    step / steps)^2) labels. The reward model is trained before the first step, and again
    `retrainings` times at evenly spaced l(n). ahead: questions asked beyond l(n). validation:
    comparisons of the policy with the initial model, at a constant rate. All in integers: a step
    is the same on every machine.
    """

    initial: int
    labels: int
    retrainings: int
    steps: int
    ahead: int = 0
    validation: int = 0

    def _progress(self, step: int) -> int:
        """1 - (1 - step / steps)^2, times steps^2."""
        return self.steps**2 - (self.steps - step) ** 2

    def labels_at(self, step: int) -> int:
        """l(n): how many labels there have to be before `step`, rounded up."""
        more = (self.labels - self.initial) * self._progress(step)
        return self.initial + _ceil_div(more, self.steps**2)

    def questions_at(self, step: int) -> int:
        """How many training questions are asked by `step`: l(n), those ahead, and what fills a
        batch of questions."""
        wanted = self.labels_at(step) + self.ahead
        return min(self.labels, _ceil_div(wanted, ASKED_AT_ONCE) * ASKED_AT_ONCE)

    def validation_at(self, step: int) -> int:
        """How many comparisons with the initial model are asked by `step`."""
        return self.validation * step // self.steps

    def models_at(self, step: int) -> int:
        """How many times the reward model has been trained when `step` begins: 1 at the first."""
        done = self._progress(step) * (self.retrainings + 1) // self.steps**2
        return 1 + min(done, self.retrainings)

    def is_trained_at(self, step: int) -> bool:
        """Whether the reward model is trained before `step`."""
        return step == 0 or self.models_at(step) > self.models_at(step - 1)

    def training_steps(self) -> list[int]:
        """The steps before which the reward model is trained, the first of which is 0."""
        return [step for step in range(self.steps) if self.is_trained_at(step)]

    def next_training(self, step: int) -> int | None:
        """The first step after `step` before which the reward model is trained; None for none."""
        later = range(step + 1, self.steps)
        return next((other for other in later if self.is_trained_at(other)), None)
