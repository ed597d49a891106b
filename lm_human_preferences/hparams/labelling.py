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
        'a second policy, named in the same way: half of the samples are its own, and nobody sees'
        ' which; such answers are not trained on',
    )
    instructions: str | None = option(
        None, 'text file of what labellers are told; None: a sentence about what keys to press'
    )
    batch_size: int = option(64, 'queries that are answered at a time', at_least=1)
    seed: int = option(1, 'seed of the sampling')


@dataclass
class SimulateHParams(hyperparams.HParams):
    error: float = option(
        0.0, 'probability of a random answer instead of the best', at_least=0, at_most=1
    )
    position_bias: float = option(
        0.0,
        'probability of taking what is shown first, where the answer is not random',
        at_least=0,
        at_most=1,
    )
    answers: int | None = option(
        None, 'leave after so many answers; None: stay until nothing is left', at_least=1
    )
    seed: int = option(0, 'seed of the errors')


@dataclass
class WebHParams(hyperparams.HParams):
    port: int = option(
        8000, 'port that the page is served at; 0: any that is free', at_least=0, at_most=65535
    )
    host: str = option(
        '127.0.0.1', 'address that the page is served at; the default is for this machine alone'
    )
    certificate: str | None = option(
        None, 'PEM file with the certificate of the host, which encrypts what is sent; needs key'
    )
    key: str | None = option(None, 'PEM file with the private key of the certificate')

    def validate(self, *, prefix: str = '') -> None:
        """Also ValueError for a certificate without its key, or a key without."""
        super().validate(prefix=prefix)
        if (self.certificate is None) != (self.key is None):
            given, missing = ('key', 'certificate') if self.key else ('certificate', 'key')
            raise ValueError(f'--{prefix}{given} needs --{prefix}{missing} FILE')


@dataclass
class LabelHParams(hyperparams.HParams):
    labeller: str = option(
        None, 'your name, of letters, digits, _ and -; with --web several: NAME,NAME'
    )
    web: WebHParams | None = option(
        None, 'serve a page for the browser instead, with a link for each labeller'
    )
    simulate: SimulateHParams | None = option(
        None, 'have the known reward of the film reviews answer, instead of a person'
    )

    def validate(self, *, prefix: str = '') -> None:
        """Also ValueError without a name, or for a page that nobody is to look at."""
        if self.labeller is None:
            raise ValueError(
                f'--{prefix}labeller NAME is missing: under which your answers are kept'
            )
        super().validate(prefix=prefix)
        if self.web is not None and self.simulate is not None:
            raise ValueError(
                f'--{prefix}simulate needs no page: give either --{prefix}web or --{prefix}simulate'
            )


@dataclass
class ReportHParams(hyperparams.HParams):
    export: str | None = option(
        None, 'write the labels that count for training to this file, in the JSON of label files'
    )
    output: str | None = option(None, 'write the report to this file, as JSON')
    without: str | None = option(
        None, 'leave out the answers of this labeller, or of several: NAME,NAME'
    )
