"""Options of `./launch.py report`."""

from dataclasses import dataclass

from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.hyperparams import option


@dataclass
class HParams(hyperparams.HParams):
    output: str | None = option(
        None,
        'write the page to this file; None: report.html in RUN, or here if RUN is remote or there'
        ' are several',
    )
    names: bool = option(True, 'name the labellers', ours=True)
    rewards: bool = option(
        False,
        'also have each reward model predict the labels of its folder: the calibration, which takes'
        ' longer',
        ours=True,
    )
