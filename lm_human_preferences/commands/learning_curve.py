"""Learning curve: accuracy of a reward model by its number of labels."""

import math
import statistics
from typing import Any

import torch

from lm_human_preferences import lm_tasks, train_reward
from lm_human_preferences.distributed.comm import LocalComm
from lm_human_preferences.errors import UserError
from lm_human_preferences.plan.making import reward_phase
from lm_human_preferences.plan.phases import TrainReward
from lm_human_preferences.runs.run_files import REWARD
from lm_human_preferences.runs.run_settings import reward_settings_of
from lm_human_preferences.utils import student
from lm_human_preferences.utils.core import set_seed
from lm_human_preferences.utils.logging import progress

HELD_OUT = 0.1  # share of the questions that the accuracy is measured on, unless the run says it
PARTS = (8, 4, 2, 1)


def learning_curve(
    source: str, run: str, repetitions: int, without: str | None = None
) -> list[dict[str, Any]]:
    """Return the predictions after training as `run` on 1/8, 1/4, 1/2 and all labels.

    low, high: of each training, by the held-out labels; interval: of their mean, by both.
    """
    phase = _phase(source, run, without)
    found: dict[int, dict[str, Any]] = {}
    with progress(total=repetitions * len(PARTS), comm=LocalComm(), desc='learning curve') as bar:
        for repetition in range(repetitions):
            seed = (phase.run.seed or 0) + repetition
            for part in PARTS:
                _train_on_part(phase, part, seed, found)
                bar.update()
    curve = list(found.values())
    for row in curve:
        row['interval'] = interval_of(row)
    return curve


def interval_of(row: dict[str, Any]) -> tuple[float, float] | None:
    """Return the interval, of at least 95 %, of the mean over trainings.

    It is too wide, as trainings err in the same labels. None for one training, or few queries.
    """
    measured = row['agreement' if row['chance'] is None else 'accuracy']
    if len(measured) < 2 or (min(row['low']), max(row['high'])) in ((0, 1), (-1, 1)):
        return None
    mean = statistics.mean(measured)
    of_trainings = statistics.stdev(measured) / math.sqrt(len(measured))
    of_trainings *= student.quantile(len(measured) - 1)
    low = mean - math.hypot(mean - statistics.mean(row['low']), of_trainings)
    high = mean + math.hypot(statistics.mean(row['high']) - mean, of_trainings)
    return max(low, 0.0 if row['chance'] else -1.0), min(high, 1.0)


def _phase(source: str, run: str, without: str | None) -> TrainReward:
    """Return a training as that of `run`, on the labels of a source."""
    record = reward_settings_of(run)
    if record is None:
        raise UserError(
            f'--learning_curve: {run} has no {REWARD.settings}, which says how to train a'
            ' reward model'
        )
    record.override_from_dict(
        {
            **{f'labels.{name}': None for name in record.labels.sources()},
            'labels.source': source,
            'labels.num_train': None,
            'labels.without': without,
            'labels.held_out': record.labels.held_out or HELD_OUT,
            'labels.error': 0.0,
            'run.save_dir': None,
            'run.resume': False,
            'run.console': 'quiet',
            # Accuracy does not depend on the scale that normalisation gives.
            'normalize_samples': 0,
            'normalize_before': False,
            'normalize_after': False,
        }
    )
    return reward_phase(record)


def _train_on_part(
    phase: TrainReward, part: int, seed: int, found: dict[int, dict[str, Any]]
) -> None:
    """Add the result of a training on 1/part of the labels, unless there are too few for it."""
    set_seed(seed)
    initial_model = lm_tasks.initial_model(phase.settings.task.policy.initial_model)
    trainer = train_reward.build_trainer(phase, initial_model, LocalComm())
    count = trainer.num_train // part
    if count == 0:
        return
    order = torch.randperm(trainer.num_train, generator=torch.Generator().manual_seed(seed))
    trainer.labels = {field: values[order[:count]] for field, values in trainer.labels.items()}
    trainer.num_train = count
    trainer.prepare()
    while trainer.steps_done < trainer.total_steps:
        trainer.step()
    prediction = trainer.predict_held_out()
    if prediction is None:
        raise UserError(
            '--learning_curve: none of the few labels is held out to measure on; collect more'
        )
    row = {'labels': count, 'held_out': prediction.labels, 'chance': prediction.chance}
    row = found.setdefault(count, row)
    low, high = prediction.interval()
    measured = {'accuracy': prediction.accuracy, 'agreement': prediction.agreement}
    for name, value in {**measured, 'low': low, 'high': high}.items():
        row.setdefault(name, []).append(value)
