"""`./launch.py report`: one HTML file about runs, from their directories."""

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import click

from lm_human_preferences import __version__, storage
from lm_human_preferences.errors import OptionError, UserError, about_option
from lm_human_preferences.hparams.policy_options import Experiments
from lm_human_preferences.report import facts, origin, texts
from lm_human_preferences.report.charts import LOOKS, training_chart
from lm_human_preferences.report.facts import Table
from lm_human_preferences.report.run import Run, read_run
from lm_human_preferences.runs.run_files import REPORT

LEARN, GAIN, SAYS, SURE, LABELS, MADE = (  # sections
    'What it was to learn',
    'Whether it did',
    'What it says now',
    'How sure',
    'Labels',
    'How it was made',
)


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
        storage.write_file(path, text.encode(errors='replace'))
    click.echo(f'The report is in {path}')
    click.echo('Open it in a browser, or send it: the one file is all of it')


def page(runs: Sequence[str], experiments: Experiments, *, has_names: bool = True) -> str:
    """Return the HTML page about `runs`, paths or URLs. UserError if one of them is not a run."""
    paths = [run if storage.is_remote(run) else os.path.abspath(run) for run in runs]
    paths = list(dict.fromkeys(paths))
    named = dict(zip(_names(paths), map(_read, paths), strict=True))
    stories = [_story(name, run, experiments, has_names) for name, run in named.items()]
    columns = ['After']
    if len(named) > 1:
        columns = list(named)
        stories.insert(0, _comparison(named, has_names))
    sections = stories[0]['sections']
    sections[GAIN].append(training_chart(dict(itertools.islice(named.items(), len(LOOKS)))))
    for start in range(0, len(paths), 3):
        part = slice(start, start + 3)
        sections[SAYS].append(facts.samples(list(named.values())[part], columns[part]))
    template = texts.environment(texts.inline).get_template('page.html')
    return template.render(stories=stories, version=__version__)


def _names(paths: Sequence[str]) -> list[str]:
    """Return a short name for each of different paths: its last parts, as many as are needed."""
    for count in itertools.count(1):
        names = ['/'.join(path.split('/')[-count:]) for path in paths]
        if len(set(names)) == len(paths):
            return names
    raise AssertionError


def _read(path: str) -> Run:
    try:
        found = read_run(path)
    except (UserError, OSError) as e:
        raise UserError(f'{path}: {e}') from e
    if found is None:
        raise UserError(f'{path} is not a run of this program: it has no settings of a training')
    return found


def _story(name: str, run: Run, experiments: Experiments, has_names: bool) -> dict[str, Any]:
    """Return the content of the page about one run, for the template."""
    labellers = {}
    for number, labeller in enumerate(run.trainer.label_report.get('labellers', ()), start=1):
        labellers[labeller] = labeller if has_names else f'labeller {number}'
    settings = {'This run': run.settings, 'Experiment': origin.of_experiment(run, experiments)}
    return {
        'name': name,
        'head': facts.head(run),
        'answer': facts.answer(run),
        'mind': facts.mind(run),
        'sections': {
            LEARN: [facts.task(run), origin.examples(run, labellers)],
            GAIN: [facts.gain(run)],
            SAYS: [],
            SURE: [facts.sure(run)],
            LABELS: [origin.counts(run), origin.labellers(run, labellers)],
            MADE: [origin.origin(run, has_names), origin.differences(settings, has_names)],
        },
    }


def _comparison(named: Mapping[str, Run], has_names: bool) -> dict[str, Any]:
    """Return the content of the page that compares several runs {name: run}, for the template."""
    answers = {}
    for name, run in named.items():
        answers[name] = {about: value for about, value, _ in facts.answer(run)}
    columns = list(dict.fromkeys(itertools.chain.from_iterable(answers.values())))
    rows = []
    for name, values in answers.items():
        rows.append((name, *(values.get(column, '–') for column in columns)))
    settings = {name: run.settings for name, run in named.items()}
    return {
        'name': f'{len(named)} runs',
        'sections': {
            GAIN: [Table(['Run', *columns], rows)],
            SAYS: [],
            MADE: [origin.differences(settings, has_names)],
        },
    }
