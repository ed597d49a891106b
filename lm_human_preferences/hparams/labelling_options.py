"""Options of the commands about labels: ask, import_labels, label, labels and score."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from lm_human_preferences.hparams.command_options import BEST_OF, JUDGE, RewardOfRunHParams
from lm_human_preferences.hparams.reward_options import MOST_AT_A_TIME, TOO_LONG
from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.hyperparams import option, own_option

# Groups: scheme, host, port and path
PUBLIC_URL = re.compile(r'(https?)://([\w.-]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?(/[^?#\s]*)?', re.ASCII)


@dataclass
class AskHParams(hyperparams.HParams):
    count: int = option(64, 'questions to add to those in FOLDER', at_least=1)
    repeated: float = option(
        0.0, 'fraction of the questions that several labellers answer', at_least=0, at_most=1
    )
    labellers: int = option(5, 'labellers who answer each repeated question', at_least=2)
    policy: str = option(
        'initial',
        "source of the samples: a run of train_policy, or 'initial', the initial model",
        path=True,
    )
    against: str | None = option(
        None, 'second policy, for half of the samples; no training reads these answers', path=True
    )
    best_of: int = option(
        1, f'each sample of the policy is {BEST_OF}', at_least=1, at_most=MOST_AT_A_TIME
    )
    judge: str | None = option(None, f'choose by another reward: {JUDGE}', path=True)
    rewards: RewardOfRunHParams = field(default_factory=RewardOfRunHParams)
    instructions: str | None = option(
        None, 'text file with instructions for the labellers; None: two sentences', path=True
    )
    batch_size: int = option(
        64, 'queries to sample responses for at a time', at_least=1, at_most=MOST_AT_A_TIME
    )
    seed: int = option(1, 'seed of the sampling')
    questions: str | None = option(
        None, 'ask what is in this file of texts, one record a line, instead of sampling', path=True
    )
    gold: str | None = option(
        None,
        'like --questions, with known answers: they show how often each labeller is right',
        path=True,
    )
    ties: bool = own_option(False, 'in a new folder, labellers may prefer none of the samples')

    def problems(self) -> Iterator[tuple[object, str]]:
        """Check that questions have one source."""
        sources = ('questions', 'gold', 'against')
        given = [f'{{{name}}}' for name in sources if getattr(self, name)]
        both = ' and '.join(given[:2])
        yield len(given) > 1, f'{both} ask different questions: give one of them'
        samples = self.policy != 'initial' or self.best_of > 1
        texts = self.questions or self.gold
        yield samples and texts, f'{both} needs no samples: leave out {{policy}} and {{best_of}}'
        chooses = self.judge or self.rewards.function
        yield chooses and self.best_of == 1, '{judge} and {rewards.function} need {best_of} N'
        yield self.gold and self.repeated, 'everybody is asked {gold}: leave out {repeated=}'


@dataclass
class ScoreHParams(hyperparams.HParams):
    too_long: str = option(
        'refuse', 'texts that are too long: refuse, cut, or skip (scores are null)', one_of=TOO_LONG
    )


@dataclass
class ImportHParams(hyperparams.HParams):
    labeller: str = option(
        'imported', 'in a folder, labeller of nameless answers; imported: unknown people'
    )
    ties: bool = own_option(False, 'in a new folder, answers may prefer none of the samples')


@dataclass
class SimulateHParams(hyperparams.HParams):
    reward: str = option(
        'mock',
        'mock (known reward of reviews), a reward model, classifier, or FILE.py:FUNCTION',
        path=True,
    )
    error: float = option(
        0.0, 'probability of a random answer instead of the best', at_least=0, at_most=1
    )
    seed: int = option(0, 'seed of the errors')


@dataclass
class WebHParams(hyperparams.HParams):
    port: int = option(8000, 'port of the page; 0: any that is free', at_least=0, at_most=65535)
    host: str = option('127.0.0.1', 'address to listen on; the default is for this machine alone')
    public_url: str | None = own_option(
        None, 'address at which browsers reach the page, such as https://HOST/PATH/'
    )

    def problems(self) -> Iterator[tuple[object, str]]:
        """Check the addresses."""
        yield self.host == 'localhost', '{host=} has two addresses: give 127.0.0.1'
        yield (
            self.public_url is not None and not PUBLIC_URL.fullmatch(self.public_url),
            '{public_url=} must be http:// or https://, a host, and perhaps a port and a path',
        )


@dataclass
class LabelHParams(hyperparams.HParams):
    labeller: str = option(None, 'your name: letters, digits, _ and -; with --web also NAME,NAME')
    web: WebHParams | None = option(None, 'serve a page, with a link for each labeller')
    simulate: SimulateHParams | None = option(None, 'have a reward answer instead of a person')

    def problems(self) -> Iterator[tuple[object, str]]:
        """Check that there is only one way to answer."""
        yield self.web and self.simulate, 'give either {web} or {simulate}'


@dataclass
class ReportHParams(hyperparams.HParams):
    export: str | None = option(
        None,
        'write the labels for training to this file, as JSON, or as JSON lines if it is a .jsonl',
        path=True,
    )
    export_as: str = option(
        'tokens',
        'tokens (as the original), text, or preferences (prompt, chosen and rejected)',
        one_of=('tokens', 'text', 'preferences'),
    )
    output: str | None = option(None, 'write the report to this file, as JSON', path=True)
    without: str | None = option(None, 'leave out the answers of these labellers: NAME,NAME')
    reward: str | None = option(
        None,
        'also show how well this reward (of a run, or another) predicts the answers',
        path=True,
    )

    def problems(self) -> Iterator[tuple[object, str]]:
        """Check that `export_as` comes with a file to export to, which is not a table."""
        yield self.export_as != 'tokens' and self.export is None, '{export_as=}: give {export} FILE'
        is_table = self.export is not None and self.export.lower().endswith(('.csv', '.tsv'))
        yield is_table, '{export=}: give a name that ends in .json or .jsonl'
