"""Hyperparameters of reward-model training (the original's train_reward.py)."""

import os
from dataclasses import dataclass, field
from typing import ClassVar

from lm_human_preferences import label_types, storage
from lm_human_preferences.distributed.waiting import DEFAULT_TIMEOUTS, Timeouts
from lm_human_preferences.errors import about_option
from lm_human_preferences.hparams.task_options import TaskHParams
from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.hyperparams import option
from lm_human_preferences.utils.integers import check_multiple

ENGINES = ('auto', 'horovod', 'torch', 'mpi')
ON_ANOMALY = ('off', 'warn', 'stop')
CONSOLES = ('summary', 'original', 'quiet')
TOO_LONG = ('refuse', 'cut', 'cut_start', 'skip')
PRECISIONS = ('fp32', 'tf32', 'bf16')
MOST_MEMBERS = 100  # of an ensemble
LONGEST_TIMEOUT = 10_000_000  # seconds, or 115 days


@dataclass
class LabelHParams(hyperparams.HParams):
    type: str = option(
        None, 'what a label says, such as best_of_4 or scalar_rating; docs/files.md lists all'
    )
    num_train: int | None = option(
        None,
        'labels to train on, those at the beginning of the source, a multiple of batch_size; None:'
        ' all',
        at_least=1,
    )
    source: str = option(
        None,
        "path or URL of a label file, token ids or texts; folder of labels; 'test': made-up"
        " labels; 'mock': the known reward's",
    )
    without: str | None = option(
        None,
        'if source is a folder: leave out the answers of these labellers, NAME or NAME,NAME',
        ours=True,
    )
    too_long: str = option(
        'refuse',
        'texts of labels, or ids of another encoding, that are too long: refuse, skip, cut,'
        ' cut_start (docs/labelling.md)',
        one_of=TOO_LONG,
        ours=True,
    )
    held_out: float = option(
        0.0,
        'share of the questions to keep out of training and to measure accuracy on; num_train'
        ' counts them, too',
        at_least=0,
        at_most=0.9,
        ours=True,
    )
    error: float = option(
        0.0,
        "with the source 'mock', the probability of a random answer instead of the best",
        at_least=0,
        at_most=1,
        ours=True,
    )

    def validate(self) -> None:
        """Also UserError for what is no label type, and ValueError for one with a single answer.

        And for `without` if the source is not a folder, which alone records who answered,
        `too_long` if it is one, and `error` where people answer.
        """
        super().validate()
        with about_option(self.option_name('type')):
            label_type = label_types.get(self.type)
        if label_type.control.choices < 2:
            raise ValueError(
                f'{self.setting("type")} compares nothing: the N of'
                f' {type(label_type).name} must be at least 2'
            )
        source = self.setting('source')
        if self.without is not None and not os.path.isdir(self.source):
            raise ValueError(
                f'{self.setting("without")}: {source} is not a folder of labels,'
                ' and only a folder records who gave each label'
            )
        if self.too_long != 'refuse' and self._has_no_texts():
            raise ValueError(f'{self.setting("too_long")}: {source} holds no texts, but token ids')
        if self.error and self.source != 'mock':
            raise ValueError(
                f"{self.setting('error')}: {source} is not 'mock', whose labels"
                ' alone are made with errors'
            )

    def sources(self) -> dict[str, str]:
        """What the labels are read from: {field: path or URL}, or 'mock' or 'test'."""
        return {'source': self.source}

    def _has_no_texts(self) -> bool:
        return self.source in ('mock', 'test') or os.path.isdir(self.source)


@dataclass
class RunHParams(hyperparams.HParams):
    dropped: ClassVar[frozenset[str]] = frozenset({'evaluate'})

    seed: int | None = option(
        None,
        'seed of all random numbers; None: a different one each time. A reward model trained with a'
        ' policy has its own seed',
    )
    log_interval: int = option(10, 'steps between two entries in the log', at_least=1)
    save_interval: int = option(50, 'steps between two checkpoints', at_least=1)
    save_dir: str | None = option(
        None, 'directory of the run: --save_dir joined with NAME; None: nothing is saved'
    )
    resume: bool = option(
        False,
        'continue from the latest checkpoint in save_dir, if there is one',
        ours=True,
        of_command=True,
        lasting=False,
    )
    console: str = option(
        'summary',
        'what is printed: summary, original (the lines of the 2019 program) or quiet (warnings,'
        ' errors and the end)',
        one_of=CONSOLES,
        ours=True,
        of_command=True,
        lasting=False,
    )
    allreduce: str = option(
        'auto',
        'what averages over ranks: auto, horovod, torch or mpi',
        one_of=ENGINES,
        ours=True,
        of_command=True,
    )
    rank_timeout: int = option(
        DEFAULT_TIMEOUTS.rank,
        'seconds in which a rank has to give a sign of life; after that, all ranks are ended',
        at_least=10,
        at_most=LONGEST_TIMEOUT,
        ours=True,
        of_command=True,
    )
    allreduce_timeout: int = option(
        DEFAULT_TIMEOUTS.allreduce,
        "seconds that ranks wait for each other's gradients; not with --run.allreduce mpi",
        at_least=10,
        at_most=LONGEST_TIMEOUT,
        ours=True,
        of_command=True,
    )
    stop_timeout: int = option(
        DEFAULT_TIMEOUTS.stop,
        'seconds in which a step has to end after Ctrl-C or SIGTERM, to be saved; a second signal'
        ' stops at once',
        at_least=1,
        at_most=LONGEST_TIMEOUT,
        ours=True,
        of_command=True,
    )
    on_anomaly: str = option(
        'warn',
        'what to do if training goes wrong: off (nothing), warn, or stop (save a checkpoint first)',
        one_of=ON_ANOMALY,
        ours=True,
        of_command=True,
        formerly='andon',
    )
    precision: str = option(
        'fp32',
        'number format of matrix products: fp32, tf32 (GPUs) or bf16; weights and statistics stay'
        ' fp32',
        one_of=PRECISIONS,
        ours=True,
    )
    gradient_checkpointing: bool = option(
        False,
        'less memory, more time: keep only the input of each block, and compute the block again for'
        ' the backward pass',
        ours=True,
    )

    @property
    def directory(self) -> str | None:
        """Where the run is written: save_dir, or its staging directory if that is remote.

        None if nothing is saved.
        """
        return storage.staging_dir(self.save_dir)

    @property
    def timeouts(self) -> Timeouts:
        """How long ranks wait for each other, and are waited for."""
        return Timeouts(self.rank_timeout, self.allreduce_timeout, self.stop_timeout)


@dataclass
class HParams(hyperparams.HParams):
    run: RunHParams = field(default_factory=RunHParams)

    task: TaskHParams = field(default_factory=TaskHParams)
    labels: LabelHParams = field(default_factory=LabelHParams)

    batch_size: int = option(
        40,
        'labels per step, over all ranks; the last step has what is left of all labels',
        at_least=1,
    )
    epochs: int = option(
        1,
        'passes over the labels, each in another order; few labels need several',
        at_least=1,
        ours=True,
    )
    ensemble: int = option(
        1,
        'reward models to train on the same labels with other seeds; the reward is their mean',
        at_least=1,
        at_most=MOST_MEMBERS,
        ours=True,
        of_command=True,
    )
    lr: float = option(5e-5, 'learning rate of the first step; it falls linearly to 0', at_least=0)

    rollout_batch_size: int = option(
        64, 'responses sampled at a time for normalisation, over all ranks', at_least=1
    )
    normalize_samples: int = option(
        0,
        'sampled responses that the mean and deviation of the reward are estimated from; 0: do not'
        ' normalise',
        at_least=0,
    )
    debug_normalize: int = option(
        0, 'sampled responses to check the normalisation with; 0: no check', at_least=0
    )
    normalize_before: bool = option(
        False,
        'before training, give the reward the mean and deviation of the labels (comparisons: 0'
        ' and 1)',
    )
    normalize_after: bool = option(
        False,
        'after training, scale the reward to mean 0 and deviation 1 on samples of the initial'
        ' policy: kl_coef keeps its meaning',
    )
    micro_batch_size: int | None = option(
        None,
        'labels that a rank processes at a time; None: a whole step. Saves memory and does not'
        ' change gradients',
        at_least=1,
        ours=True,
    )

    def validate(self) -> None:
        """Also UserError unless batches divide the labels that are asked for, as in the original.

        All labels (None) need not fill batches: nobody has chosen their number.
        """
        super().validate()
        if self.labels.num_train is not None:
            check_multiple(
                self.labels.num_train,
                self.option_name('labels.num_train'),
                {self.option_name('batch_size'): self.batch_size},
                otherwise=', or None for all labels',
            )

    def idle_normalization(self) -> list[str]:
        """The options that ask to normalise where there are no samples for it."""
        names = ('normalize_before', 'normalize_after')
        if self.normalize_samples:
            return []
        return [self.option_name(name) for name in names if getattr(self, name)]

    def check_ranks(self, ranks: int) -> None:
        """UserError unless so many ranks can share the batches equally."""
        for name in ('batch_size', 'rollout_batch_size'):
            check_multiple(getattr(self, name), self.option_name(name), {'--mpi': ranks})

    def writes(self) -> list[str]:
        return ['train_reward']
