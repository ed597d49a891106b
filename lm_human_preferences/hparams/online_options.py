"""Options for collecting labels while a policy trains, and the schedule computed from them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from lm_human_preferences.hparams.command_options import WebHParams
from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.hyperparams import option, own_option
from lm_human_preferences.utils.option_checks import ceil_div

PEOPLE = 'people'
SOURCES = (PEOPLE, 'mock', 'test')


@dataclass(frozen=True)
class Schedule:
    """Schedule of labels and retrainings of an online run (paper, section 2.3).

    Step n of `steps`, from 0, begins when there are l(n) = initial + (labels - initial) * (1 - (1 -
    n / steps)^2) labels. The reward model is trained before the first step, and again `retrainings`
    times at evenly spaced l(n). ahead: questions asked beyond l(n), so that people need not wait.
    Integer arithmetic makes the schedule the same on every machine.
    """

    initial: int
    labels: int
    retrainings: int
    steps: int
    ahead: int = 0

    def _progress(self, step: int) -> int:
        """Return the fraction of all later labels that are due by `step`, times steps^2: an int."""
        return self.steps**2 - (self.steps - step) ** 2

    def labels_at(self, step: int) -> int:
        """Return l(`step`), rounded up: the number of labels needed before `step` begins."""
        more = (self.labels - self.initial) * self._progress(step)
        return self.initial + ceil_div(more, self.steps**2)

    def questions_at(self, step: int) -> int:
        """Return the number of training questions to ask before `step`, in whole batches."""
        wanted = self.labels_at(step) + self.ahead
        batch = OnlineHParams.asked_at_once
        return min(self.labels, ceil_div(wanted, batch) * batch)

    def models_at(self, step: int) -> int:
        """Return the number of trainings of the reward model due by `step`; 1 at step 0."""
        done = self._progress(step) * (self.retrainings + 1) // self.steps**2
        return 1 + min(done, self.retrainings)

    def is_trained_at(self, step: int) -> bool:
        return step == 0 or self.models_at(step) > self.models_at(step - 1)

    def training_steps(self) -> list[int]:
        """Return the steps that begin with a training of the reward model, such as step 0."""
        return [step for step in range(self.steps) if self.is_trained_at(step)]


@dataclass
class ServeHParams(WebHParams):
    labellers: str = option('me', 'who answers: NAME,NAME, each of whom gets a link')


@dataclass
class OnlineHParams(hyperparams.HParams):
    asked_at_once: ClassVar[int] = 16  # number of questions sampled together, to delay fewer steps

    labels: int = option(None, 'labels collected by the end', at_least=1)
    initial: int | None = option(
        None, 'labels before the first episode; None: a quarter', at_least=1
    )
    retrainings: int = option(
        19,
        'retrainings of the reward model, at evenly spaced numbers of labels',
        at_least=0,
        at_most=1000,
    )
    source: str = option(
        PEOPLE,
        "who answers: 'people', 'mock' (the known reward of reviews) or 'test'",
        one_of=SOURCES,
    )
    error: float = option(
        0.0,
        'probability of a random answer instead of the best, if not by people',
        at_least=0,
        at_most=1,
    )
    instructions: str | None = option(
        None, 'text file with instructions for the labellers; None: two sentences', path=True
    )
    ties: bool = own_option(False, 'let people prefer none of the samples')
    patience: float | None = option(
        None, 'hours to wait for labels before a run is saved and ends; None: no limit', at_least=0
    )

    @property
    def ahead(self) -> int:
        """Number of questions asked in advance: one for every 50 labels."""
        return ceil_div(self.labels, 50)

    @property
    def asks_people(self) -> bool:
        """True if people answer, not a simulated labeller."""
        return self.source == PEOPLE

    def problems(self) -> Iterator[tuple[object, str]]:
        """Check that `initial` is at most `labels`, and that `error` is 0 if people answer."""
        yield (
            self.initial is not None and self.initial > self.labels,
            '{initial=} is more than {labels=}',
        )
        yield self.error and self.asks_people, '{error=} is for another {source} than people'

    def schedule(self, steps: int) -> Schedule:
        """Return the schedule for a policy that trains for `steps` steps."""
        initial = self.initial
        if initial is None:
            initial = ceil_div(self.labels, 4)
        return Schedule(
            initial=initial,
            labels=self.labels,
            retrainings=self.retrainings,
            steps=steps,
            ahead=self.ahead,
        )
