"""The KL coefficient of a run over time, read from its TensorBoard events."""

from __future__ import annotations

import glob
import os
from typing import Any

import numpy as np

from lm_human_preferences.hparams import policy_options
from lm_human_preferences.utils.core import ceil_div

TAG = 'objective/kl_coef'


def logged_kl_coefs(save_dir: str) -> list[float]:
    """The KL coefficient of each step of the run in `save_dir`; empty if there are no events."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import (
        Event,  # pyright: ignore[reportAttributeAccessIssue]  protobuf makes it at run time
    )

    coefficients = {}
    pattern = os.path.join(glob.escape(save_dir), 'tb', 'ppo', 'events.out.tfevents.*')
    for path in sorted(glob.glob(pattern)):  # a later file continues an earlier one
        for record in RawEventFileLoader(path).Load():
            event = Event.FromString(record)
            for value in event.summary.value:
                if value.tag == TAG:
                    coefficients[event.step] = value.simple_value
    return [coefficients[step] for step in sorted(coefficients)]


def final_kl_coef(save_dir: str, hparams: policy_options.HParams) -> float | None:
    """The KL coefficient in force at the last step of the run in `save_dir`.

    It is the one that was logged: a run that was resumed may have ended with another one than it
    began with. Without events it is that of `hparams`, or None if it adapted.
    """
    logged = logged_kl_coefs(save_dir)
    given = hparams.rewards.kl_coef
    if not logged:
        return None if hparams.rewards.adaptive_kl else given
    is_unchanged = logged[-1] == np.float32(given)  # events are float32
    return given if is_unchanged else logged[-1]


def kl_control(save_dir: str, hparams: policy_options.HParams) -> dict[str, Any] | None:
    """How the KL coefficient was steered in the last tenth of a run; None if it was fixed.

    Returns the target of the KL in nats, the steps of the run and of its last tenth, and the
    coefficients at the first and the last of these.
    """
    logged = logged_kl_coefs(save_dir)
    if hparams.rewards.adaptive_kl is None or not logged:
        return None
    recent = logged[-max(2, ceil_div(len(logged), 10)) :]
    return {
        'target': hparams.rewards.adaptive_kl.target,
        'steps': len(logged),
        'recent_steps': len(recent),
        'kl_coef_before': recent[0],
        'kl_coef': recent[-1],
    }
