"""`./launch.py report`: one HTML file about runs, from their directories."""

import base64
import functools
import hashlib
import os
from collections.abc import Sequence

import click
import jinja2
from markupsafe import Markup, escape

from lm_human_preferences import __version__, storage
from lm_human_preferences.errors import OptionError, UserError, about_option
from lm_human_preferences.hparams.differences import Experiments
from lm_human_preferences.report_page import (
    charts,
    compared_runs,
    frontier,
    label_section,
    provenance,
    sample_choice,
    training_curves,
)
from lm_human_preferences.report_page.safe_text import LONGEST, plain
from lm_human_preferences.run_story import facts, words
from lm_human_preferences.run_story.facts import RunFacts
from lm_human_preferences.runs import run_record
from lm_human_preferences.runs.run_files import REPORT
from lm_human_preferences.storage import outputs

LARGEST = 2_000_000  # bytes of the file
_NAME = 80  # characters of a run's name
_LONGEST_COMMAND = 20_000  # characters


def write_report(
    runs: Sequence[str],
    experiments: Experiments,
    output: str | None = None,
    names: bool = True,
) -> None:
    """Write the page of `runs`, paths or URLs. For the options see ReportHParams."""
    runs = list(dict.fromkeys(run.rstrip('/') or run for run in runs))
    path = output or _usual_path(runs)
    if storage.is_remote(path):
        raise OptionError('--output', f'{path}: give a file on this machine')
    if os.path.isdir(path):
        raise OptionError('--output', f'{path} is a directory: give a file in it')
    text = page(runs, experiments, has_names=names)
    with about_option('--output'):
        outputs.write_file(path, text.encode(errors='replace'))
    click.echo(f'The report is in {path}')
    click.echo('Open it in a browser, or send it: the one file is all of it')


def _usual_path(runs: Sequence[str]) -> str:
    if len(runs) > 1 or storage.is_remote(runs[0]):
        return REPORT
    return os.path.join(runs[0], REPORT)


def page(runs: Sequence[str], experiments: Experiments, *, has_names: bool = True) -> str:
    """Return the page of `runs`, paths or URLs. UserError where one of them is not a run."""
    found = [_facts(run) for run in runs]
    names = _names(runs)
    stories = []
    for place, (name, each) in enumerate(zip(names, found, strict=True)):
        identity = f'r{place}'
        stories.append(
            {
                'name': name,
                'identity': identity,
                'facts': each,
                'evaluation': frontier.evaluation(each.evaluation or {}, identity),
                'samples': sample_choice.choices(each.directory, name),
                'charts': training_curves.charts_of_training(each, identity),
                'labels': label_section.labels(each, has_names=has_names),
                'provenance': provenance.provenance(each, experiments, has_names=has_names),
            }
        )
    compared = None
    if len(found) > 1:
        compared = compared_runs.comparison(names, found, has_names=has_names)
    text = _template('report.html').render(
        title=names[0] if len(names) == 1 else f'{len(names)} runs',
        stories=stories,
        compared=compared,
        packages=('lm-human-preferences', 'python', *run_record.PACKAGES),
        version=__version__,
    )
    size = len(text.encode())
    if size > LARGEST:
        raise UserError(
            f'the page would have {size / 1e6:.1f} MB, more than {LARGEST / 1e6:.0f}: give fewer'
            ' runs at a time'
        )
    return text


def _facts(run: str) -> RunFacts:
    try:
        found = facts.read_run(run)
    except (UserError, OSError) as e:
        raise UserError(f'{run}: {e}') from e
    if found is None:
        why = 'it has no settings of a training'
        if not storage.is_remote(run) and not os.path.isdir(run):
            why = 'no such directory'
        raise UserError(f'{run} is not a run of this program: {why}')
    return found


def _names(runs: Sequence[str]) -> list[str]:
    """Return the runs' last names, or the last two where these are equal."""
    paths = [run if storage.is_remote(run) else os.path.abspath(run) for run in runs]
    names = [os.path.basename(path.rstrip('/')) for path in paths]
    if len(set(names)) < len(names):
        names = ['/'.join(path.rstrip('/').split('/')[-2:]) for path in paths]
    return [plain(name, _NAME) for name in names]


def _template(name: str) -> jinja2.Template:
    environment = words.environment(
        os.path.join(os.path.dirname(__file__), 'templates'),
        _escaped,
        digest=_digest,
        duration=provenance.duration,
        number=charts.number,
        plain=plain,
        whole=_whole,
    )
    return environment.get_template(name)


def _escaped(text: str, longest: int = LONGEST) -> Markup:
    """Escape HTML, control characters, and line breaks, as lines of words.jinja are sentences."""
    return escape(plain(text, longest)).replace('\n', Markup('&#10;'))


_whole = functools.partial(_escaped, longest=_LONGEST_COMMAND)


def _digest(text: str) -> str:
    """Return the digest of a script or style for the Content-Security-Policy."""
    return 'sha256-' + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
