"""How close a trained policy comes to the best one possible at its KL.

See the paper's section 3.1.1 and figure 3.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
from typing import Any

from lm_human_preferences import lm_tasks, shell, storage
from lm_human_preferences.datasets import registry
from lm_human_preferences.evaluation import kl_history, measure, picture, report
from lm_human_preferences.hparams import policy_options
from lm_human_preferences.hparams.evaluation_options import HParams
from lm_human_preferences.machine.inventory import inventory
from lm_human_preferences.runs import command_record
from lm_human_preferences.runs.run_files import POLICY, RESULTS
from lm_human_preferences.runs.run_settings import load_run_hparams
from lm_human_preferences.storage import outputs
from lm_human_preferences.training import precision
from lm_human_preferences.utils.core import set_seed
from lm_human_preferences.utils.logging import announce, log_line

NAME = 'evaluation'  # of the files, with default settings
LONGEST_WORD = 40  # of a text in a file's name


def evaluate(save_dir: str, *, directory: str | None = None, **settings: Any) -> dict[str, Any]:
    """Compare the policy of a run with the best one possible: a table, a JSON file, a picture.

    save_dir: a run of train_policy, local or remote. directory: where its files are, given by a
    training that ends with an evaluation. settings: HParams of this command. Returns the results.
    The table is printed before anything is written.
    """
    ends_training = directory is not None
    directory = directory or save_dir
    options = HParams(**settings)
    hparams = load_run_hparams(directory)
    names = file_names(options)
    output_dir = options.output_dir or ('.' if storage.is_remote(directory) else directory)
    if not ends_training:  # a training prints its table even if nothing more can be written
        outputs.check_output_dir(output_dir, *names)
    recording: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if output_dir == directory and not ends_training:
        recording = command_record.recorded(directory, POLICY, inventory())
    with recording:
        results = _results(save_dir, directory, hparams, options)
        # Also on a quiet console: the table is what the user asked for.
        announce(*report.table(results), '')
        _write(results, output_dir, names)
    log_line(
        f'Saved {" and ".join(names)} in {save_dir if output_dir == directory else output_dir}'
    )
    if not ends_training:  # a training says itself what comes next
        command = shell.typed('./sample.py sample --save_dir', save_dir, '--nsamples', '8')
        log_line(f'Sample from the policy: {command}')
    return results


def _results(
    save_dir: str, directory: str, hparams: policy_options.HParams, options: HParams
) -> dict[str, Any]:
    """What is measured of the policy of a run, whose hyperparameters are `hparams`; for JSON."""
    models = measure.load_models(directory, hparams, options.judge)
    # Whatever the run was trained in.
    precision.configure_for(models[0].model.hparams.n_embd, 'fp32')
    set_seed(options.seed)  # before the queries: some data sets are made up
    encoder = models[0].encoder
    log_line(*lm_tasks.query_notes(hparams.task, encoder, 'test'))
    queries = measure.queries_of(hparams, encoder, options.queries, options.seed)
    kl_coef, control = options.kl_coef, None
    if options.kl_coef is None:
        kl_coef = kl_history.final_kl_coef(directory, hparams)
        control = kl_history.kl_control(directory, hparams)
    return {
        'save_dir': save_dir,
        **({'judge': options.judge} if options.judge is not None else {}),
        **measure.measure(*models, hparams.task, queries, options, kl_coef),
        'kl_coef_is_last': options.kl_coef is None,
        'kl_control': control,
    }


def file_names(options: HParams) -> tuple[str, str]:
    """The names of the results and of the picture.

    They tell which settings are not the defaults: a smaller evaluation, for instance, does not
    overwrite the full one.
    """
    defaults = HParams()
    words = [NAME]
    for field in dataclasses.fields(HParams):
        value = getattr(options, field.name)
        if field.name != 'output_dir' and value != getattr(defaults, field.name):
            words.append(f'{field.name}_{_in_a_name(value)}')
    name = '-'.join(words)
    return f'{name}.json', f'{name}.png'


def _in_a_name(value: Any) -> str:
    """The value of a setting as a part of a file's name; a text also by its digest."""
    if not isinstance(value, str):
        return str(value)
    readable = re.sub(r'[^a-z0-9_.]+', '-', value.lower())[-LONGEST_WORD:].strip('-.')
    if readable == value:
        return value
    return f'{readable}-{hashlib.sha256(value.encode()).hexdigest()[:8]}'


def _write(results: dict[str, Any], output_dir: str, names: tuple[str, str]) -> None:
    """Write the results and the picture to the files `names` in `output_dir`."""
    results_name, picture_name = names
    command = shell.typed('./launch.py evaluate', results['save_dir'])
    fix = f'`{command} --output_dir ANOTHER` writes elsewhere'
    with outputs.translate_errors(output_dir, fix):
        picture.draw(results, os.path.join(output_dir, picture_name))
        # The results come last: `after_training` looks for them.
        contents = json.dumps(results, indent=2).encode()
        storage.write_bytes(os.path.join(output_dir, results_name), contents)


def check_queries(hparams: policy_options.HParams) -> None:
    """UserError if a policy that is trained on a user's own file could not be evaluated.

    hparams: train_policy's.
    """
    if hparams.task.query_dataset not in registry.DATASETS:
        encoding = lm_tasks.initial_encoding(hparams.task.policy.initial_model)
        measure.queries_of(hparams, encoding.get_encoder(), None)


def after_training(hparams: policy_options.HParams, *, has_trained: bool) -> None:
    """Evaluate a saved policy, unless it was finished and evaluated before this command.

    hparams: train_policy's. has_trained: whether this command has taken a step.
    """
    save_dir = hparams.run.save_dir
    directory = hparams.run.directory
    if save_dir is None or directory is None:
        return
    if not has_trained and os.path.exists(os.path.join(directory, RESULTS)):
        return
    evaluate(save_dir, directory=directory)
