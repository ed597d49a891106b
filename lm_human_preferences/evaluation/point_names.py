"""What the points and curves of an evaluation are called. It loads no torch."""

from __future__ import annotations

BEST_OF = (4, 16, 64)
JUDGE = 'judge'  # what the reward is called that --judge names
OWN_OPTIMUM = 'own_optimum'  # the curve in the results of a reward that was not trained on
CURVES = ('frontier', OWN_OPTIMUM)  # what is no point among those of a reward
OWN_BEST = 'optimum_by_reward_model'  # the point of OWN_OPTIMUM at the policy's KL
FEW_SAMPLES = 10  # effective ones, below which estimates are too low to be of use
BY_REWARD_MODEL = '_by_reward_model'  # suffix of a best of n that another reward judges


def point_label(point: str, reward: str, trained_on: str = 'reward model') -> str:
    """What a point of `compare` is called where results of `reward` are shown.

    trained_on: what the reward is called that the policy was trained on.
    """
    if point == OWN_BEST:
        return f'optimum for {trained_on}'
    if point.endswith(BY_REWARD_MODEL):
        point = point.removesuffix(BY_REWARD_MODEL)
        reward = trained_on
    text = point.replace('_', ' ')
    return f'{text} by {reward}' if point.startswith('best_of_') else text
