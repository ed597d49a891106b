"""Hyperparameters of policy training (the original's train_policy.py)."""

import sys
from dataclasses import dataclass, field
from typing import Any

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams import train_reward
from lm_human_preferences.hparams.online import PEOPLE, OnlineHParams, ServeHParams
from lm_human_preferences.hparams.task import TaskHParams
from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.hyperparams import option

_LEAST_TO_WHITEN = 8  # responses of a minibatch
_NEW = 'rewards.train_new_model'
_RUNS = 'az://openaipublic/lm-human-preferences/runs'
# Options of the policy that a new reward model takes over unless it is given its own.
_OF_BOTH = {'run.precision', 'run.gradient_checkpointing'}
_PUBLISHED = ('sentiment', 'descriptiveness', 'cnndm', 'tldr')


@dataclass
class AdaptiveKLParams(hyperparams.HParams):
    target: float = option(
        None,
        'target of the KL divergence from the initial policy, in nats per response',
        at_least=1e-6,
    )
    horizon: int = option(10000, 'episodes over which kl_coef adapts', at_least=1)


@dataclass
class RewardHParams(hyperparams.HParams):
    kl_coef: float = option(
        0.2, 'weight of the KL penalty; if it adapts, its initial value', at_least=0
    )
    adaptive_kl: AdaptiveKLParams | None = option(
        None, 'adapt kl_coef to hold the KL divergence at a target'
    )

    trained_model: str | None = option(
        None,
        "reward model to use: path or URL of its directory, or of the run that trained it; 'mock':"
        ' the known reward of reviews',
    )

    train_new_model: train_reward.HParams | None = option(None, 'train a reward model first')

    online: OnlineHParams | None = option(
        None,
        'collect labels while the policy trains, and retrain the reward model as they come in',
        ours=True,
    )

    def validate(self, *, prefix: str = '') -> None:
        """Also AssertionError unless there is exactly one reward model, and a new one where labels
        are collected."""
        super().validate(prefix=prefix)
        trained, new = f'--{prefix}trained_model', f'--{prefix}train_new_model'
        if self.online is not None and self.train_new_model is None:
            raise AssertionError(
                f'--{prefix}online trains a reward model of its own: it needs {new} on'
            )
        if self.trained_model is None and self.train_new_model is None:
            raise AssertionError(f'no reward model: give {trained} DIRECTORY, or {new} on')
        if (
            self.trained_model is not None
            and self.train_new_model is not None
            and not self._trained_here()
        ):
            raise AssertionError(
                f'{trained} {self.trained_model} is not used while a new model is trained: '
                f'add {new} off'
            )

    def _trained_here(self) -> bool:
        """Whether trained_model is the directory that train_new_model writes.

        The settings file of a finished run has both.
        """
        assert self.train_new_model is not None
        run_dir = self.train_new_model.run.save_dir
        return run_dir is not None and self.trained_model == storage.join(run_dir, 'reward_model')


@dataclass
class PpoHParams(hyperparams.HParams):
    total_episodes: int = option(2000000, 'responses to train on', at_least=1)
    batch_size: int = option(64, 'responses per step, over all ranks', at_least=1)
    nminibatches: int = option(1, 'minibatches that a batch is split into', at_least=1)
    noptepochs: int = option(4, 'passes over a batch', at_least=1)
    lr: float = option(5e-6, 'learning rate of the first step; it falls linearly to 0', at_least=0)
    vf_coef: float = option(0.1, 'weight of the value loss', at_least=0)
    cliprange: float = option(
        0.2, 'how far the ratio of probabilities may move from 1 before it is clipped', at_least=0
    )
    cliprange_value: float = option(
        0.2, 'how far a value may move before it is clipped', at_least=0
    )
    gamma: float = option(1, 'discount of later rewards', at_least=0, at_most=1)
    lam: float = option(0.95, 'lambda of generalised advantage estimation', at_least=0, at_most=1)
    whiten_rewards: bool = option(True, 'scale the rewards of each minibatch to deviation 1')
    micro_batch_size: int | None = option(
        None,
        'responses that a rank processes at a time; None: a whole minibatch. Saves memory and does'
        ' not change gradients',
        at_least=1,
        ours=True,
    )


@dataclass
class RunHParams(train_reward.RunHParams):
    serve: ServeHParams | None = option(
        None,
        'while labels are collected, serve the page on which people answer (./launch.py label'
        ' --web)',
        ours=True,
    )


@dataclass
class HParams(hyperparams.HParams):
    run: RunHParams = field(default_factory=RunHParams)

    task: TaskHParams = field(default_factory=TaskHParams)
    rewards: RewardHParams = field(default_factory=RewardHParams)
    ppo: PpoHParams = field(default_factory=PpoHParams)

    def validate(self, *, prefix: str = '') -> None:
        """Also UserError unless minibatches divide the batch.

        AssertionError if they are too small to whiten.
        """
        super().validate(prefix=prefix)
        name = f'--{prefix}ppo.batch_size'
        hyperparams.check_multiple(
            self.ppo.batch_size, name, {f'--{prefix}ppo.nminibatches': self.ppo.nminibatches}
        )
        if problem := self._too_few_to_whiten(
            name, f'{self.ppo.nminibatches} minibatches', self.ppo.nminibatches
        ):
            raise AssertionError(f'{problem}, or --{prefix}ppo.whiten_rewards false')
        self._validate_online(prefix)

    def _validate_online(self, prefix: str) -> None:
        """ValueError for labels that cannot be collected as the options say."""
        online, new_model = self.rewards.online, self.rewards.train_new_model
        if self.run.serve is not None and (online is None or online.source != PEOPLE):
            raise ValueError(
                f'--{prefix}run.serve shows people what to answer: it needs'
                f' --{prefix}rewards.online with the source people'
            )
        if online is None or new_model is None:
            return
        group = f'--{prefix}rewards.online'
        steps = -(-self.ppo.total_episodes // self.ppo.batch_size)
        online.check_schedule(steps, new_model.batch_size, prefix=f'{prefix}rewards.online.')
        samples = _samples_of(new_model.labels.type)
        if online.validation and samples % 2:
            raise ValueError(
                f'{group}.validation {online.validation}: --{prefix}{_NEW}.labels.type'
                f' {new_model.labels.type} shows {samples} sample(s), which two policies cannot'
                ' share equally; take 0'
            )
        if new_model.labels.without is not None:
            raise ValueError(
                f'--{prefix}{_NEW}.labels.without has no effect with {group}, whose labels are not'
                f' those of --{prefix}{_NEW}.labels.source'
            )
        if online.source == PEOPLE and self.run.save_dir is None:
            raise ValueError(
                f'{group}.source people: a run with --save_dir None has no folder in which they'
                ' could answer'
            )

    def writes(self) -> list[str]:
        """The commands whose files the run writes, its own last."""
        is_two_runs = self.rewards.train_new_model is not None and self.rewards.online is None
        return ['train_reward', 'train_policy'] if is_two_runs else ['train_policy']

    def check_ranks(self, ranks: int) -> None:
        """UserError unless so many ranks can share the batches equally and whiten their parts."""
        parts = self.ppo.nminibatches * ranks
        hyperparams.check_multiple(
            self.ppo.batch_size,
            '--ppo.batch_size',
            {'--mpi': ranks, '--ppo.nminibatches': self.ppo.nminibatches},
        )
        if problem := self._too_few_to_whiten(
            '--ppo.batch_size', f'{parts} minibatches (--mpi {ranks})', parts
        ):
            raise UserError(f'{problem}, fewer ranks, or --ppo.whiten_rewards false')
        if self.rewards.train_new_model is not None:
            self.rewards.train_new_model.check_ranks(ranks, prefix=f'{_NEW}.')

    def _too_few_to_whiten(self, name: str, parts_name: str, parts: int) -> str | None:
        """What is wrong if a batch in so many parts is too small to whiten, else None."""
        if self.ppo.whiten_rewards and self.ppo.batch_size // parts < _LEAST_TO_WHITEN:
            return (
                f'{name} {self.ppo.batch_size} in {parts_name} is too few for whitening: take '
                f'{_LEAST_TO_WHITEN * parts} or more'
            )
        return None


def _samples_of(label_type: str) -> int:
    """How many responses a label of this type is about."""
    if label_type.startswith('best_of_'):
        return int(label_type.removeprefix('best_of_'))
    return 2 if label_type == 'scalar_compare' else 1


def load_run_hparams(save_dir: str) -> HParams:
    """The hyperparameters of the run of train_policy in `save_dir`, local or remote."""
    hparams = HParams()
    try:
        # See runs.run_files.POLICY.settings, in a room above this one.
        hparams.override_from_json_file(storage.join(save_dir, 'train_policy_hparams.json'))
    except storage.NotFound as e:
        raise UserError(
            f'--save_dir {save_dir} is no run of train_policy: it has no train_policy_hparams.json'
        ) from e
    return hparams


def complete(
    settings: dict[str, Any],
    hparams: HParams,
    experiment: str | None,
) -> dict[str, Any]:
    """The user's settings by dotted name, completed by what they imply.

    The policy and its reward model have the same task; where no reward model is given, it is the
    published one. hparams: the experiment's, to which the settings are applied. UserError if two
    settings contradict each other.
    """
    settings = dict(settings)
    named = any(key.startswith(f'{_NEW}.') for key in settings)
    default = 'on' if named or hparams.rewards.train_new_model else 'off'
    trains_new_model = settings.get(_NEW, default) == 'on'
    if trains_new_model:
        _share_task(settings)
        for key in _OF_BOTH & settings.keys():
            settings.setdefault(f'{_NEW}.{key}', settings[key])
        new_model = hparams.rewards.train_new_model
        if (
            experiment
            and new_model
            and 'run.seed' in settings
            and f'{_NEW}.run.seed' not in settings
        ):
            print(
                'note: --run.seed is the seed of the policy only; that of the reward model stays '
                f'{new_model.run.seed} unless --{_NEW}.run.seed is given',
                file=sys.stderr,
            )
    elif (
        not named
        and not settings.get('rewards.trained_model', hparams.rewards.trained_model)
        and experiment in _PUBLISHED
    ):
        settings['rewards.trained_model'] = f'{_RUNS}/{experiment}/reward_model'
        print(
            'note: no --rewards.trained_model given: using the published one,'
            f' {settings["rewards.trained_model"]}',
            file=sys.stderr,
        )
    return settings


def _share_task(settings: dict[str, Any]) -> None:
    """Set each option of the task for policy and reward model alike; UserError if two differ."""
    for key, value in list(settings.items()):
        if 'task.' not in key:
            continue
        twin = f'{_NEW}.{key}' if key.startswith('task.') else key.removeprefix(f'{_NEW}.')
        if settings.setdefault(twin, value) != value:
            raise UserError(
                f'--{key} {value} and --{twin} {settings[twin]} differ, but a policy and its reward'
                ' model share one task: give only one of them'
            )
