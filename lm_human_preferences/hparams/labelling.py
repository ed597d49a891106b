"""Options of `./launch.py ask`, `label` and `labels`."""

from dataclasses import dataclass

from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.hyperparams import option


@dataclass
class AskHParams(hyperparams.HParams):
    count: int = option(64, 'questions to add to those in FOLDER', at_least=1)
    repeated: float = option(
        0.0, 'share of the questions that several labellers answer', at_least=0, at_most=1
    )
    labellers: int = option(5, 'how many labellers answer such a question', at_least=2)
    policy: str = option(
        'initial',
        "whose samples are judged: the directory of a run of train_policy, or 'initial', the model"
        ' that the experiment begins with',
    )
    against: str | None = option(
        None,
        'a second policy, given in the same way: half of the samples of each question are from it,'
        ' and labellers cannot tell which; these answers are not used for training',
    )
    instructions: str | None = option(
        None,
        'text file with instructions for the labellers; None: one sentence on which keys to press',
    )
    batch_size: int = option(64, 'queries to sample responses for at a time', at_least=1)
    seed: int = option(1, 'seed of the sampling')


@dataclass
class SimulateHParams(hyperparams.HParams):
    error: float = option(
        0.0, 'probability of a random answer instead of the best', at_least=0, at_most=1
    )
    position_bias: float = option(
        0.0,
        'probability of choosing the first sample shown, if the answer is not random',
        at_least=0,
        at_most=1,
    )
    answers: int | None = option(
        None, 'stop after this many answers; None: when no questions are left', at_least=1
    )
    seed: int = option(0, 'seed of the errors')


@dataclass
class LabelHParams(hyperparams.HParams):
    labeller: str = option(None, 'your name: letters, digits, _ and -')
    simulate: SimulateHParams | None = option(
        None, 'have the known reward of the film reviews answer, instead of a person'
    )

    def validate(self, *, prefix: str = '') -> None:
        """Also ValueError without a name."""
        if self.labeller is None:
            raise ValueError(
                f'--{prefix}labeller NAME is missing: your answers are saved under this name'
            )
        super().validate(prefix=prefix)


@dataclass
class ReportHParams(hyperparams.HParams):
    export: str | None = option(
        None, 'write the labels used for training to this file, as a JSON label file'
    )
    output: str | None = option(None, 'write the report to this file, as JSON')
    without: str | None = option(
        None, 'leave out the answers of this labeller, or of several: NAME,NAME'
    )
