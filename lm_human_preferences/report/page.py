"""`./launch.py report`: one HTML file about runs, from their directories."""

import os
from collections.abc import Sequence
from typing import Any

import click

from lm_human_preferences import __version__, storage
from lm_human_preferences.errors import OptionError, UserError, about_option
from lm_human_preferences.hparams.differences import Experiments
from lm_human_preferences.report import facts, foreign_text, label_facts, words
from lm_human_preferences.report.charts import LOOKS, training_chart
from lm_human_preferences.report.foreign_text import environment
from lm_human_preferences.report.origin import differences_between, origin
from lm_human_preferences.report.run import Run, read_run
from lm_human_preferences.report.words import Table
from lm_human_preferences.runs.run_files import REPORT
from lm_human_preferences.storage import outputs


def write_report(
    runs: Sequence[str],
    experiments: Experiments,
    output: str | None = None,
    names: bool = True,
) -> None:
    """Write the page of `runs`, paths or URLs. For the options see ReportHParams."""
    runs = list(dict.fromkeys(run.rstrip('/') or run for run in runs))
    is_here = len(runs) > 1 or storage.is_remote(runs[0])
    path = output or (REPORT if is_here else os.path.join(runs[0], REPORT))
    if storage.is_remote(path):
        raise OptionError('--output', f'{path}: give a file on this machine')
    text = page(runs, experiments, has_names=names)
    with about_option('--output'):
        outputs.write_file(path, text.encode(errors='replace'))
    click.echo(f'The report is in {path}')
    click.echo('Open it in a browser, or send it: the one file is all of it')


def page(runs: Sequence[str], experiments: Experiments, *, has_names: bool = True) -> str:
    """Return the page of `runs`, paths or URLs. UserError where one of them is not a run."""
    named = list(zip(_names(runs), map(_read, runs), strict=True))
    stories = []
    if len(named) > 1:
        stories.append(_compared(named, has_names=has_names))
    for name, run in named:
        story = _story(name, run, experiments, has_names=has_names)
        if len(named) == 1:
            story['sections'][words.GAIN].append(training_chart(named))
            story['sections'][words.SAYS].append(facts.samples([run], ['After']))
        stories.append(story)
    template = environment(foreign_text.inline).get_template('page.html')
    return template.render(stories=stories, version=__version__)


def _story(name: str, run: Run, experiments: Experiments, *, has_names: bool) -> dict[str, Any]:
    """Return what the page has about a run."""
    names = label_facts.shown_names(run, has_names=has_names)
    return {
        'name': name,
        'head': facts.head(run),
        'answer': facts.answer(run),
        'mind': facts.mind(run),
        'sections': {
            words.LEARN: [facts.task(run), label_facts.examples(run, names)],
            words.GAIN: [facts.gain(run)],
            words.SAYS: [],
            words.SURE: [facts.sure(run)],
            words.LABELS: [label_facts.counts(run), label_facts.labellers(run, names)],
            words.MADE: origin(run, experiments, has_names=has_names),
        },
    }


def _compared(named: Sequence[tuple[str, Run]], *, has_names: bool) -> dict[str, Any]:
    """Return what compares several runs."""
    names, runs = zip(*named, strict=True)
    answers = [{name: value for name, value, _ in facts.answer(run)} for run in runs]
    columns = dict.fromkeys(name for each in answers for name in each)
    results = []
    for name, each in zip(names, answers, strict=True):
        results.append((name, *(each.get(column, '–') for column in columns)))
    samples = []
    for start in range(0, len(runs), 3):
        samples.append(facts.samples(runs[start : start + 3], names[start : start + 3]))
    return {
        'name': f'{len(named)} runs',
        'sections': {
            words.GAIN: [Table(['Run', *columns], results), training_chart(named[: len(LOOKS)])],
            words.SAYS: samples,
            words.MADE: [differences_between(runs, names, has_names=has_names)],
        },
    }


def _read(path: str) -> Run:
    try:
        found = read_run(path)
    except (UserError, OSError) as e:
        raise UserError(f'{path}: {e}') from e
    if found is None:
        raise UserError(f'{path} is not a run of this program: it has no settings of a training')
    return found


def _names(runs: Sequence[str]) -> list[str]:
    """Return the runs' last names, or the last two where these are equal."""
    paths = [run if storage.is_remote(run) else os.path.abspath(run) for run in runs]
    names = [os.path.basename(path) for path in paths]
    if len(set(names)) < len(names):
        names = ['/'.join(path.split('/')[-2:]) for path in paths]
    return names
