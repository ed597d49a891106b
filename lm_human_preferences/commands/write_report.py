"""`./launch.py report`: one HTML page about runs."""

import os
from collections.abc import Sequence

import click

from lm_human_preferences import storage
from lm_human_preferences.errors import OptionError, about_option
from lm_human_preferences.report_page import render
from lm_human_preferences.run_story.commands import Experiments
from lm_human_preferences.runs.run_files import REPORT
from lm_human_preferences.storage import outputs


def write_report(
    runs: Sequence[str],
    experiments: Experiments,
    output: str | None = None,
    names: bool = True,
    rewards: bool = False,
) -> None:
    """Write the page of `runs`, paths or URLs. For the options see ReportHParams."""
    runs = list(dict.fromkeys(run.rstrip('/') or run for run in runs))
    path = output or _usual_path(runs)
    if storage.is_remote(path):
        raise OptionError('--output', f'{path}: give a file on this machine')
    if os.path.isdir(path):
        raise OptionError('--output', f'{path} is a directory: give a file in it')
    text = render.page(runs, experiments, has_names=names, calibrate=rewards)
    with about_option('--output'):
        outputs.write_file(path, text.encode(errors='replace'))
    click.echo(f'The report is in {path}')
    click.echo('Open it in a browser, or send it: the one file is all of it')


def _usual_path(runs: Sequence[str]) -> str:
    if len(runs) > 1 or storage.is_remote(runs[0]):
        return REPORT
    return os.path.join(runs[0], REPORT)
