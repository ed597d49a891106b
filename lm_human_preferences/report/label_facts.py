"""Facts of the labels that a run learned from."""

import contextlib
import itertools
from collections.abc import Mapping

from lm_human_preferences.labels.folder import TRAIN, LabelFolder
from lm_human_preferences.report.run import DAMAGED, Run
from lm_human_preferences.report.words import EXAMPLES, Table, Text, number, of_all, short

MOST_EXAMPLES = 2


def shown_names(run: Run, *, has_names: bool) -> dict[str, str]:
    """Return {labeller: shown name}. has_names: show their own names."""
    labellers = enumerate(run.trainer.label_report.get('labellers', ()), start=1)
    return {name: name if has_names else f'labeller {number}' for number, name in labellers}


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
            texts = {}
            for field, tokens in folder.tokens(folder.questions[question]).items():
                texts[field] = Text(encoder.decode(encoder.without_padding(tokens)))
            query = texts.pop('query')
            for field, text in texts.items():
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
    answers = itertools.chain.from_iterable(log.last_answers() for log in folder.logs.values())
    is_given_here = any(not answer.is_imported for answer in answers)
    return folder.task['instructions'] if is_given_here else ''


def labellers(run: Run, names: Mapping[str, str]) -> Table:
    """Return a row for each labeller of a run's reward model."""
    rows, folder = [], run.trainer.folder
    for name, found in run.trainer.label_report.get('labellers', {}).items():
        assert folder is not None
        answers = folder.logs[name].last_answers()
        kind = 'imported' if any(answer.is_imported for answer in answers) else 'people'
        if any(answer.is_simulated for answer in answers):
            kind = 'simulated'
        gold, pairs = found['gold'] or {}, found['agreement_pairs']
        seconds = found['median_seconds']
        row = {
            'Labeller': names[name],
            'Kind': kind,
            'Answers': number(found['answers']),
            'Skipped': number(found['skipped']),
            'Agrees with others': of_all(round(found['agreement'] * pairs), pairs) if pairs else '',
            'Gold right': of_all(gold['right'], gold['answers']) if gold.get('answers') else '',
            'Chose place 1, 2, …': ', '.join(map(str, found['positions'] or ())),
            'Seconds, median': number(seconds, 1) if kind == 'people' and seconds else '',
        }
        rows.append(row)
    return Table(list(rows[0]) if rows else (), [tuple(row.values()) for row in rows])
