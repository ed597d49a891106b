"""Hyperparameters of reward-model training (the original's train_reward.py)."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from lm_human_preferences import label_types, storage
from lm_human_preferences.distributed import ALLREDUCE_TIMEOUT, ENGINES
from lm_human_preferences.errors import about_option
from lm_human_preferences.hparams.task_options import LoraHParams, TaskHParams
from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.hyperparams import option, own_option
from lm_human_preferences.utils.option_checks import check_multiple
from lm_human_preferences.utils.stop_signals import STOP_TIMEOUT

ON_ANOMALY = ('warn', 'stop')
TRAINED, FROZEN = 'trained', 'frozen'  # values of --features: train a network, or only a head
SAMPLED = 'mock'  # value of --labels.source for labels that are sampled anew at each start
COLLECTED = 'online'  # value of --labels.source for labels collected while the policy trains
CONSOLES = ('summary', 'original')
TOO_LONG = ('refuse', 'cut', 'skip')
PRECISIONS = ('fp32', 'tf32', 'bf16')
MOST_AT_A_TIME = 1_000_000  # maximum number of responses in a batch; no machine has memory for more
MOST_MEMBERS = 100  # maximum number of reward models in an ensemble
LONGEST_TIMEOUT = 10_000_000  # maximum of each timeout option, in seconds (115 days)


@dataclass
class LabelHParams(hyperparams.HParams):
    type: str = option(None, 'such as best_of_4 or scalar_rating; docs/files.md lists all')
    num_train: int | None = option(
        None, 'labels to train on, from the first; a multiple of batch_size; None: all', at_least=1
    )
    source: str = option(
        None,
        "file (path or URL) or folder of labels; 'test': made up; 'mock': by the known reward",
        path=True,
    )
    without: str | None = own_option(
        None, 'leave out the answers of these labellers of a folder: NAME,NAME'
    )
    too_long: str = own_option(
        'refuse',
        'texts that are too long: refuse, skip or cut (docs/labelling.md)',
        one_of=TOO_LONG,
    )
    held_out: float = own_option(
        0.0,
        'fraction of the queries kept out of training, to measure accuracy on',
        at_least=0,
        at_most=0.9,
    )
    error: float = own_option(
        0.0,
        "probability of a random answer instead of the best, for the source 'mock'",
        at_least=0,
        at_most=1,
    )

    def problems(self) -> Iterator[tuple[object, str]]:
        """Check the label type, and that labels.without is given only if the source is a folder."""
        with about_option(self.option_name('type')):
            label_type = label_types.get(self.type)
        yield (
            label_type.control.choices < 2,
            f'{{type=}} compares nothing: the N of {type(label_type).name} must be at least 2',
        )
        is_folder = os.path.isdir(self.source)
        yield self.without and not is_folder, '{without=} needs a folder, which {source=} is not'

    @property
    def are_sampled(self) -> bool:
        """True if the labels are sampled anew at each start."""
        return self.source == SAMPLED


@dataclass
class RunHParams(hyperparams.HParams):
    """Options for training one network."""

    seed: int | None = option(None, 'seed of all random numbers; None: another each time')
    log_interval: int = option(10, 'steps between two entries in the log', at_least=1)
    save_interval: int = option(50, 'steps between two checkpoints', at_least=1)
    save_dir: str | None = option(
        None, 'directory of the run: --save_dir joined with NAME; None: not saved', path=True
    )
    precision: str = own_option(
        'fp32',
        'matrix products in fp32, tf32 (GPUs) or bf16; weights stay fp32',
        one_of=PRECISIONS,
    )
    deterministic: bool = own_option(
        True, 'repeat gradients to the bit on a GPU; off is a little faster'
    )
    gradient_checkpointing: bool = own_option(
        False, 'keep only the input of each block: less memory, more time'
    )

    @property
    def directory(self) -> str | None:
        """Local directory of the run: save_dir, or if that is remote, its staging directory."""
        return self.save_dir and storage.staging_dir(self.save_dir)


@dataclass
class CommandRunHParams(RunHParams):
    """Options of a whole command; `train_policy` has no second set for its new reward model."""

    resume: bool = own_option(False, 'continue from the latest checkpoint, if there is one')
    console: str = own_option(
        'summary', 'summary, or original: the lines of the 2019 program', one_of=CONSOLES
    )
    allreduce: str = own_option(
        'auto', 'library that averages over ranks; auto: horovod if it suits them', one_of=ENGINES
    )
    allreduce_timeout: int = own_option(
        ALLREDUCE_TIMEOUT,
        'seconds that ranks wait for each other before all end',
        at_least=10,
        at_most=LONGEST_TIMEOUT,
    )
    stop_timeout: int = own_option(
        STOP_TIMEOUT,
        'seconds that a step has to end and be saved after Ctrl-C or SIGTERM',
        at_least=1,
        at_most=LONGEST_TIMEOUT,
    )
    on_anomaly: str = own_option(
        'warn', 'if training goes wrong: warn, or stop (and save a checkpoint)', one_of=ON_ANOMALY
    )


@dataclass
class HParams(hyperparams.HParams):
    """Settings for training a reward model, by `train_reward` or within `train_policy`."""

    run: RunHParams = field(default_factory=RunHParams)

    task: TaskHParams = field(default_factory=TaskHParams)
    labels: LabelHParams = field(default_factory=LabelHParams)

    features: str = own_option(
        TRAINED,
        'trained: a network; frozen: a head on hidden states (docs/labelling.md)',
        one_of=(TRAINED, FROZEN),
    )
    batch_size: int = option(
        40, 'labels per step, over all ranks; the last step may have fewer', at_least=1
    )
    epochs: int = own_option(1, 'passes over the labels, each in another order', at_least=1)
    lr: float = option(5e-5, 'learning rate of the first step; it falls linearly to 0', at_least=0)

    rollout_batch_size: int = option(
        64,
        'responses sampled at a time to normalise, over all ranks',
        at_least=1,
        at_most=MOST_AT_A_TIME,
    )
    normalize_samples: int = option(
        0, 'responses that rewards are normalised on; 0: do not normalise', at_least=0
    )
    debug_normalize: int = option(
        0, 'responses to check the normalisation with; 0: no check', at_least=0
    )
    normalize_before: bool = option(
        False, 'before training, scale the reward to mean and deviation of the labels'
    )
    normalize_after: bool = option(
        False, 'after training, scale the reward to mean 0 and deviation 1'
    )
    micro_batch_size: int | None = own_option(
        None, 'labels that a rank processes at a time; None: a whole step', at_least=1
    )

    lora: LoraHParams | None = own_option(
        None, "the reward model's adapters, if unlike those of --task.policy.lora"
    )

    @property
    def is_head(self) -> bool:
        """True if the reward model is a head on the initial model's hidden states."""
        return self.features == FROZEN

    def problems(self) -> Iterator[tuple[object, str]]:
        """Check that options fit together; for example, batch_size must divide labels.num_train."""
        yield (
            self.lora is not None and self.task.policy.lora is None,
            '{lora} has no effect without --task.policy.lora on',
        )
        if self.is_head:
            for name, is_given in {'epochs': self.epochs > 1, 'lora': self.lora}.items():
                yield is_given, f'{{{name}}} has no effect with {{features=}}: leave it out'
            yield (
                self.task.response_length == 1,
                '{features=} needs longer responses: give --task.response_length 2 or more',
            )
        yield (
            (self.normalize_before or self.normalize_after)
            and self.normalize_samples == self.rollout_batch_size == 1,
            '{normalize_samples=} with {rollout_batch_size=}: one has no deviation; use more',
        )
        # A network that trains on a given number of labels needs a whole number of batches.
        if self.labels.num_train is not None and not self.is_head:
            check_multiple(
                self.labels.num_train,
                self.option_name('labels.num_train'),
                {self.option_name('batch_size'): self.batch_size},
                otherwise=', or None for all labels',
            )

    def check_ranks(self, ranks: int) -> None:
        """Raise UserError unless `ranks` ranks can share the batches equally."""
        for name in ('batch_size', 'rollout_batch_size'):
            check_multiple(getattr(self, name), self.option_name(name), {'--mpi': ranks})


@dataclass
class CommandHParams(HParams):
    """Settings of `train_reward`."""

    command: ClassVar[str] = 'train_reward'
    policy: ClassVar[None] = None  # `train_reward` trains no policy

    run: CommandRunHParams = field(default_factory=CommandRunHParams)
    ensemble: int = own_option(
        1,
        'reward models to train, with different seeds; their mean is the reward',
        at_least=1,
        at_most=MOST_MEMBERS,
    )

    def problems(self) -> Iterator[tuple[object, str]]:
        """Check all options, and that a head is not trained as an ensemble."""
        yield from super().problems()
        yield (
            self.is_head and self.ensemble > 1,
            '{ensemble} has no effect with {features=}: leave it out',
        )

    @property
    def new_reward_model(self) -> HParams:
        """Settings of the reward model that this command trains."""
        return self

    @property
    def reward_training(self) -> HParams:
        """Settings of the reward training: all settings of this command."""
        return self

    @property
    def members(self) -> int:
        """Number of reward models that this command trains."""
        return self.ensemble

    @property
    def commands(self) -> list[str]:
        """Names of the training commands whose files this run writes."""
        return [self.command]
