"""Report of runs, from their directories to one HTML file."""

import base64
import functools
import hashlib
import os
from collections.abc import Sequence
from typing import Any

import jinja2
from markupsafe import Markup

from lm_human_preferences import __version__, storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.report_page import (
    charts,
    compared_runs,
    frontier,
    label_section,
    provenance,
    sample_choice,
    training_curves,
)
from lm_human_preferences.report_page.safe_text import plain
from lm_human_preferences.run_story import facts, sentences, summary
from lm_human_preferences.run_story.commands import Experiments
from lm_human_preferences.run_story.facts import RunFacts
from lm_human_preferences.runs.run_files import POLICY

LARGEST = 2_000_000  # bytes of the file
_NAME = 80  # characters of a run's name
_LONGEST_TEXT = 20_000  # characters of what a template does not make shorter


def page(
    runs: Sequence[str],
    experiments: Experiments,
    *,
    has_names: bool = True,
    calibrate: bool = False,
) -> str:
    """Return the page of `runs`, paths or URLs. UserError where one of them is not a run."""
    found = [_facts(run) for run in runs]
    names = _names(runs)
    stories = [
        _story(name, f'r{place}', each, experiments, has_names=has_names, calibrate=calibrate)
        for place, (name, each) in enumerate(zip(names, found, strict=True))
    ]
    compared = None
    if len(found) > 1:
        compared = compared_runs.comparison(names, found, has_names=has_names)
    text = _template().render(
        title=names[0] if len(names) == 1 else f'{len(names)} runs',
        stories=stories,
        compared=compared,
        evaluation_meaning=sentences.EVALUATION,
        version=__version__,
        style=_read('style.css'),
        script=_read('script.js'),
        style_digest=_digest(_read('style.css')),
        script_digest=_digest(_read('script.js')),
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
        found = facts.of_run(run)
    except (UserError, OSError) as e:
        raise UserError(f'{run}: {e}') from e
    if found is None:
        why = 'it has no settings of a training'
        if not storage.is_remote(run) and not os.path.isdir(run):
            why = 'there is no such directory'
        raise UserError(f'{run} is not a run of this program: {why}')
    return found


def _names(runs: Sequence[str]) -> list[str]:
    """Return the runs' last names, or the last two where these are equal."""
    paths = [run if storage.is_remote(run) else os.path.abspath(run) for run in runs]
    names = [os.path.basename(path.rstrip('/')) for path in paths]
    if len(set(names)) < len(names):
        names = ['/'.join(path.rstrip('/').split('/')[-2:]) for path in paths]
    return [plain(name, _NAME) for name in names]


def _story(
    name: str,
    identity: str,
    found: RunFacts,
    experiments: Experiments,
    *,
    has_names: bool,
    calibrate: bool,
) -> dict[str, Any]:
    """Return the content of the template for one run, in the order of the sections."""
    log = found.logs.get(POLICY.command)
    has_policy = found.policy is not None or (log is not None and bool(log.curves))
    return {
        'name': name,
        'identity': identity,
        'has_policy': has_policy,
        'summary': summary.summary(found),
        'evaluation': frontier.evaluation(found.evaluation or {}, identity),
        'is_evaluated': found.evaluation is not None,
        'evaluation_settings': sentences.evaluation_settings(found),
        'samples': sample_choice.choices(found.directory, name),
        'curves': training_curves.of_run(found, identity),
        'events': list(summary.events(found)),
        'event_names': training_curves.event_names(found),
        'labels': label_section.labels(
            found, has_names=has_names, calibrate=calibrate, identity=identity
        ),
        'about_reward': list(sentences.reward(found)),
        'provenance': provenance.provenance(found, experiments, has_names=has_names),
        'not_known': list(sentences.not_known(found, has_policy=has_policy)),
    }


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True,
        finalize=_shown,
        loader=jinja2.FunctionLoader(_read),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters['plain'] = plain
    environment.filters['number'] = charts.number
    environment.globals['shape'] = charts.shape
    return environment.get_template('report.html')


def _shown(value: object) -> object:
    """Remove control characters from a value of the template."""
    is_text = isinstance(value, str) and not isinstance(value, Markup)
    return plain(value, _LONGEST_TEXT) if is_text else value


def _read(name: str) -> str:
    path = os.path.join(os.path.dirname(__file__), 'templates', name)
    with open(path, encoding='utf-8') as file:
        return file.read()


def _digest(text: str) -> str:
    """Return the digest of a script or style for the Content-Security-Policy."""
    return 'sha256-' + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
