"""Options of `./launch.py export`, `evaluate` and `report`."""

from dataclasses import dataclass, field

from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.hyperparams import option, own_option

MOST_SAMPLES = 1024  # default limit of the samples
# Ends of help texts
JUDGE = 'mock, the directory of a reward model or a classifier, ORG/NAME, or FILE.py:FUNCTION'
BEST_OF = 'the best of this many, by the reward of the run or --judge'


@dataclass
class ExportHParams(hyperparams.HParams):
    form: str = option(
        'model',
        'model: all weights, as transformers loads them; adapter: only the adapters of a run with'
        ' --task.policy.lora, as PEFT loads them',
        one_of=('model', 'adapter'),
    )


@dataclass
class RewardOfRunHParams(hyperparams.HParams):
    function: str | None = option(
        None,
        'function of your own that the run learned from, FILE.py:FUNCTION; it runs only if you name'
        ' it here',
        path=True,
    )


@dataclass
class EvaluationHParams(hyperparams.HParams):
    rewards: RewardOfRunHParams = field(default_factory=RewardOfRunHParams)
    queries: int | None = option(
        None,
        'queries from the test part; None: all of them for reviews, else 64, or as many as fit into'
        ' ten minutes',
        at_least=2,
    )
    samples: int | None = option(
        None,
        'responses sampled from each model per query, if there are too many to enumerate; None: as'
        f' many as fit into ten minutes, {MOST_SAMPLES} at most',
        at_least=64,
    )
    batch_size: int = option(128, 'responses sampled at a time', at_least=1)
    seed: int = option(1, 'seed of the sampling and, for reviews, of the choice of --queries')
    kl_coef: float | None = option(
        None, 'KL coefficient of the optimum to compare with; None: the last of the run', above=0
    )
    judge: str | None = option(
        None,
        f'also measure the policy by another reward than that of the run: {JUDGE}',
        path=True,
    )
    output_dir: str | None = option(
        None,
        'folder for evaluation.json and evaluation.png, whose names also hold the settings above'
        ' that are not the defaults; None: SAVE_DIR, or the current folder if SAVE_DIR is remote',
        path=True,
    )


@dataclass
class ReportHParams(hyperparams.HParams):
    output: str | None = option(
        None,
        'write the page to this file; None: report.html in RUN, or here if RUN is remote or there'
        ' are several',
        path=True,
    )
    names: bool = own_option(True, 'name the labellers')
