"""Quick jobs for the workers of `figures`, without torch."""

import json
import os
import sys
import time
from pathlib import Path

from lm_human_preferences.errors import UserError


def write_number(path, number, folder):
    """Leave a mark for each call, and fail while `folder` holds broken-NUMBER."""
    Path(folder, f'{number}-{time.time_ns()}').touch()
    print('number', number, 'torch' in sys.modules, os.environ['OMP_NUM_THREADS'])
    if Path(folder, f'broken-{number}').exists():
        raise UserError(f'{number} is broken')
    Path(path).write_text(str(number))


def run_policy(path, hparams, reward_model, task):
    """Write numbers that show of which run they are."""
    reward = hparams.run.seed + hparams.rewards.adaptive_kl.target / hparams.ppo.total_episodes
    Path(path).write_text(
        json.dumps(
            {
                'curve': [
                    {'episodes': 0, 'kl': 0.0, 'known_reward': 1.0},
                    {'episodes': hparams.ppo.total_episodes, 'kl': 2.0, 'known_reward': reward},
                ],
                'optimal_reward': 6.0,
            }
        )
    )


def run_reward(path, hparams):
    os.makedirs(path)


def write_frontier(path, task):
    Path(path).write_text(
        json.dumps([{'kl': kl, 'known_reward': kl**0.5} for kl in (0.0, 1.0, 2.0, 4.0)])
    )
