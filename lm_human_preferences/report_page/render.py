"""From the directories of runs to one HTML file."""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import os
from collections.abc import Sequence

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
from lm_human_preferences.storage import outputs

LARGEST = 2_000_000  # bytes of the file
_NAME = 80  # characters of a run's name
_LONGEST_TEXT = 20_000  # characters of what a template does not make shorter


@dataclasses.dataclass(frozen=True)
class Asked:
    """What the user wants of a page.

    has_names: whether labellers are named. calibrate: whether reward models are asked for their
    opinion of the labels.
    """

    has_names: bool = True
    calibrate: bool = False


@dataclasses.dataclass(frozen=True)
class Story:
    """A run as the template reads it; each field is a section, in their order."""

    name: str
    identity: str
    has_policy: bool
    what_happened: list[str]
    evaluation: frontier.Evaluation | None
    is_evaluation_damaged: bool
    samples: list[sample_choice.Choice]
    curves: list[charts.Chart]
    reward_curves: list[charts.Chart]
    happened: list[str]
    labels: label_section.Labels | None
    about_reward: list[str]
    provenance: provenance.Provenance
    not_known: list[str]


def page(runs: Sequence[str], experiments: Experiments, asked: Asked) -> str:
    """The page of `runs`, paths or URLs. UserError where one of them is no run."""
    found = [_facts(run) for run in runs]
    names = _names(runs)
    stories = [
        _story(name, f'r{place}', each, experiments, asked)
        for place, (name, each) in enumerate(zip(names, found, strict=True))
    ]
    compared = None
    if len(found) > 1:
        compared = compared_runs.comparison(names, found, has_names=asked.has_names)
    text = _template().render(
        title=names[0] if len(names) == 1 else f'{len(names)} runs',
        stories=stories,
        compared=compared,
        evaluation_meaning=sentences.EVALUATION,
        event_names=training_curves.EVENTS,
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
    """What is known of a run."""
    try:
        found = facts.of_run(run)
    except (UserError, OSError) as e:
        raise UserError(f'{run}: {e}') from e
    if found is None:
        why = 'it has no settings of a training'
        if not storage.is_remote(run) and not os.path.isdir(run):
            why = 'there is no such directory'
        raise UserError(f'{run} is no run of this program: {why}')
    return found


def _names(runs: Sequence[str]) -> list[str]:
    """What the page calls the runs: by their last names, and by two where these are equal."""
    paths = [run if storage.is_remote(run) else os.path.abspath(run) for run in runs]
    names = [os.path.basename(path.rstrip('/')) for path in paths]
    if len(set(names)) < len(names):
        names = ['/'.join(path.rstrip('/').split('/')[-2:]) for path in paths]
    return [plain(name, _NAME) for name in names]


def _story(
    name: str, identity: str, found: RunFacts, experiments: Experiments, asked: Asked
) -> Story:
    evaluated = None
    if found.evaluation is not None:
        evaluated = frontier.evaluation(found.evaluation, identity)
    log = found.logs.get(POLICY.command)
    has_policy = found.policy is not None or (log is not None and bool(log.curves))
    about_reward: list[str] = []
    if found.policy is not None:
        about_reward = sentences.reward(found)
    return Story(
        name=name,
        identity=identity,
        has_policy=has_policy,
        what_happened=summary.what_happened(found),
        evaluation=evaluated,
        is_evaluation_damaged=found.evaluation is not None and evaluated is None,
        samples=sample_choice.choices(found.directory, name),
        curves=training_curves.of_policy(found, identity),
        reward_curves=training_curves.of_reward(found, identity),
        happened=summary.on_the_way(found),
        labels=label_section.labels(
            found, has_names=asked.has_names, calibrate=asked.calibrate, identity=identity
        ),
        about_reward=about_reward,
        provenance=provenance.provenance(found, experiments, has_names=asked.has_names),
        not_known=sentences.not_known(found, has_policy=has_policy),
    )


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
    """What a template says of a value: nothing reaches the page with control characters."""
    is_text = isinstance(value, str) and not isinstance(value, Markup)
    return plain(value, _LONGEST_TEXT) if is_text else value


def _read(name: str) -> str:
    path = os.path.join(os.path.dirname(__file__), 'templates', name)
    with open(path, encoding='utf-8') as file:
        return file.read()


def _digest(text: str) -> str:
    """How a Content-Security-Policy names the one script or style that counts."""
    return 'sha256-' + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def write(text: str, path: str) -> None:
    """Write the page; UserError where that cannot be done."""
    outputs.write_file(path, text.encode(errors='replace'))
