"""Hyperparameters of reward-model training (the original's train_reward.py)."""

import os
import re
from dataclasses import dataclass, field

from lm_human_preferences import storage
from lm_human_preferences.hparams.task import TaskHParams
from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.hyperparams import option

ENGINES = ('auto', 'horovod', 'torch', 'mpi')
ON_ANOMALY = ('off', 'warn', 'stop')
CONSOLES = ('summary', 'original', 'quiet')
PRECISIONS = ('fp32', 'tf32', 'bf16')


@dataclass
class LabelHParams(hyperparams.HParams):
    type: str = option(
        None, 'what a label says, such as best_of_4 or scalar_rating; docs/files.md lists all'
    )
    num_train: int | None = option(
        None,
        'labels to train on, a multiple of batch_size; None: all, rounded down to one',
        at_least=1,
    )
    source: str = option(
        None,
        "label file (JSON), path or URL; or a folder that `label` fills; 'test': made-up labels;"
        " 'mock': the known reward's",
    )
    without: str | None = option(
        None,
        'of a folder, leave out the answers of this labeller, or of several: NAME,NAME',
        ours=True,
    )
    held_out: float = option(
        0.0,
        'share of the questions to keep out of training, to tell how well the reward model predicts'
        ' labels that it has not seen; num_train then counts them too',
        at_least=0,
        at_most=0.9,
        ours=True,
    )
    error: float = option(
        0.0,
        "of the source 'mock', the probability of a random answer instead of the best",
        at_least=0,
        at_most=1,
        ours=True,
    )

    def validate(self, *, prefix: str = '') -> None:
        """Also ValueError for best_of_1 and best_of_0, from which nothing can be learned, and for
        labellers to leave out of a source that does not name them."""
        super().validate(prefix=prefix)
        best_of = re.fullmatch(r'best_of_(\d+)', self.type)
        if best_of and int(best_of[1]) < 2:
            raise ValueError(
                f'--{prefix}type {self.type} compares nothing: N of best_of_N must be at least 2'
            )
        if self.without is not None and not os.path.isdir(self.source):
            raise ValueError(
                f'--{prefix}without {self.without}: --{prefix}source {self.source} is no folder of'
                ' labels, which alone tells who gave them'
            )
        if self.error and self.source != 'mock':
            raise ValueError(
                f"--{prefix}error {self.error}: --{prefix}source {self.source} is not 'mock', whose"
                ' labels alone are made with errors'
            )


@dataclass
class RunHParams(hyperparams.HParams):
    seed: int | None = option(
        None,
        'seed of all random numbers; None: another each time. A reward model trained with a policy'
        ' has its own',
    )
    log_interval: int = option(10, 'steps between two entries in the log', at_least=1)
    save_interval: int = option(50, 'steps between two checkpoints', at_least=1)
    save_dir: str | None = option(
        None, 'where the run is kept; --save_dir joined with NAME, unless that is None'
    )
    resume: bool = option(
        False, 'go on from the newest checkpoint in save_dir, if there is one', ours=True
    )
    evaluate: bool = option(
        False,
        'when a policy is trained, do what ./launch.py evaluate does; needs save_dir',
        ours=True,
    )
    console: str = option(
        'summary',
        'what is printed: summary, original (the lines of the 2019 program) or quiet (warnings,'
        ' errors and the end)',
        one_of=CONSOLES,
        ours=True,
        recorded=False,
    )
    allreduce: str = option(
        'auto', 'what averages over ranks: auto, horovod, torch or mpi', one_of=ENGINES, ours=True
    )
    on_anomaly: str = option(
        'warn',
        'when training goes wrong: off, warn, or stop, with a checkpoint of the moment',
        one_of=ON_ANOMALY,
        ours=True,
        formerly='andon',
    )
    precision: str = option(
        'fp32',
        'type of products: fp32, tf32 (GPUs) or bf16; weights and statistics stay fp32',
        one_of=PRECISIONS,
        ours=True,
    )
    gradient_checkpointing: bool = option(
        False,
        'less memory, more time: keep what goes into a block only, and compute the block again for'
        ' its gradient',
        ours=True,
    )

    @property
    def directory(self) -> str | None:
        """Where the run is written: save_dir, or if that is remote, its staging directory; None if
        it is not kept."""
        return storage.staging_dir(self.save_dir)


@dataclass
class HParams(hyperparams.HParams):
    run: RunHParams = field(default_factory=RunHParams)

    task: TaskHParams = field(default_factory=TaskHParams)
    labels: LabelHParams = field(default_factory=LabelHParams)

    batch_size: int = option(40, 'labels per step, over all ranks', at_least=1)
    lr: float = option(5e-5, 'learning rate of the first step; it falls linearly to 0', at_least=0)

    rollout_batch_size: int = option(
        64, 'responses sampled at a time for normalisation, over all ranks', at_least=1
    )
    normalize_samples: int = option(
        0, 'responses that estimate the mean and deviation of the reward', at_least=0
    )
    debug_normalize: int = option(0, 'responses that check the normalisation', at_least=0)
    normalize_before: bool = option(
        False,
        'before training, give the reward the mean and deviation of the labels (comparisons: 0'
        ' and 1)',
    )
    normalize_after: bool = option(
        False,
        'after training, give it mean 0 and deviation 1 on the initial policy: kl_coef keeps its'
        ' meaning',
    )
    micro_batch_size: int | None = option(
        None,
        'labels per rank held in memory at a time; None: all of a step. Gradients are the same',
        at_least=1,
        ours=True,
    )

    def validate(self, *, prefix: str = '') -> None:
        """Also UserError unless batches divide the labels."""
        super().validate(prefix=prefix)
        if self.labels.num_train is not None:
            hyperparams.check_multiple(
                self.labels.num_train,
                f'--{prefix}labels.num_train',
                {f'--{prefix}batch_size': self.batch_size},
            )

    def check_ranks(self, ranks: int, *, prefix: str = '') -> None:
        """UserError unless so many ranks can share the batches equally."""
        for name in ('batch_size', 'rollout_batch_size'):
            hyperparams.check_multiple(getattr(self, name), f'--{prefix}{name}', {'--mpi': ranks})

    def writes(self) -> list[str]:
        return ['train_reward']
