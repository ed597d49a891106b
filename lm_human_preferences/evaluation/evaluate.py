"""How close a trained policy comes to the best one possible at its KL.

See the paper's section 3.1.1 and figure 3.
"""

from __future__ import annotations

import json
import os
import shlex
from typing import Any

from lm_human_preferences import storage
from lm_human_preferences.evaluation import kl_history, measure, picture, report
from lm_human_preferences.hparams.evaluate import HParams
from lm_human_preferences.hparams.train_policy import load_run_hparams
from lm_human_preferences.storage import outputs
from lm_human_preferences.training import precision
from lm_human_preferences.utils.core import default_device, set_seed
from lm_human_preferences.utils.logging import announce, log_line

RESULTS, PICTURE = 'evaluation.json', 'evaluation.png'


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
    output_dir = options.output_dir or ('.' if storage.is_remote(directory) else directory)
    if not ends_training:  # a training prints its table even if nothing more can be written
        outputs.check_output_dir(output_dir, RESULTS, PICTURE)
    precision.configure('fp32', default_device())  # whatever the run was trained in
    models = measure.load_models(directory, hparams)
    set_seed(options.seed)  # before the queries: some data sets are made up
    queries = measure.queries_of(hparams, models[0].encoder, options.queries, options.seed)
    kl_coef, control = options.kl_coef, None
    if options.kl_coef is None:
        kl_coef = kl_history.final_kl_coef(directory, hparams)
        control = kl_history.kl_control(directory, hparams)
    results = {
        'save_dir': save_dir,
        **measure.measure(*models, hparams.task, queries, options, kl_coef),
        'kl_coef_is_last': options.kl_coef is None,
        'kl_control': control,
    }
    # Also on a quiet console: the table is what the user asked for.
    announce(*report.table(results), '')
    _write(results, output_dir)
    log_line(
        f'Saved {RESULTS} and {PICTURE} in {save_dir if output_dir == directory else output_dir}'
    )
    if not ends_training:  # a training says itself what comes next
        log_line(
            'Sample from the policy: '
            f'./sample.py sample --save_dir {shlex.quote(save_dir)} --nsamples 8'
        )
    return results


def _write(results: dict[str, Any], output_dir: str) -> None:
    """Write the picture and the results to `output_dir`."""
    command = f'./launch.py evaluate {shlex.quote(results["save_dir"])}'
    fix = f'`{command} --output_dir ANOTHER` writes elsewhere'
    with outputs.translate_errors(output_dir, fix):
        picture.draw(results, os.path.join(output_dir, PICTURE))
        # The results come last: `is_done` looks for them.
        contents = json.dumps(results, indent=2).encode()
        storage.write_bytes(os.path.join(output_dir, RESULTS), contents)


def is_done(directory: str) -> bool:
    """Whether a run's directory holds an evaluation."""
    return os.path.exists(os.path.join(directory, RESULTS))
