"""Origin of a run as tables: its labels, commands, machine, versions, events and settings."""

import contextlib
import itertools
import re
from collections.abc import Mapping
from typing import Any

from lm_human_preferences.hparams.policy_options import Experiments, decided
from lm_human_preferences.labels.folder import TRAIN
from lm_human_preferences.labels.report import label_report
from lm_human_preferences.report.facts import Row, Table
from lm_human_preferences.report.run import DAMAGED, Run, Settings
from lm_human_preferences.report.texts import NOT_RECORDED, Text, moment, number, short
from lm_human_preferences.runs import run_record
from lm_human_preferences.utils import hyperparams

# Numbers of labels in the record of a run, see runs.run_record
COUNTS = ('found', 'learned_from', 'held_out', 'queries', 'held_out_queries', 'simulated')
EXAMPLES = 'Two of its labels: ✓ is the response that was chosen.'
MACHINE = {
    'processor': '{}',
    'gpu': '{}',
    'ranks': '{} ranks',
    'threads': '{} threads',
}
OWN_MODEL = 'rewards.trained_model'  # set by the program if the run trains its own reward model
OF_NAMES = ('labels.without', 'serve.labellers')  # endings of options whose values name labellers
NAMES = 'NAMES'  # shown in place of labellers' names
MOST_ALARMS = 8
_WORD = r"""(?:'[^']*'|"[^"]*"|\S)+"""  # word of a command line, with its quotes
_OPTION = rf'--[\w.-]*(?:{"|".join(map(re.escape, OF_NAMES))})[ =]'
_NAMING = re.compile(rf"(')?({_OPTION})(?(1)[^']*'|{_WORD})")  # the option is in quotes, or not


def counts(run: Run) -> Table:
    """Return a table of how many labels the run's reward model has, by use."""
    labels = run.trainer.labels
    rows = [('Source', short(number(labels.get('source'))))]
    for name in COUNTS:
        rows.append((name.replace('_', ' ').capitalize(), number(labels.get(name))))
    return Table((), rows if labels else [])


def examples(run: Run, names: Mapping[str, str]) -> Table:
    """Return a table of two labels: those of the lowest question ids, so that nobody picks them."""
    folder, rows = run.trainer.folder, []
    if folder is None:
        return Table((), [])
    with contextlib.suppress(*DAMAGED):
        encoder = folder.encoding().get_encoder()
        given = {answer.question: answer for answer in folder.counted(TRAIN)}
        for question in sorted(given)[:2]:
            labeller, value = given[question].labeller, given[question].value
            best = folder.label_type.preferred(value)
            chosen = folder.samples[best or 0]
            texts = {}
            for field, tokens in folder.questions[question].tokens().items():
                texts[field] = Text(encoder.decode(encoder.without_padding(tokens)))
            query = texts.pop('query')
            for field, text in texts.items():
                sign = f'{value if best is None else "✓"} {names[labeller]}'
                rows.append((query, text, sign if field == chosen else ''))
                query = ''
    return Table(('Text given', 'Response', 'Chosen by'), rows, EXAMPLES)


def labellers(run: Run, names: Mapping[str, str]) -> Table:
    """Return a table with a row for each labeller. names: {labeller: name to be shown}."""
    found = run.trainer.label_report.get('labellers')
    if not found:
        return Table((), [])
    shown = {names[name]: {**facts, 'p': None} for name, facts in found.items()}
    heads, *rows = label_report.labellers(shown)
    return Table([head.capitalize() for head in heads], rows)


def origin(run: Run, has_names: bool) -> Table:
    """Return a table of a run's commands and their ends, and its machine, events and digests."""
    rows: list[Row] = []
    for command in run.commands:
        is_at_work = run.is_at_work and command is run.commands[-1]
        took = number(command.get('seconds'), 0)
        how = command.get('how', 'still at work' if is_at_work else 'killed')
        rows.append(('Command', Text(command_lines(command, has_names))))
        rows.append(('Began, seconds, end', f'{moment(command.get("began"))}, {took}, {how}'))
    rows += _machine(run.commands[0] if run.commands else {})
    log = run.logs[0]
    for step, text in log.alarms[:MOST_ALARMS]:
        rows.append((f'Alarm at step {step + 1}', ' '.join(text.split())))
    if log.resumed:
        steps = ', '.join(str(step + 1) for step in log.resumed)
        rows.append(('Resumed before step', steps))
    digests = {'labels': run.labels.get('digest'), **run.training.get('digests', {})}
    rows += [(f'SHA-256 of {name}', str(digest)) for name, digest in digests.items() if digest]
    return Table((), rows)


def command_lines(command: Mapping[str, Any], has_names: bool) -> str:
    """Return a recorded command with one option per line, ready to be pasted into a shell."""
    text = str(command.get('command') or NOT_RECORDED)
    if not has_names:
        text = _NAMING.sub(rf'\2{NAMES}', text)
    lines = []
    for word in re.findall(_WORD, text):
        lines.append(f'\\\n    {word}' if word.startswith('--') else word)
    return ' '.join(lines)


def _machine(command: Mapping[str, Any]) -> list[Row]:
    machine = [text.format(command[key]) for key, text in MACHINE.items() if command.get(key)]
    versions = [f'{name} {command[name]}' for name in run_record.versions() if command.get(name)]
    return [
        ('Machine', ', '.join(machine) or NOT_RECORDED),
        ('Versions', ', '.join(versions) or NOT_RECORDED),
    ]


def of_experiment(run: Run, experiments: Experiments) -> Settings | None:
    """Return the settings of a run's experiment, or the run's own if the experiment is unknown."""
    own, name = run.settings, run.training.get('experiment')
    if own is None or f'{own.command}/{name}' not in experiments:
        return own
    usual = type(own)()
    usual.override_from_dict(dict(experiments[f'{own.command}/{name}']))
    return usual


def differences(columns: Mapping[str, Settings | None], has_names: bool) -> Table:
    """Return a table of the settings that differ between the columns {name: settings}."""
    fields, found, rows = {}, [], []
    for settings in columns.values():
        decisions = {} if settings is None else decided(settings)
        if settings is not None:
            fields |= hyperparams.fields(type(settings))
            if settings.new_reward_model is not None:
                decisions.pop(OWN_MODEL, None)
        found.append(decisions)
    for option in dict.fromkeys(itertools.chain.from_iterable(found)):
        first, *others = (each.get(option, fields[option].default) for each in found)
        if any(value != first for value in others):
            cells = [str(each.get(option, '–')) for each in found]
            is_hidden = option.endswith(OF_NAMES) and not has_names
            rows.append((option, *([NAMES] * len(cells) if is_hidden else cells)))
    return Table(('Setting', *columns), rows, 'Settings that differ.')
