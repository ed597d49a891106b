"""Options of `./launch.py evaluate`."""

from dataclasses import dataclass

from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.hyperparams import option


@dataclass
class HParams(hyperparams.HParams):
    queries: int | None = option(
        None,
        'queries from the test part; None: all of them for reviews, 64 for other data sets',
        at_least=2,
    )
    samples: int = option(
        1024,
        'responses sampled from each model per query, if there are too many to enumerate',
        at_least=64,
    )
    batch_size: int = option(128, 'responses sampled at a time', at_least=1)
    seed: int = option(1, 'seed of the sampling and, for reviews, of the choice of --queries')
    kl_coef: float | None = option(
        None, 'KL coefficient of the optimum to compare with; None: the last of the run'
    )
    judge: str | None = option(
        None,
        'also measure the policy by another reward than that of the run: mock, the directory of a'
        ' reward model or a classifier, ORG/NAME, or FILE.py:FUNCTION',
    )
    output_dir: str | None = option(
        None,
        'folder for evaluation.json and evaluation.png, whose names also tell the settings above'
        ' that are not the defaults; None: SAVE_DIR, or the current folder if SAVE_DIR is remote',
    )

    def validate(self) -> None:
        """Also ValueError for a KL coefficient that is not above 0."""
        super().validate()
        if self.kl_coef is not None and self.kl_coef <= 0:
            raise ValueError(f'{self.setting("kl_coef")} must be above 0')
