"""Hyperparameters of PPO (in the original's train_policy.py)."""

from dataclasses import dataclass

from lm_human_preferences.utils import hyperparams
from lm_human_preferences.utils.hyperparams import option, own_option
from lm_human_preferences.utils.option_checks import ceil_div

MOST_KL_ERROR = 0.2  # adaptive KL: the relative error of a step is clipped to this
MOST_AT_A_TIME = 1_000_000  # responses in a batch; no memory holds many more


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
        64, 'responses per step, over all ranks', at_least=1, at_most=MOST_AT_A_TIME
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
