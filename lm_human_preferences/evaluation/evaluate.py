"""Comparison of a run's policy with the best possible policy at its KL (paper, section 3.1.1)."""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import time
from typing import Any

import torch
from tqdm import tqdm

from lm_human_preferences import lm_tasks, shell, storage
from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.checkpointing.names import step_of
from lm_human_preferences.evaluation import measure, picture, report
from lm_human_preferences.hparams import policy_options
from lm_human_preferences.hparams.command_options import MOST_SAMPLES
from lm_human_preferences.hparams.command_options import EvaluationHParams as HParams
from lm_human_preferences.machine import process
from lm_human_preferences.reward_sources.sources import source_of_run
from lm_human_preferences.runs import curves, run_record
from lm_human_preferences.runs.run_files import POLICY
from lm_human_preferences.runs.run_settings import load_run_hparams
from lm_human_preferences.storage import outputs
from lm_human_preferences.training import precision
from lm_human_preferences.utils.core import set_seed
from lm_human_preferences.utils.logging import announce

NAME = 'evaluation'  # prefix of the names of the result files
KL_COEF = 'objective/kl_coef'  # tag of the KL coefficient in TensorBoard
LONGEST_WORD = 40  # most characters of an option's value in a file name
DEFAULT_SECONDS = 600  # target duration if --queries or --samples is not given
PROBE = 16  # queries in the batch that measures the speed
FEWEST_QUERIES, FEWEST_SAMPLES = 2, 64  # lowest numbers that are chosen to save time


def evaluate(save_dir: str, *, directory: str | None = None, **settings: Any) -> dict[str, Any]:
    """Compare a run's policy with the best possible policy; write and return the results."""
    ends_training = directory is not None
    directory = directory or save_dir
    options = HParams()
    options.override_from_nested_dict(settings)
    hparams = load_run_hparams(directory)
    names = file_names(options)
    output_dir = options.output_dir or ('.' if storage.is_remote(directory) else directory)
    if not ends_training:  # a training prints its table even if nothing more can be written
        outputs.check_output_dir(output_dir)
    recording: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if output_dir == directory and not ends_training:
        run_record.begin(directory, POLICY.command, process.hardware())
        recording = run_record.ended(directory, POLICY.command)
    with recording:
        results = _results(save_dir, directory, hparams, options)
        announce(*report.table(results), '')
        command = shell.typed('./launch.py evaluate', storage.absolute(save_dir))
        fix = f'`{command} --output_dir ANOTHER` writes elsewhere'
        with outputs.translate_errors(output_dir, fix):
            picture.draw(results, os.path.join(output_dir, names[1]))
            # The results come last: a resumed training looks for them.
            contents = json.dumps(results, indent=2).encode()
            storage.write_bytes(os.path.join(output_dir, names[0]), contents)
    announce(
        f'Saved {" and ".join(names)} in {save_dir if output_dir == directory else output_dir}'
    )
    if not ends_training:  # a training prints its own next commands
        path = storage.absolute(save_dir)
        command = shell.typed('./sample.py sample --save_dir', path, '--nsamples', '8')
        announce(f'Sample from the policy: {command}')
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
    set_seed(options.seed)  # before the queries, as some data sets generate them at random
    encoder = models.policy.encoder
    announce(*lm_tasks.query_notes(task, encoder, 'test'))
    queries = measure.queries_of(source, encoder, options.queries, options.seed)
    if not measure.can_enumerate(models):
        queries, options = fitted(models, queries, options)
    trained_on = measure.count_trained_on(task, encoder, queries)
    kl_coef = options.kl_coef
    if kl_coef is None:
        kl_coef = last_kl_coef(directory, hparams)
    return {
        'save_dir': save_dir,
        **({'judge': options.judge} if options.judge is not None else {}),
        **measure.measure(
            models,
            queries,
            kl_coef,
            samples=options.samples,
            batch_size=options.batch_size,
            are_chosen=options.queries is not None,
        ),
        'queries_trained_on': trained_on,
        'kl_coef_is_last': options.kl_coef is None,
        'step': _step_of(directory),
    }


def _step_of(directory: str) -> int | None:
    """Return the step of the latest policy checkpoint in a local run; None for a remote run."""
    latest = None
    if not storage.is_remote(directory):
        latest = checkpoints.latest(storage.join(directory, POLICY.finished))
    return None if latest is None else step_of(latest)


def file_names(options: HParams) -> tuple[str, str]:
    """Return file names for the JSON and the PNG, which contain options other than the defaults."""
    defaults = HParams()
    words = [NAME]
    for field in dataclasses.fields(HParams):
        value = getattr(options, field.name)
        if field.name not in ('rewards', 'output_dir') and value != getattr(defaults, field.name):
            words.append(f'{field.name}_{_in_a_name(value)}')
    name = '-'.join(words)
    return f'{name}.json', f'{name}.png'


def _in_a_name(value: Any) -> str:
    """Return an option's value as a part of a file name; add a digest if characters are changed."""
    text = str(value)
    readable = re.sub(r'[^a-z0-9_.]+', '-', text.lower())[-LONGEST_WORD:].strip('-.')
    if readable == text:
        return text
    return f'{readable}-{hashlib.sha256(text.encode()).hexdigest()[:8]}'


def last_kl_coef(save_dir: str, hparams: policy_options.HParams) -> float | None:
    """Return the last KL coefficient of a run; None if it changes in the run and is not logged."""
    rewards = hparams.rewards
    if not storage.is_remote(save_dir):
        curve = curves.read(save_dir, POLICY.events).curves.get(KL_COEF)
        if curve:
            return curve[-1]
    changes = rewards.adaptive_kl is not None or rewards.relative_kl_coef
    return None if changes else rewards.kl_coef


def affordable_sizes(
    queries: int, samples: int | None, affordable: float, may_cut: bool
) -> tuple[int, int]:
    """Return (queries, samples per query), reduced to about `affordable` samples in total."""
    if samples is None:
        fitting = int(affordable // queries)
        samples = min(MOST_SAMPLES, max(FEWEST_SAMPLES, fitting))
    if may_cut:
        queries = min(queries, max(FEWEST_QUERIES, int(affordable // samples)))
    return queries, samples


def fitted(
    models: measure.Models, queries: torch.Tensor, settings: HParams
) -> tuple[torch.Tensor, HParams]:
    """Return (queries, settings) that take about DEFAULT_SECONDS; the user's numbers are kept."""
    some, seconds = queries[:PROBE], 0.0
    with torch.random.fork_rng():
        for _ in range(2):  # the first iteration is a warm-up, in which weights are prepacked
            started = time.monotonic()
            measure.sample_many(models, some, 1, settings.batch_size, 'first samples')
            seconds = (time.monotonic() - started) / len(some)
    count, samples = affordable_sizes(
        len(queries), settings.samples, DEFAULT_SECONDS / seconds, may_cut=settings.queries is None
    )
    duration = tqdm.format_interval(count * samples * seconds)
    announce(
        f'Estimating from {samples} samples of both models to each of {count} queries, in about'
        f' {duration}; --samples and --queries change that'
    )
    if count < len(queries):
        generator = torch.Generator().manual_seed(settings.seed)
        queries = queries[torch.randperm(len(queries), generator=generator)[:count]]
    return queries, dataclasses.replace(settings, samples=samples)
