"""Options of `./launch.py figures`."""

from dataclasses import dataclass

from lm_human_preferences.hparams import reward_options
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
    ensemble: int = option(
        1,
        'with --online: reward models whose mean is the reward',
        at_least=1,
        at_most=reward_options.MOST_MEMBERS,
    )
    epochs: int = option(
        1, 'with --online: how many times reward models go through the labels', at_least=1
    )
    initial: int | None = option(
        None,
        'with --online: labels before the first episode, where more follow; None: a quarter',
        at_least=1,
    )
    seeds: int | None = option(
        None, 'runs of each kind; None: 5, or 10 with --labels; 2 with --quick', at_least=1
    )
    processes: int | None = option(None, 'runs at a time; None: one per CPU', at_least=1)

    def validate(self) -> None:
        """Also ValueError for options of other figures than those that are asked for."""
        super().validate()
        if self.online and self.labels:
            raise ValueError('--online and --labels: give one of them at a time')
        online = self.ensemble, self.epochs, self.initial
        if not self.online and online != (1, 1, None):
            raise ValueError('--ensemble, --epochs and --initial are options of --online')
