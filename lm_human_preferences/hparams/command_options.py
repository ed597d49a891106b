"""Options of `sample.py sample` and of `./launch.py export`, `evaluate` and `report`."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from lm_human_preferences.hparams.reward_options import CONSOLES, MOST_AT_A_TIME, PRECISIONS
from lm_human_preferences.hparams.task_options import TaskHParams
from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.hyperparams import TEXTS, option, own_option

# Ends of the help texts of several options
JUDGE = 'mock, the directory of a reward model or a classifier, ORG/NAME, or FILE.py:FUNCTION'
BEST_OF = 'the best of this many, by the reward of the run or --judge'


@dataclass
class RankHParams(hyperparams.HParams):
    """Number of ranks of a job, and where they run."""

    mpi: int | None = option(
        None, 'ranks to start; None: one for each visible GPU, or 1', at_least=1
    )
    mode: str = option('local', help=None, one_of=('local',))  # as in the original


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

    def problems(self) -> Iterator[tuple[object, str]]:
        """Check that there is one model."""
        is_run, is_model = self.save_dir is not None, self.model is not None
        yield (
            is_run == is_model or is_model != (self.task is not None),
            'give {save_dir}, the directory of a run of train_policy such as'
            ' /tmp/save/train_policy/NAME, or else {model}, perhaps with options {task.NAME}',
        )


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
