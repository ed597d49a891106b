"""Controllers of beta, the weight of the KL penalty (paper, section 2.2)."""

import numpy as np

from lm_human_preferences.hparams.algorithm_options import MOST_KL_ERROR, AdaptiveKLParams


class FixedKLController:
    """Constant KL coefficient."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current: float, n_steps: int) -> None:
        """Do nothing: the coefficient is constant."""


class AdaptiveKLController:
    """KL coefficient that adapts, to hold the KL divergence near a target."""

    def __init__(self, init_kl_coef: float, params: AdaptiveKLParams) -> None:
        self.value = init_kl_coef
        self.params = params

    def update(self, current: float, n_steps: int) -> None:
        """Adapt after a step. current: the step's KL in nats. n_steps: its number of episodes."""
        proportional_error = np.clip(
            current / self.params.target - 1, -MOST_KL_ERROR, MOST_KL_ERROR
        )
        self.value *= float(1 + proportional_error * n_steps / self.params.horizon)


KLController = FixedKLController | AdaptiveKLController


def make_kl_controller(kl_coef: float, adaptive_kl: AdaptiveKLParams | None) -> KLController:
    """Return the controller for --rewards.kl_coef and --rewards.adaptive_kl."""
    if adaptive_kl is None:
        return FixedKLController(kl_coef)
    return AdaptiveKLController(kl_coef, adaptive_kl)
