"""Options of `./launch.py figures`."""

from dataclasses import dataclass

from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.hyperparams import option


@dataclass
class HParams(hyperparams.HParams):
    output_dir: str = option(
        '/tmp/save/figures',
        'folder for pictures, tables and finished runs; a finished run is not repeated',
    )
    quick: bool = option(False, 'a smaller set: fewer KL targets, episodes and seeds')
    online: bool = option(
        False,
        'instead of the figures, compare labels that are collected while the policy trains with as'
        ' many that are collected before',
    )
    labels: bool = option(
        False,
        'instead of the figures, measure what reward models are worth that have learned from few'
        ' labels: for numbers of labels, epochs and ensembles',
    )
    seeds: int | None = option(
        None, 'runs of each kind; None: 5, or 10 with --labels; 2 with --quick', at_least=1
    )
    processes: int | None = option(None, 'runs at a time; None: one per CPU', at_least=1)

    def validate(self) -> None:
        """Also ValueError where two sets of figures are asked for at once."""
        super().validate()
        if self.online and self.labels:
            raise ValueError('--online and --labels: give one of them at a time')
