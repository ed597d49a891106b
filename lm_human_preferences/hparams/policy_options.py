"""Hyperparameters of policy training (the original's train_policy.py)."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import floor
from typing import Any, ClassVar

from lm_human_preferences import label_types, storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams import reward_options
from lm_human_preferences.hparams.online_options import OnlineHParams, ServeHParams
from lm_human_preferences.hparams.task_options import TaskHParams
from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.hyperparams import option, own_option
from lm_human_preferences.utils.option_checks import ceil_div, check_multiple

_IS_FUNCTION = re.compile(r'.+\.py:[^\W\d]\w*')
_LEAST_TO_WHITEN = 8  # smallest minibatch, in responses, in which rewards are whitened
MOST_KL_ERROR = 0.2  # relative error of the KL divergence above which kl_coef changes no faster
MOST_PESSIMISM = 100  # maximum of --rewards.pessimism; above it, uncertainty would outweigh scores
NEW_MODEL = 'rewards.train_new_model'
Experiments = Mapping[str, Mapping[str, Any]]  # options of each experiment, by COMMAND/EXPERIMENT
OF_ONE_START = ('run.resume', 'run.console')  # options that each start of a run sets anew
# Options that the program sets itself: directories, and the new reward model's task (a copy)
NOT_DECIDED = ('run.save_dir', f'{NEW_MODEL}.run.save_dir', f'{NEW_MODEL}.task')


@dataclass
class AdaptiveKLParams(hyperparams.HParams):
    target: float = option(
        None, 'KL divergence from the initial policy, in nats per response', at_least=1e-6
    )
    horizon: int = option(10000, 'episodes over which kl_coef adapts', at_least=1)


@dataclass
class PpoHParams(hyperparams.HParams):
    total_episodes: int = option(2000000, 'responses to train on', at_least=1)
    batch_size: int = option(
        64, 'responses per step, over all ranks', at_least=1, at_most=reward_options.MOST_AT_A_TIME
    )
    nminibatches: int = option(1, 'minibatches that a batch is split into', at_least=1)
    noptepochs: int = option(4, 'passes over a batch', at_least=1)
    lr: float = option(5e-6, 'learning rate of the first step; it falls linearly to 0', at_least=0)
    vf_coef: float = option(0.1, 'weight of the value loss', at_least=0)
    cliprange: float = option(
        0.2, 'change of a probability ratio at which it is clipped', at_least=0
    )
    cliprange_value: float = option(0.2, 'change of a value at which it is clipped', at_least=0)
    gamma: float = option(1, 'discount of later rewards', at_least=0, at_most=1)
    lam: float = option(0.95, 'lambda of generalised advantage estimation', at_least=0, at_most=1)
    whiten_rewards: bool = option(True, 'scale the rewards of each minibatch to deviation 1')
    samples_per_query: int = own_option(
        1, 'responses per query; with several, each is compared to the mean of others', at_least=1
    )
    micro_batch_size: int | None = own_option(
        None, 'responses that a rank processes at a time; None: a minibatch', at_least=1
    )

    @property
    def nupdates(self) -> int:
        """Number of steps for `total_episodes`, rounded up."""
        return ceil_div(self.total_episodes, self.batch_size)


@dataclass
class RewardHParams(hyperparams.HParams):
    kl_coef: float = option(0.2, 'weight of the KL penalty, at first if it adapts', at_least=0)
    adaptive_kl: AdaptiveKLParams | None = option(None, 'adapt kl_coef to hold the KL at a target')
    relative_kl_coef: bool = own_option(
        False, "multiply kl_coef by the deviation of the first step's scores, for any scale"
    )

    trained_model: str | None = option(
        None,
        "reward model or classifier: path, URL, run or ORG/NAME; 'mock': known reward of reviews",
        path=True,
    )

    class_name: str | None = own_option(None, 'class of a classifier whose log odds are the reward')

    function: str | None = own_option(
        None, 'reward function of your own, FILE.py:FUNCTION (docs/rewards.md)', path=True
    )

    train_new_model: reward_options.HParams | None = option(
        None, 'train a reward model first; --rewards.train_new_model.NAME is --NAME of train_reward'
    )

    pessimism: float | None = own_option(
        None,
        'deviations by which a head lowers scores where it is unsure; None: 0.5',
        at_least=0,
        at_most=MOST_PESSIMISM,
    )

    ensemble: int | None = own_option(
        None,
        'reward models whose mean is the reward; None: all in trained_model, else one',
        at_least=1,
        at_most=reward_options.MOST_MEMBERS,
    )

    online: OnlineHParams | None = own_option(
        None, 'collect labels, and retrain the reward model, while the policy trains'
    )

    @property
    def given_name(self) -> str:
        """Value of --rewards.trained_model, plus #CLASS if a class is given."""
        assert self.trained_model is not None
        return self.trained_model + (f'#{self.class_name}' if self.class_name is not None else '')

    @property
    def deviations(self) -> float:
        """Number of a score's standard deviations that a head subtracts from the score."""
        return 0.5 if self.pessimism is None else self.pessimism

    @property
    def members(self) -> int:
        """Number of reward models in the ensemble; it is known once a training has begun."""
        return self.ensemble or 1

    def problems(self) -> Iterator[tuple[object, str]]:
        """Check that exactly one reward is given, and a new reward model if `online` is on."""
        trained, new = self.trained_model, self.train_new_model
        yield self.online and new is None, '{online} needs {train_new_model} on'
        yield (
            self.function and not _IS_FUNCTION.fullmatch(self.function),
            '{function=}: give FILE.py:FUNCTION, as my_reward.py:score',
        )
        yield (
            _IS_FUNCTION.fullmatch(trained or ''),
            '{trained_model=} is a function of your own: give it as {function}',
        )
        yield self.class_name and trained is None, '{class_name=}: give {trained_model} DIRECTORY'
        # If `train_new_model` trains the model named by `trained_model`, both mean the same reward.
        run_dir = None if new is None else new.run.save_dir
        is_own = run_dir is not None and trained == storage.join(run_dir, 'reward_model')
        rewards = [self.function, None if is_own else trained, new]
        yield (
            rewards.count(None) != 2,
            'give one reward: {trained_model} DIRECTORY or {function} FILE.py:FUNCTION, each with'
            ' {train_new_model} off, or {train_new_model} on',
        )


@dataclass
class RunHParams(reward_options.CommandRunHParams):
    evaluate: bool = own_option(False, 'evaluate the policy after training; needs save_dir')
    keep_checkpoints: int = own_option(20, 'checkpoints of the policy that are kept', at_least=2)
    sample_queries: int = own_option(
        8,
        'queries answered at the start and ten times later, into samples.jsonl; 0: none',
        at_least=0,
    )
    serve: ServeHParams | None = own_option(
        None, 'serve the page for people while labels are collected'
    )

    @property
    def is_evaluated(self) -> bool:
        """True if the policy is evaluated after its training."""
        return self.evaluate and self.save_dir is not None


@dataclass
class HParams(hyperparams.HParams):
    command: ClassVar[str] = 'train_policy'

    run: RunHParams = field(default_factory=RunHParams)

    task: TaskHParams = field(default_factory=TaskHParams)
    rewards: RewardHParams = field(default_factory=RewardHParams)
    ppo: PpoHParams = field(default_factory=PpoHParams)

    def problems(self) -> Iterator[tuple[object, str]]:
        """Check the minibatches, and the options for collecting labels."""
        parts = self.ppo.nminibatches
        new_model = self.rewards.train_new_model
        yield (
            new_model is not None and new_model.task != self.task,
            '{task} and {rewards.train_new_model.task} must be the same',
        )
        yield from self._problems_of_kl_control()
        self._check_shares({})
        if self.ppo.micro_batch_size is not None:
            same = {'--ppo.samples_per_query': self.ppo.samples_per_query}
            check_multiple(self.ppo.micro_batch_size, '--ppo.micro_batch_size', same)
        problem = self._too_few_to_whiten(f'{parts} minibatches', parts)
        yield problem, f'{problem}, or {{ppo.whiten_rewards}} false'
        online = self.rewards.online
        is_asking_people = online is not None and online.asks_people
        serves_nobody = self.run.serve is not None and not is_asking_people
        yield serves_nobody, '{run.serve} needs {rewards.online} with the source people'
        if online is None or new_model is None:
            return
        steps = self.ppo.nupdates
        trainings = online.schedule(steps).training_steps()
        yield (
            len(trainings) - 1 < online.retrainings,
            f'{{rewards.online.retrainings=}}: two of them would be at one of the {steps} steps of'
            ' {ppo.total_episodes}; use fewer',
        )
        label_type = label_types.get(new_model.labels.type)
        yield (
            online.ties and not label_type.can_tie,
            f'{{rewards.online.ties}}: labels of the type {label_type.name} have no ties',
        )
        is_nowhere = is_asking_people and self.run.save_dir is None
        yield is_nowhere, '{rewards.online.source=} needs a folder, so not --save_dir None'

    def _problems_of_kl_control(self) -> Iterator[tuple[object, str]]:
        """Check that adaptation cannot make a positive KL coefficient 0 or negative."""
        adaptive, size = self.rewards.adaptive_kl, self.ppo.batch_size
        if adaptive is None or self.rewards.kl_coef == 0:
            return
        # A run of one step never adapts the KL coefficient, and so may keep the default horizon.
        is_used = self.ppo.nupdates > 1 or adaptive.horizon != AdaptiveKLParams.horizon
        yield (
            is_used and adaptive.horizon <= MOST_KL_ERROR * size,
            '{rewards.adaptive_kl.horizon=} with {ppo.batch_size=}: use a horizon above'
            f' {floor(MOST_KL_ERROR * size)}, or smaller batches',
        )

    @property
    def policy(self) -> 'HParams':
        """Settings of the policy that this command trains."""
        return self

    @property
    def new_reward_model(self) -> reward_options.HParams | None:
        """Settings of the reward model that this command trains, before the policy or with it."""
        return self.rewards.train_new_model

    @property
    def reward_training(self) -> reward_options.HParams | None:
        """Settings of a reward training that precedes the policy's training, or None."""
        return None if self.rewards.online else self.rewards.train_new_model

    @property
    def members(self) -> int:
        """Number of reward models that the policy learns from."""
        return self.rewards.members

    @property
    def commands(self) -> list[str]:
        """Names of the training commands whose files this run writes; its own command is last."""
        model = self.new_reward_model
        if model is None or (self.rewards.online and not model.is_head):
            return [self.command]  # the policy's checkpoints include online reward models
        return [reward_options.CommandHParams.command, self.command]

    def check_ranks(self, ranks: int) -> None:
        """Raise UserError unless `ranks` ranks can split batches evenly and whiten minibatches."""
        parts = self.ppo.nminibatches * ranks
        self._check_shares({'--mpi': ranks})
        problem = self._too_few_to_whiten(f'{parts} minibatches (--mpi {ranks})', parts)
        if problem is not None:
            raise UserError(f'{problem}, fewer ranks, or --ppo.whiten_rewards false')
        if self.rewards.train_new_model is not None:
            self.rewards.train_new_model.check_ranks(ranks)

    def _check_shares(self, ranks: dict[str, int]) -> None:
        """Raise UserError unless minibatches x samples_per_query x ranks divides batch_size."""
        parts = {
            '--ppo.nminibatches': self.ppo.nminibatches,
            '--ppo.samples_per_query': self.ppo.samples_per_query,
        }
        check_multiple(self.ppo.batch_size, '--ppo.batch_size', {**ranks, **parts})

    def _too_few_to_whiten(self, parts_name: str, parts: int) -> str | None:
        """Return why `parts` minibatches of a batch cannot be whitened; None if they can."""
        least = _LEAST_TO_WHITEN * parts
        if not self.ppo.whiten_rewards or self.ppo.batch_size >= least:
            return None
        return (
            f'--ppo.batch_size {self.ppo.batch_size} in {parts_name} is too few for whitening: use'
            f' {least} or more'
        )


Training = HParams | reward_options.CommandHParams  # settings of a command that trains


def decided(hparams: hyperparams.HParams) -> dict[str, Any]:
    """Return {option: value} of settings that users choose; a group's value is 'on' or 'off'."""
    found = {}
    for name, f, value in hyperparams.settings(hparams):
        if name.startswith((*OF_ONE_START, *NOT_DECIDED)):
            continue
        if hyperparams.group_class(f.type):
            found[name] = 'off' if value is None else 'on'
        else:
            found[name] = value
    return found


def differences(hparams: hyperparams.HParams, usual: hyperparams.HParams) -> dict[str, Any]:
    """Return {option: value} of the settings in `hparams` that differ from those in `usual`.

    Options of a group that is off in `usual` are compared with their defaults.
    """
    before, fields = decided(usual), hyperparams.fields(type(hparams))
    found = {}
    for name, value in decided(hparams).items():
        default = before.get(name, fields[name].default)
        if value != default and (value, default) != ('off', None):
            found[name] = value
    return found


def task_options(task: TaskHParams, binds: Mapping[str, Any]) -> dict[str, Any]:
    """Return {option: value} of the settings in `task` that differ from an experiment's `binds`."""
    usual = TaskHParams()
    for key, value in binds.items():
        if key.startswith('task.'):
            usual.override_from_dict({key.removeprefix('task.'): value})
    return {f'task.{name}': value for name, value in differences(task, usual).items()}
