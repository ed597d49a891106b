"""Dry run: print what a plan would start, and what of it could not be checked on this machine."""

from collections.abc import Collection

from lm_human_preferences import session
from lm_human_preferences.distributed.engines import expected_engine
from lm_human_preferences.plan import checks
from lm_human_preferences.plan.making import Settings, make_plan
from lm_human_preferences.plan.trial import Trial
from lm_human_preferences.runs import run_dir
from lm_human_preferences.utils.core import default_device


def dry_run(
    settings: Settings, ranks: int, overwrite: bool, explicitly_set: Collection[str]
) -> list[str]:
    """Check a training; return the lines to print. UserError if it could not start."""
    checks.check_settings(settings, ranks)
    elsewhere = run_dir.check_run(settings, overwrite=overwrite, explicitly_set=explicitly_set)
    settings.override_from_dict(session.pins(settings, ask=False))
    trial = Trial(make_plan(settings, ask=False), ranks, unchecked=elsewhere)
    trial.make()
    save_dir = settings.run.save_dir
    place = f'would write to {save_dir}' if save_dir else 'would save nothing'
    lines = [_start(settings, ranks), place, *trial.query_notes, *_memory(trial)]
    lines += checks.notes(settings)
    if trial.unchecked:
        names = ', '.join(trial.unchecked)
        lines.append(f'not checked, because it is not on this machine: {names}')
    return lines


def _start(settings: Settings, ranks: int) -> str:
    device = 'GPU' if default_device().type == 'cuda' else 'CPU'
    if ranks == 1:
        return f'would start 1 rank on a {device}, {settings.run.precision}'
    engine = expected_engine(settings.run.allreduce)
    return (
        f'would start {ranks} ranks on {device}s, {settings.run.precision}, averaging gradients by'
        f' {engine}'
    )


def _memory(trial: Trial) -> list[str]:
    if not trial.estimates:
        return []
    free = trial.free_memory()
    device = default_device()
    peak = max(estimate.peak(device) for estimate in trial.estimates)
    warnings = [estimate.warning(device, free) for estimate in trial.estimates]
    return [
        f'memory expected: {peak / 1e9:.2f} GB for each rank, which has {free / 1e9:.1f} GB',
        *filter(None, warnings),
    ]
