"""Facts of the labels that a run learned from."""

import contextlib
from collections.abc import Mapping

from lm_human_preferences.labels.folder import TRAIN, LabelFolder
from lm_human_preferences.report.run import DAMAGED, Run
from lm_human_preferences.report.words import (
    EXAMPLES,
    LABELLER_COLUMNS,
    Table,
    Text,
    number,
    of_all,
    short,
)

MOST_EXAMPLES, MOST_LABELLERS = 2, 40


def shown_names(run: Run, *, has_names: bool) -> dict[str, str]:
    """Return {labeller: shown name}. has_names: show their own names."""
    names = list(run.trainer.label_report.get('labellers', ()))
    numbers = [f'labeller {number}' for number in range(1, len(names) + 1)]
    return dict(zip(names, names if has_names else numbers, strict=True))


def examples(run: Run, names: Mapping[str, str]) -> Table:
    """Return labels as examples: those with the lowest digests, so that nobody has picked them."""
    folder, rows = run.trainer.folder, []
    if folder is None:
        return Table((), [])
    with contextlib.suppress(*DAMAGED):
        encoder = folder.encoding().get_encoder()
        answers = folder.counted(TRAIN)
        for question in sorted({answer.question for answer in answers})[:MOST_EXAMPLES]:
            chosen = dict.fromkeys(folder.samples, '')
            for answer in answers:
                if answer.question == question:
                    best = folder.label_type.preferred(answer.value)
                    sign = '✓' if best is not None else answer.value
                    chosen[folder.samples[best or 0]] += f'{sign} {names[answer.labeller]} '
            query = ''
            for field, tokens in folder.tokens(folder.questions[question]).items():
                text = Text(encoder.decode(encoder.without_padding(tokens)))
                if field == 'query':
                    query = text
                else:
                    rows.append((query, text, chosen[field]))
                    query = ''
    return Table(('Text given', 'Response', 'Chosen by'), rows, EXAMPLES)


def counts(run: Run) -> Table:
    """Return the numbers of labels of a run's reward model."""
    names = {
        'Source': 'source',
        'Found': 'found',
        'Learned from': 'learned_from',
        'Held out': 'held_out',
        'Queries': 'queries',
        'Queries held out': 'held_out_queries',
        'Simulated': 'simulated',
    }
    labels = run.trainer.labels
    rows = [(name, short(number(labels.get(key)))) for name, key in names.items()]
    return Table((), rows if labels else [])


def instructions(folder: LabelFolder | None) -> str:
    """Return what labellers were told; '' if all answers were given elsewhere."""
    if folder is None:
        return ''
    for log in folder.logs.values():
        if not all(answer.is_imported for answer in log.last_answers()):
            return folder.task['instructions']
    return ''


def labellers(run: Run, names: Mapping[str, str]) -> Table:
    """Return a row for each labeller of a run's reward model."""
    rows, folder = [], run.trainer.folder
    for name, found in run.trainer.label_report.get('labellers', {}).items():
        assert folder is not None
        answers = folder.logs[name].last_answers()
        kind = 'imported' if any(answer.is_imported for answer in answers) else 'people'
        if any(answer.is_simulated for answer in answers):
            kind = 'simulated'
        gold, pairs, seconds = found['gold'], found['agreement_pairs'], found['median_seconds']
        rows.append(
            (
                names[name],
                kind,
                number(found['answers']),
                number(found['skipped']),
                of_all(round(found['agreement'] * pairs), pairs) if pairs else '',
                of_all(gold['right'], gold['answers']) if gold and gold['answers'] else '',
                ', '.join(map(str, found['positions'] or ())),
                number(seconds, 1) if kind == 'people' and seconds is not None else '',
            )
        )
    return Table(LABELLER_COLUMNS, rows[:MOST_LABELLERS])
