"""Options of `./launch.py export`, `evaluate` and `report`."""

from dataclasses import dataclass, field

from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.hyperparams import option, own_option

# Ends of the help texts of several options
JUDGE = 'mock, the directory of a reward model or a classifier, ORG/NAME, or FILE.py:FUNCTION'
BEST_OF = 'the best of this many, by the reward of the run or --judge'


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
class EvaluationHParams(hyperparams.HParams):
    rewards: RewardOfRunHParams = field(default_factory=RewardOfRunHParams)
    queries: int | None = option(None, 'test queries; None: all of reviews, else 64', at_least=2)
    samples: int = option(
        128,
        'responses sampled from each model per query, if there are too many to enumerate',
        at_least=64,
    )
    batch_size: int = option(128, 'responses sampled at a time', at_least=1)
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
