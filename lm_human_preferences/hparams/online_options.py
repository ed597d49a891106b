"""Options of labels that are collected while a policy trains, and the schedule that they set."""

from dataclasses import dataclass

from lm_human_preferences.hparams.labelling_options import WebHParams
from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.hyperparams import option
from lm_human_preferences.utils.integers import ceil_div

PEOPLE = 'people'
SOURCES = (PEOPLE, 'mock', 'test')
ASKED_AT_ONCE = 16  # training questions, so that few steps are held up by sampling them
INITIAL_SHARE, AHEAD_SHARE = 4, 50  # labels are divided by these where the options do not say


@dataclass(frozen=True)
class Schedule:
    """When an online run wants labels and retrains its reward model (paper, section 2.3).

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
        return self.initial + ceil_div(more, self.steps**2)

    def questions_at(self, step: int) -> int:
        """How many training questions have been asked before `step`: l(n) and those ahead, rounded
        up to whole batches of questions."""
        wanted = self.labels_at(step) + self.ahead
        return min(self.labels, ceil_div(wanted, ASKED_AT_ONCE) * ASKED_AT_ONCE)

    def validation_at(self, step: int) -> int:
        """How many comparisons with the initial model have been asked for before `step`."""
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


@dataclass
class ServeHParams(WebHParams):
    labellers: str = option(
        'me', 'who answers on the page: NAME, or NAME,NAME, each of whom gets a link'
    )


@dataclass
class OnlineHParams(hyperparams.HParams):
    labels: int = option(
        None, 'labels that the reward model has learned from by the end', at_least=1
    )
    initial: int | None = option(
        None, 'how many of these there are before the first episode; None: a quarter', at_least=1
    )
    retrainings: int = option(
        19,
        'how often the reward model is retrained after the first time, at evenly spaced numbers of'
        ' labels',
        at_least=0,
        at_most=1000,
    )
    ahead: int | None = option(
        None,
        'questions asked beyond the labels that are wanted, so that people need not wait; None: one'
        ' for every 50 labels',
        at_least=0,
    )
    repeated: float = option(
        0.0, 'share of the questions that several labellers answer', at_least=0, at_most=1
    )
    labellers: int = option(5, 'how many labellers answer such a question', at_least=2)
    validation: float = option(
        0.05,
        'how many comparisons of the policy with the initial model to ask for beside the labels, as'
        ' a share of their number',
        at_least=0,
        at_most=1,
    )
    source: str = option(
        PEOPLE,
        "who answers: 'people', by ./launch.py label; 'mock', the known reward of reviews; 'test',"
        ' who prefers small token ids',
        one_of=SOURCES,
    )
    error: float = option(
        0.0,
        'if source is not people: the probability of a random answer instead of the best',
        at_least=0,
        at_most=1,
    )
    instructions: str | None = option(
        None,
        'text file with instructions for the labellers; None: two sentences that say what to do',
    )
    ties: bool = option(
        False,
        'whether people may answer that they prefer none of the samples',
        ours=True,
    )
    patience: float | None = option(
        None,
        'hours to wait for labels before the run is saved and ends; None: as long as it takes',
        at_least=0,
    )

    def validate(self) -> None:
        """Also ValueError for more initial labels than there are in all, and errors of people."""
        super().validate()
        if self.initial is not None and self.initial > self.labels:
            initial, labels = self.option_name('initial'), self.option_name('labels')
            raise ValueError(f'{initial} {self.initial} is more than {labels} {self.labels}')
        if self.error and self.source == PEOPLE:
            error, source = self.option_name('error'), self.option_name('source')
            raise ValueError(
                f'{error} {self.error}: {source} is people, who make errors of their own: give'
                f' {source} mock, or no error'
            )

    def schedule(self, steps: int) -> Schedule:
        """The schedule for a policy that trains for so many steps."""
        initial, ahead = self.initial, self.ahead
        if initial is None:
            initial = ceil_div(self.labels, INITIAL_SHARE)
        if ahead is None:
            ahead = ceil_div(self.labels, AHEAD_SHARE)
        return Schedule(
            initial=initial,
            labels=self.labels,
            retrainings=self.retrainings,
            steps=steps,
            ahead=ahead,
            validation=round(self.validation * self.labels),
        )

    def check_schedule(self, steps: int) -> None:
        """Raise ValueError unless each retraining has a step of its own among `steps`."""
        found = len(self.schedule(steps).training_steps()) - 1
        if found < self.retrainings:
            retrainings = self.option_name('retrainings')
            raise ValueError(
                f'{retrainings} {self.retrainings}: two of them would be at one of the'
                f' {steps} steps of --ppo.total_episodes; take fewer'
            )
