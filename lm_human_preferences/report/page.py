"""Documents about runs: the page of `./launch.py report`, and the model card of an export."""

import io
import itertools
import os
import re
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import jinja2
from markupsafe import Markup, escape

from lm_human_preferences import __version__, storage
from lm_human_preferences.errors import OptionError, UserError, about_option
from lm_human_preferences.hparams.policy_options import Experiments
from lm_human_preferences.report import facts
from lm_human_preferences.report.run import Run, read_run
from lm_human_preferences.runs import run_record
from lm_human_preferences.runs.run_files import REPORT
from lm_human_preferences.utils.streams import INVISIBLE, printable

CARD = 'README.md'
_MARKDOWN = re.compile(r'([\\`*_\[\]<>&|#~$])')
LONGEST = 2000  # maximum number of characters to show of a text
_LETTER = '[^\x00-\xa0\xad\u061c\u2000-\u206f\ud800-\uf8ff]'  # non-ASCII letter or emoji
# Languages and emoji need some invisible characters; the group of this regex matches these.
_UNUSUAL = re.compile(
    f'((?<={_LETTER})[\xad\u061c\u200c-\u200f](?={_LETTER})'
    '|(?<=[©®\u203c-\u3299\U0001f000-\U0001faff])[\ufe0e\ufe0f]|[\ufe0e\ufe0f](?=\u20e3)'
    '|\U0001f3f4[\U000e0061-\U000e007a]{5}\U000e007f)'
    '|[^ -~\n\t]'
)
_CODE = re.compile(r'(^```.*?(?:^```[^\n]*$|\Z))', re.DOTALL | re.MULTILINE)  # fenced code block
_INDENTED = re.compile(r'^(?:\t| {2,})\S', re.MULTILINE)
_MARK = Markup('<span class="mark">{}</span>')
_MONO = Markup('<span class="mono" dir="ltr" tabindex="0" role="group" aria-label="code">{}</span>')
# Placeholder colours of the chart, to be replaced by CSS variables, which differ in dark mode
COLOURS = {'#010203': 'accent', '#040506': 'warn', '#070809': 'muted', '#000000': 'ink'}
LOOKS = [(colour, style) for style in ('-', ':') for colour in COLOURS]


def write_report(
    runs: Sequence[str], experiments: Experiments, output: str | None = None, names: bool = True
) -> None:
    """Write the HTML report of `runs` (paths or URLs). ReportHParams describes the options."""
    is_here = len(set(runs)) > 1 or storage.is_remote(runs[0])
    path = output or (REPORT if is_here else os.path.join(runs[0], REPORT))
    if storage.is_remote(path):
        raise OptionError(f'--output {path}: give a file on this machine')
    text = page(runs, experiments, has_names=names)
    with about_option('--output'):
        storage.write_file(path, text.encode(errors='replace'))
    click.echo(f'The report is in {path}')


def page(runs: Sequence[str], experiments: Experiments, *, has_names: bool = True) -> str:
    """Return the HTML page about `runs` (paths or URLs); UserError if a path is not a run."""
    paths = [run.rstrip('/') if storage.is_remote(run) else os.path.abspath(run) for run in runs]
    paths = list(dict.fromkeys(paths))
    names = [os.path.basename(path) for path in paths]
    named = {}
    for name, path in zip(names, paths, strict=True):
        run = read_run(path)
        if run is None:
            raise UserError(f'{path} is not a run of this program: it has no settings file')
        run.has_names = has_names
        named[name if names.count(name) == 1 else path] = run
    stories = [{'name': name, **facts.collected(run)} for name, run in named.items()]
    if len(named) > 1:
        stories.insert(0, _comparison(stories))
    story, sections = stories[0], stories[0]['sections']
    story['chart'] = run.tried('the chart', '', training_chart, named)
    differing = run.tried('the settings', facts.Table(), facts.settings, named, experiments)
    sections[facts.MADE].append(differing)
    columns = named if len(named) > 1 else {'After': run}
    for place in range(0, len(columns), 3):
        part = dict(itertools.islice(columns.items(), place, place + 3))
        sections[facts.SAYS].append(facts.samples(part))
    source = Path(__file__).with_name('page.html').read_text('utf-8')
    template = jinja2.Environment(autoescape=True, finalize=inline).from_string(source)
    return template.render(stories=stories, version=__version__, plain=printable)


def _comparison(stories: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the page's template shows in the section that compares runs."""
    answers = {}
    for story in stories:
        answers[story['name']] = {about: value for about, value, _ in story['answer']}
    columns = list(dict.fromkeys(itertools.chain.from_iterable(answers.values())))
    rows = []
    for name, values in answers.items():
        rows.append((facts.Text(name), *(values.get(column, '–') for column in columns)))
    sections = {facts.GAIN: [facts.Table(['Run', *columns], rows)], facts.SAYS: [], facts.MADE: []}
    return {'name': f'{len(stories)} runs', 'sections': sections}


def write_card(
    directory: str, run: Run | None, model_dir: str, *, has_policy: bool, **use: Any
) -> None:
    """Write the card of a policy or a reward model into the `directory` of its export.

    run: None for a model without a run. use: variables of model_card.md, which explains them.
    """
    from huggingface_hub import ModelCard, ModelCardData  # huggingface_hub is slow to import

    name, story = model_dir, {'mind': [], 'sections': {}}
    if run is not None:
        name, story = os.path.basename(os.path.abspath(run.directory)), facts.collected(run)
    versions = facts.Table((), list(run_record.versions().items()))
    sections = {**story['sections'], 'Versions': [versions]}
    data = ModelCardData(
        library_name='peft' if use.get('is_adapter') else 'transformers',
        pipeline_tag='text-generation' if has_policy else 'text-classification',
        tags=['rlhf', 'lm-human-preferences'],
    )
    card = ModelCard.from_template(
        data,
        str(Path(__file__).with_name('model_card.md')),
        has_policy=has_policy,
        name=escaped(name),
        mind=[(escaped(number), sentence) for number, sentence in story['mind']],
        tables={section: _markdown(tables[0]) for section, tables in sections.items() if tables},
        repr=repr,
        **{'task': run and run.settings and run.settings.task, **use},
    )
    storage.write_bytes(os.path.join(directory, CARD), str(card).encode(errors='replace'))


def _markdown(table: facts.Table) -> str:
    """Return a table with its caption as Markdown; '' for an empty table."""
    columns, lines = table.columns or ('', ''), [escaped(table.caption), '']
    for row in (columns, ['---'] * len(columns), *table.rows):
        lines.append(f'| {" | ".join(map(escaped, row))} |')
    return '\n'.join(lines).strip() if table.rows else ''


def escaped(text: str) -> str:
    """Escape Markdown in untrusted text, and join its lines."""
    return _MARKDOWN.sub(r'\\\1', printable(re.sub(r'\s+', ' ', shortened(text))))


def training_chart(named: Mapping[str, Run]) -> Markup:
    """Return an SVG chart of rewards and KLs of the runs {name: run}; '' if none are logged."""
    from matplotlib import figure, rc_context  # matplotlib takes a while to import

    if not any('objective/kl' in each.curves for each in named.values()):
        return Markup()
    run, *others = named.values()
    best = next((points['policy'].get('frontier') for points in run.rewards.values()), None)
    panels = (
        ('objective/score', 'Reward, by what the run was trained on', 'best possible', best),
        ('objective/kl', 'KL from the model before, in nats', 'target', run.target),
    )
    # With a fixed salt, the SVG has the same content each time.
    with rc_context({'svg.fonttype': 'none', 'svg.hashsalt': 'report', 'font.size': 8}):
        picture = figure.Figure(figsize=(5.2, 3.9), layout='constrained')
        for axes, (tag, title, dashed, aim) in zip(picture.subplots(2, 1), panels, strict=True):
            for (name, each), (colour, style) in zip(named.items(), LOOKS, strict=False):
                curve = {step + 1: value for step, value in each.curves.get(tag, {}).items()}
                # matplotlib reads $ as a formula, and leaves out labels that begin with _.
                label = ' ' + printable(name)[-30:].replace('$', r'\$')
                axes.plot([*curve], [*curve.values()], style, color=colour, label=label)
            if aim is not None and not others:
                axes.axhline(aim, color='black', linestyle='--', linewidth=1)
                title += f'; dashed: {dashed}'
            axes.set_title(title, fontsize=8)
        if others:
            picture.legend(handles=axes.lines, loc='outside lower left', ncols=2, frameon=False)
        file = io.StringIO()
        nothing = {'Date': None, 'Creator': None}
        picture.savefig(file, format='svg', transparent=True, metadata=nothing)
    svg = file.getvalue()[file.getvalue().index('<svg') :]
    # The SVG's style element is removed, as its rules would apply to the whole page.
    svg = re.sub('<metadata>.*?</metadata>|<style.*?</style>', '', svg, flags=re.DOTALL)
    svg = re.sub(r' (?:width|height)="[\d.]+pt"', '', svg)
    for colour, variable in COLOURS.items():
        svg = svg.replace(colour, f'var(--{variable})')
    label = '<svg role="img" aria-label="Reward and KL over the steps"'
    return Markup(svg.replace('<svg', label, 1))


def shortened(text: str) -> str:
    """Return a text, without its middle if it is longer than LONGEST."""
    if len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    return f'{text[:half]} … {len(text) - LONGEST:,} characters … {text[-half:]}'


def inline(text: object) -> Markup:
    """Return a value as HTML; invisible characters, and those that reverse text, become codes."""
    if isinstance(text, Markup):
        return text
    if not isinstance(text, facts.Text):
        return _marked(shortened(str(text)))
    body = text.rstrip(' \n')
    shorter = shortened(body)
    parts = ['', shorter] if len(_INDENTED.findall(body)) > 1 else _CODE.split(shorter)
    shown = Markup()
    for place, part in enumerate(parts):
        shown += _MONO.format(_marked(part)) if place % 2 else _marked(part)
    blanks = text[len(body) :]
    if blanks or not text:
        lines = blanks.count('\n')
        count, noun = (lines, 'line end') if lines else (len(blanks), 'blank')
        shown += _MARK.format(f'{count:,} {noun}{"s" * (count > 1)}' if blanks else 'empty')
    scrolls = Markup(' tabindex="0"') if len(text) > LONGEST // 4 else ''
    return Markup('<bdi class="text"{}>{}</bdi>').format(scrolls, shown)


def _marked(text: str) -> Markup:
    """Return a text as HTML, with invisible characters replaced by their highlighted codes."""
    return Markup(_UNUSUAL.sub(_shown, escape(text.replace('\r\n', '\n'))))


def _shown(match: re.Match[str]) -> str:
    character = match[0]
    is_visible = character.isprintable() and not INVISIBLE.match(character)
    if match[1] or is_visible or unicodedata.category(character) == 'Zs':  # Unicode's blanks (Zs)
        return character
    return _MARK.format(f'U+{ord(character):04X}')
