"""Learning curve: accuracy of a reward model by its number of labels.

    pipenv run python benchmarks/learning_curve.py FOLDER RUN [N]

trains N reward models (1), with the settings of RUN's, on 1/8, 1/4, 1/2 and all of the labels of
FOLDER, and prints how often they predict the labels that are held out. If that still rises, more
labels will help; how far two trainings on as many labels differ says what is noise.
"""

import copy
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lm_human_preferences import lm_tasks, train_reward
from lm_human_preferences.distributed.comm import LocalComm
from lm_human_preferences.errors import UserError
from lm_human_preferences.evaluation.reward_on_labels import RECORD, record_of
from lm_human_preferences.hparams.reward_options import HParams
from lm_human_preferences.plan.making import reward_phase
from lm_human_preferences.utils.core import set_seed
from lm_human_preferences.utils.logging import progress

HELD_OUT = 0.1  # share of the questions that the accuracy is measured on, unless the run says it
PARTS = (8, 4, 2, 1)


def learning_curve(source: str, run: str, repetitions: int) -> list[dict[str, Any]]:
    """Return the predictions after training as `run` on 1/8, 1/4, 1/2 and all labels.

    low, high: of each training, by the held-out labels.
    """
    hparams = _settings(source, run)
    found: dict[int, dict[str, Any]] = {}
    with progress(total=repetitions * len(PARTS), comm=LocalComm(), desc='learning curve') as bar:
        for repetition in range(repetitions):
            seed = (hparams.run.seed or 0) + repetition
            for part in PARTS:
                _train_on_part(hparams, part, seed, found)
                bar.update()
    return list(found.values())


def _settings(source: str, run: str) -> HParams:
    record = record_of(run)
    if record is None:
        raise UserError(f'{run} has no {RECORD}, which says how to train a reward model')
    hparams = copy.deepcopy(record)
    hparams.override_from_dict(
        {
            **{f'labels.{name}': None for name in record.labels.sources()},
            'labels.source': source,
            'labels.num_train': None,
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
    return hparams


def _train_on_part(
    hparams: HParams, part: int, seed: int, found: dict[int, dict[str, Any]]
) -> None:
    """Add the result of a training on 1/part of the labels, unless there are too few for it."""
    set_seed(seed)
    initial_model = lm_tasks.initial_model(hparams.task.policy.initial_model)
    trainer = train_reward.build_trainer(reward_phase(hparams), initial_model, LocalComm())
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
        raise UserError('none of the few labels is held out to measure on; collect more')
    row = {'labels': count, 'held_out': prediction.labels, 'chance': prediction.chance}
    row = found.setdefault(count, row)
    low, high = prediction.interval()
    measured = {'accuracy': prediction.accuracy, 'agreement': prediction.agreement}
    for name, value in {**measured, 'low': low, 'high': high}.items():
        row.setdefault(name, []).append(value)


def main(source: str, run: str, repetitions: str = '1') -> None:
    """Print a line for each number of labels."""
    for row in learning_curve(source, run, int(repetitions)):
        name = 'agreement' if row['chance'] is None else 'accuracy'
        each = ', '.join(f'{number:.3f}' for number in row[name])
        mean = statistics.mean(row[name])
        print(f'{row["labels"]:6} labels: {name} {mean:.3f} ({each}), {row["held_out"]} held out')


if __name__ == '__main__':
    main(*sys.argv[1:])
