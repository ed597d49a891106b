"""Comparison of a run's policy with the best policy of equal KL (paper, section 3.1.1)."""

import contextlib
import json
import os
from typing import Any

from lm_human_preferences import errors, lm_tasks, storage
from lm_human_preferences.errors import os_errors_as
from lm_human_preferences.evaluation import measure, report
from lm_human_preferences.hparams import policy_options
from lm_human_preferences.hparams.command_options import EvaluationHParams as HParams
from lm_human_preferences.machine import hardware, precision
from lm_human_preferences.reward_sources.sources import source_of_run
from lm_human_preferences.runs import curves, run_files, run_record
from lm_human_preferences.runs.run_files import POLICY
from lm_human_preferences.runs.run_settings import load_run_hparams
from lm_human_preferences.utils.core import set_seed
from lm_human_preferences.utils.logging import announce

PICTURE = 'evaluation.png'
KL_COEF = 'objective/kl_coef'  # tag of the KL coefficient in TensorBoard


def evaluate(save_dir: str, *, directory: str | None = None, **settings: Any) -> dict[str, Any]:
    """Compare a run's policy with the best possible policy; write and return the results.

    directory: local directory of the run if it has just been trained; None otherwise.
    """
    ends_training = directory is not None
    directory = directory or save_dir
    options = HParams()
    options.override_from_nested_dict(settings)
    hparams = load_run_hparams(directory)
    output_dir = options.output_dir or ('.' if storage.is_remote(directory) else directory)
    recording: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if not ends_training:  # after training, the table is printed even if it cannot be saved
        storage.check_output_dir(output_dir)
        if output_dir == directory:
            run_record.begin(directory, POLICY.command, hardware.description())
            recording = run_record.ended(directory, POLICY.command)
    with recording:
        results = _results(save_dir, directory, hparams, options)
        announce(*report.table(results), '')
        command = errors.typed('./launch.py evaluate', storage.absolute(save_dir))
        fix = f'; `{command} --output_dir ANOTHER` writes elsewhere'
        with os_errors_as(f'--output_dir: cannot write to {output_dir}', fix):
            report.draw(results, os.path.join(output_dir, PICTURE))
            # Write results last: a resumed training is not evaluated again if its results exist.
            contents = json.dumps(results, indent=2).encode()
            storage.write_bytes(os.path.join(output_dir, run_files.RESULTS), contents)
    place = save_dir if output_dir == directory else output_dir
    announce(f'Saved {run_files.RESULTS} and {PICTURE} in {place}')
    return results


def _results(
    save_dir: str, directory: str, hparams: policy_options.HParams, options: HParams
) -> dict[str, Any]:
    """Measure the policy of a run with the hyperparameters `hparams`; return results for JSON."""
    task = hparams.task
    source = source_of_run(hparams, directory, options.rewards.function)
    models = measure.load_models(directory, source, options.judge)
    # Evaluate in fp32, whatever precision the run was trained in.
    precision.configure_for(models.policy.model.sizes.n_embd, 'fp32')
    set_seed(options.seed)  # some data sets draw queries at random, so seeding comes first
    encoder = models.policy.encoder
    announce(*lm_tasks.query_notes(task, encoder, 'test'))
    queries = measure.queries_of(source, encoder, options.queries, options.seed)
    results: dict[str, Any] = {'save_dir': save_dir}
    if options.judge is not None:
        results['judge'] = options.judge
    results['queries_trained_on'] = measure.count_trained_on(task, encoder, queries)
    kl_coef = options.kl_coef or last_kl_coef(directory, hparams)
    return results | measure.measure(models, queries, kl_coef, options.samples, options.batch_size)


def last_kl_coef(save_dir: str, hparams: policy_options.HParams) -> float | None:
    """Return the last KL coefficient of a run; None if it changes and is not logged."""
    rewards = hparams.rewards
    if not storage.is_remote(save_dir):
        curve = curves.read(save_dir, POLICY.events).curves.get(KL_COEF)
        if curve:
            return curve[max(curve)]
    changes = rewards.adaptive_kl is not None or rewards.relative_kl_coef
    return None if changes else rewards.kl_coef
