"""Options of the commands that do not train."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from lm_human_preferences.hparams.reward_options import (
    CONSOLES,
    MOST_AT_A_TIME,
    PRECISIONS,
    TOO_LONG,
)
from lm_human_preferences.hparams.task_options import TaskHParams
from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.hyperparams import TEXTS, option, own_option

# Phrases with which several help texts end
JUDGE = 'mock, the directory of a reward model or a classifier, ORG/NAME, or FILE.py:FUNCTION'
BEST_OF = 'the best of this many, by the reward of the run or --judge'
# PUBLIC_URL has the groups scheme, host, port and path.
PUBLIC_URL = re.compile(r'(https?)://([\w.-]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?(/[^?#\s]*)?', re.ASCII)


@dataclass
class RankHParams(hyperparams.HParams):
    """Number of ranks of a job, and where they run."""

    mpi: int | None = option(
        None, 'ranks to start; None: one for each visible GPU, or 1', at_least=1
    )
    mode: str = option('local', help=None, one_of=('local',))  # an option of the original program


@dataclass
class ExportHParams(hyperparams.HParams):
    form: str = option(
        'model',
        'model: all weights, for transformers; adapter: the adapters of a run, for PEFT',
        one_of=('model', 'adapter'),
    )


@dataclass
class RewardOfRunHParams(hyperparams.HParams):
    function: str | None = option(
        None,
        "the run's own reward function, FILE.py:FUNCTION; it runs only if named here",
        path=True,
    )


@dataclass
class SampleHParams(RankHParams):
    save_dir: str | None = option(None, 'run directory of the policy, path or URL', path=True)
    savescope: str = option('policy', 'policy, or ref_policy for the initial model')
    model: str | None = own_option(
        None,
        'sample a model without a run: a directory, or a name as of --task.policy.initial_model',
        path=True,
    )
    prompt: TEXTS = own_option(
        (), "a query of your own, perhaps several times; default: the run's data set"
    )
    queries: str | None = own_option(
        None, 'queries of your own, path or URL of a .jsonl or .csv file', path=True
    )
    per_query: int = own_option(1, 'responses to each query', at_least=1)
    best_of: int = own_option(1, f'each response is {BEST_OF}', at_least=1, at_most=MOST_AT_A_TIME)
    judge: str | None = own_option(None, f'score by another reward: {JUDGE}', path=True)
    temperature: float | None = option(None, "divides the logits; None: the task's own", at_least=0)
    seed: int | None = option(None, 'seed of all random numbers; None: a different one each time')
    batch_size: int = option(4, 'samples at a time', at_least=1, at_most=MOST_AT_A_TIME)
    nsamples: int = option(
        0,
        'samples in all; 0: --per_query for each of your queries, else until interrupted',
        at_least=0,
    )
    output: str | None = own_option(
        None, 'new .jsonl file for the samples, with tokens, score and KL', path=True
    )
    rewards: RewardOfRunHParams = field(default_factory=RewardOfRunHParams)
    precision: str = option(
        'fp32', 'matrix products in fp32, tf32 (GPUs) or bf16', one_of=PRECISIONS
    )
    console: str = own_option(
        'summary', 'summary: samples alone; original: the settings, too', one_of=CONSOLES
    )
    task: TaskHParams | None = own_option(None, None)


@dataclass
class EvaluationHParams(hyperparams.HParams):
    rewards: RewardOfRunHParams = field(default_factory=RewardOfRunHParams)
    queries: int | None = option(None, 'test queries; None: all of reviews, else 64', at_least=2)
    samples: int = option(
        128,
        'responses sampled from each model per query, if there are too many to enumerate',
        at_least=64,
    )
    batch_size: int = option(128, 'responses sampled at a time', at_least=1, at_most=MOST_AT_A_TIME)
    seed: int = option(1, 'seed of the sampling and, for reviews, of the choice of --queries')
    kl_coef: float | None = option(
        None, "KL coefficient of the optimal policy; None: the run's last", above=0
    )
    judge: str | None = option(
        None,
        f'also measure the policy by another reward than that of the run: {JUDGE}',
        path=True,
    )
    output_dir: str | None = option(
        None,
        'folder for evaluation.json and evaluation.png; None: SAVE_DIR, or here if it is remote',
        path=True,
    )


@dataclass
class ReportHParams(hyperparams.HParams):
    output: str | None = option(
        None,
        'file of the page; None: report.html in RUN, or here if RUN is remote or several',
        path=True,
    )
    names: bool = own_option(True, 'name the labellers')


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
        """Check that at most one option says what to ask, and that the other options suit it."""
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
    labeller: str = option('imported', 'labeller of nameless answers; imported: unknown people')
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
        """Check `host` and `public_url`."""
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
        """Check that `web` and `simulate` are not used together."""
        yield self.web and self.simulate, 'give either {web} or {simulate}'


@dataclass
class LabelsHParams(hyperparams.HParams):
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
        """Check that --export_as comes with --export FILE, and that FILE is not a .csv or .tsv."""
        yield self.export_as != 'tokens' and self.export is None, '{export_as=}: give {export} FILE'
        is_table = self.export is not None and self.export.lower().endswith(('.csv', '.tsv'))
        yield is_table, '{export=}: give a name that ends in .json or .jsonl'
