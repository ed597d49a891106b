"""Tables of facts about a run in fixed wording, for its report and its model card."""

import itertools
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from lm_human_preferences import label_types
from lm_human_preferences.evaluation import report
from lm_human_preferences.hparams.policy_options import Experiments, decided, differences
from lm_human_preferences.labels.agreement import wilson_interval
from lm_human_preferences.labels.folder import TRAIN
from lm_human_preferences.labels.report import label_report
from lm_human_preferences.report.run import Run
from lm_human_preferences.runs import run_dir

NOT_RECORDED, NOT_MEASURED = 'not recorded', 'not measured'
LEARN, GAIN, SAYS = 'What it was to learn', 'Whether it did', 'What it says now'  # page headings
SURE, LABELS, MADE = 'How sure', 'Labels', 'How it was made'
TASKS = {
    'sentiment': 'continue a passage of a book with positive sentiment',
    'descriptiveness': 'continue a passage of a book with vivid description',
    'cnndm': 'summarise a news article',
    'tldr': 'summarise a text of Reddit',
    'mock_sentiment': 'continue a film review as labellers like it',
    'test': 'continue three letters, for tests',
    'chat': 'answer in a chat',
}
TASK = {  # {name of a row in the table of the task: option that the row shows}
    'Text given': 'task.query_dataset',
    'Its tokens, at most': 'task.query_length',
    'Tokens of a response': 'task.response_length',
    'Model before': 'task.policy.initial_model',
    'Rewarded by': 'rewards.trained_model',
    'Rewarded by the function': 'rewards.function',
    'Held back by a KL, target in nats': 'rewards.adaptive_kl.target',
    'Held back by a KL, coefficient': 'rewards.kl_coef',
}
UNSEEN = 'The reward model, on labels it had not seen'
MEANING = 'KL: how far the responses have moved from what the model before would write.'
POINTS = {  # {name of a row: (policy, statistic) in an evaluation's results}
    'Before': ('base', 'reward'),
    'After': ('policy', 'reward'),
    'Best possible at that KL': ('policy', 'frontier'),
    'Fraction of the possible gain': ('policy', 'share'),
    'Best of 4, without training': ('best_of_4', 'reward'),
    'Best of 16, without training': ('best_of_16', 'reward'),
}
# TAGS begin the TensorBoard tags of a reward model's accuracy, with one of WAYS in place of {}.
TAGS, WAYS = ('train_reward/{}/', 'online/{}_'), ('held_out_of_mean', 'held_out', 'cross_validated')
SPECIAL = (  # samples to show first: (field, 1 for the highest value or -1 for the lowest, name)
    ('score', 1, 'best score'),
    ('score_std', 1, 'widest ±'),
    ('kl', 1, 'least likely before'),
    ('score', -1, 'worst score'),
)
NAMING = ('labels.without', 'serve.labellers')  # suffixes of options that list labellers' names


class Text(str):
    """Text that the report shows as a block, such as a query or a response."""


class Table(NamedTuple):
    """Table in a section of the report; if `columns` is empty, each row is a name and a value."""

    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    caption: str = ''


def number(value: object, digits: int = 2) -> str:
    """Format a number with thousands separators and decimals; return other values as text."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return NOT_RECORDED if value is None else str(value)
    if not -math.inf < value < math.inf:
        text = str(value).replace('inf', '∞').replace('nan', 'NaN')
    elif abs(value) >= 1_000_000_000:
        text = f'{Decimal(value):.2e}'
    else:
        text = f'{value:,}' if isinstance(value, int) else f'{value:z,.{digits}f}'
    return text.replace('-', '−')


def percent(fraction: float) -> str:
    """Format a fraction as a percentage without decimals."""
    return f'{number(100 * fraction, 0)} %'


def of_all(count: int, total: int) -> str:
    """Format a fraction as '7 of 14', or as a percentage if `total` is 100 or more."""
    return f'{count} of {total}' if total < 100 else percent(count / total)


def short(path: str) -> str:
    """Return the last component of a path or URL, without the query string of a URL."""
    return os.path.basename(path.partition('?')[0].rstrip('/')) or path


def head(run: Run) -> list[str]:
    """Return lines about a run: its experiment, what it trained, its state, and its length."""
    name = run.training.get('experiment')
    trained = [each for each in run.commands if '.py evaluate ' not in str(each.get('command'))]
    last = trained[-1] if trained else {'how': NOT_RECORDED}
    state = 'still training' if run_dir.is_held(run.directory) else last.get('how', 'killed')
    lines = [f'{name}: {TASKS.get(name, NOT_RECORDED)}', f'{state} {last.get("ended", "")}']
    if run.policy is None:
        return [*lines, 'a policy' if run.trains_policy else 'a reward model']
    total = run.policy.ppo.nupdates * run.policy.ppo.batch_size
    return [*lines, f'a policy, {number(run.last("elapsed/episodes"), 0)} of {total:,} responses']


def answer(run: Run) -> list[tuple[str, str, list[str]]]:
    """Return up to four results (name, number, notes) that say how good a run is."""
    labels, rewards, found = run.trainer.labels, list(run.rewards), []
    for each in run.comparisons[:1]:
        notes = ['of the answers prefer it to', short(each['against'])]
        found.append(('By people', of_all(each['wins'], each['n']), notes))
    # Show the reward used in training last, and a second reward only if people compared no answers.
    for reward in [*rewards[1 : 1 if found else 2], *rewards[:1]]:
        before, after = (_measured(run, reward, point, 'reward') for point in ('base', 'policy'))
        way, fraction = f'{before} → {after}', _measured(run, reward, 'policy', 'share')
        notes = ['of the possible gain', way] if fraction else ['mean reward, before and after']
        name = f'By the {reward}' + ', which it was trained on' * (reward == rewards[0])
        found.append((name, fraction or way, notes))
    if labels:
        measured, _, chance = accuracy(run)
        found.append((UNSEEN, measured, [f'by chance {chance}']))
        notes = [f'simulated: {number(labels.get("simulated"))} of {number(labels.get("found"))}']
        found.append(('Labels learned from', number(labels.get('learned_from')), notes))
    return found


def mind(run: Run) -> list[tuple[str, str]]:
    """Return warnings about a run as pairs: the first words, shown in bold, and the rest."""
    labels, seen = run.trainer.labels, run.evaluation.get('queries_trained_on')
    kl, ended = run.last('objective/kl'), run.last('responses/ended')
    queries = labels.get('held_out_queries') or 0
    counts = {
        'labels are simulated: a program answered, not people.': labels.get('simulated'),
        'held-out queries: a reward model may be right by chance.': queries * (queries < 10),
        'queries of the evaluation were in the training, too.': seen,
        'times the run was resumed; its commands are at the end.': len(run.log.resumed),
        'alarms, which TensorBoard has.': len(run.log.alarms),
        'curves end in NaN or infinity, and are left out.': len(run.log.broken),
    }
    found = [(number(count), sentence) for sentence, count in counts.items() if count]
    if run.policy is not None and not run.comparisons and len(run.rewards) < 2:
        found.append(('Judged by its own reward alone.', 'A policy also exploits its errors.'))
    if run.target and kl and abs(kl / run.target - 1) > 0.25:
        numbers = f'KL {number(kl)}, target {number(run.target)}.'
        found.append((numbers, 'The target is missed: a longer run would go on changing.'))
    if ended is not None and ended <= 0.8:
        found.append((f'{percent(1 - ended)} of the last responses', 'have no end: they were cut.'))
    return found


def task(run: Run) -> Table:
    """Return a table of a run's task. Instructions are shown unless all answers were imported."""
    settings = {} if run.settings is None else decided(run.settings)
    rows = [(name, short(number(settings.get(option)))) for name, option in TASK.items()]
    folder = run.trainer.folder
    if folder is not None and not all(each.is_imported for each in folder.counted(TRAIN)):
        rows.append(('Labellers were told', folder.task['instructions']))
    return Table((), [row for row in rows if row[1] != NOT_RECORDED])


def examples(run: Run) -> Table:
    """Return a table of two labels, chosen by their question ids rather than by a person."""
    folder, rows = run.trainer.folder, []
    if folder is None:
        return Table()
    encoder = folder.encoding().get_encoder()
    given = {answer.question: answer.value for answer in folder.counted(TRAIN)}
    for question in sorted(given)[:2]:
        best = folder.label_type.preferred(given[question])
        texts = {}
        for field, tokens in folder.questions[question].tokens().items():
            texts[field] = Text(encoder.decode(encoder.without_padding(tokens)))
        query = texts.pop('query')
        for field, text in texts.items():
            chosen = '✓' if best is not None and field == folder.samples[best] else ''
            rows.append((query, text, chosen))
    return Table(('Text given', Text('Response'), 'Chosen'), rows, 'Two of its labels.')


def gain(run: Run) -> Table:
    """Return a table of rewards before and after training, from the evaluation or else the log."""
    rows, caption = [], 'Mean score of the responses of the first and of the last step.'
    for name, (point, key) in POINTS.items():
        cells = [_measured(run, reward, point, key) for reward in run.rewards]
        if any(cells):
            kl = '' if key == 'share' else _measured(run, next(iter(run.rewards)), point, 'kl')
            rows.append((name, kl, *cells))
    if run.evaluation:
        caption = f'{MEANING} Results: {next(report.table(run.evaluation))}.'
    return Table(('Policy', 'KL, nats', *run.rewards), rows, caption)


def _measured(run: Run, reward: str, point: str, key: str) -> str:
    """Format a policy's statistic `key` with its 95 % interval: a dash if None, '' if missing."""
    if point.startswith(report.BEST_OF_N) and reward != next(iter(run.rewards)):
        point += report.BY_REWARD_MODEL  # best of n responses by the reward that trained the policy
    values = run.rewards[reward].get(point, {})
    if values.get(key) is None:
        return '–' if key in values else ''
    show = percent if key == 'share' else number
    width = report.margin(values, key, run.evaluation.get('queries', 0))
    return f'{show(values[key])} ± {show(width)}' if width else show(values[key])


def samples(named: Mapping[str, Run]) -> Table:
    """Return a table of answers to the first run's sample queries, before and after each run.

    The first run's best answer comes first, then its least certain, least likely and worst ones.
    """
    runs = list(named.values())
    first = runs[0].samples
    if all(len(answers) < 2 for run in runs for answers in run.samples.values()):
        return Table()  # the run was killed before it sampled again
    reasons: dict[str, str] = {}
    for field, sign, reason in SPECIAL:
        values = {}
        for query, answers in first.items():
            value = answers[-1].get(field)
            if query not in reasons and isinstance(value, int | float) and value == value:
                values[query] = sign * value
        if len(values) > 1:
            reasons[max(values, key=values.__getitem__)] = reason
    rows = []
    for query in list({**reasons, **first})[:8]:
        cells = [Text(query), *_sample(first[query][0])]
        for run in runs:
            cells += _sample(run.samples[query][-1]) if query in run.samples else ('–', '')
        rows.append((*cells, reasons.get(query, '')))
    heads = itertools.chain.from_iterable((Text(name), 'Score') for name in ('Before', *named))
    return Table(('Text given', *heads, ''), rows)


def _sample(record: Mapping[str, Any]) -> tuple[str, str]:
    """Return (response, score), with the score's standard deviation if that is recorded."""
    score = number(record.get('score'))
    if 'score_std' in record:
        score += f' ± {number(record["score_std"])}'
    return Text(record['response']), score


def accuracy(run: Run) -> tuple[str, str, str]:
    """Return (accuracy, interval, chance) of a reward model on labels that it had not seen."""
    labels, last = run.trainer.labels, run.trainer.last
    chance = label_types.get(run.trainer.reward.labels.type).chance
    by_chance = NOT_RECORDED if chance is None else percent(chance)
    total, queries = labels.get('held_out'), labels.get('held_out_queries')
    interval = f'{queries} queries: none' if queries else 'none'
    for prefix in [tag.format(way) for way in WAYS for tag in TAGS]:
        right, correlation = last(f'{prefix}accuracy'), last(f'{prefix}agreement')
        effective = last(f'{prefix}effective_labels')
        if correlation is not None:
            return f'correlation {number(correlation)}', interval, by_chance
        if right is not None:
            if effective:
                low, high = wilson_interval(right * effective, effective)
                interval = _ends(low, high)
            measured = of_all(round(right * total), total) if total else percent(right)
            return measured, interval, by_chance
    return NOT_MEASURED, 'none', by_chance


def _ends(low: float, high: float) -> str:
    """Format the 95 % interval of a fraction; 0 to 1 is shown as 'none: too few queries'."""
    return (
        'none: too few queries' if (low, high) == (0, 1) else f'{percent(low)} to {percent(high)}'
    )


def sure(run: Run) -> Table:
    """Return a table that says how certain a run's results are, and what was not measured."""
    nothing = (NOT_MEASURED, '', '')
    rows = [(UNSEEN, *accuracy(run))] if run.trainer.labels else []
    agreed = run.trainer.label_report.get('agreement', {})
    if agreed.get('raw') is not None:
        equal = of_all(round(agreed['raw'] * agreed['pairs']), agreed['pairs'])
        interval = _ends(agreed['low'], agreed['high'])
        question = 'Two labellers agree about a question'
        rows.append((question, equal, interval, percent(agreed['chance'])))
    for each in run.comparisons:
        interval = _ends(each['low'], each['high'])
        question = f'People prefer it to {short(each["against"])}'
        rows.append((question, of_all(each['wins'], each['n']), interval, '50 %'))
    if run.policy is not None and not run.evaluation:
        rows.append(('Its distance from the best policy possible', *nothing))
    rows += [('Texts that are not of this task', *nothing), ('Other seeds', *nothing)]
    return Table(('Question', 'Measured', '95 % interval', 'By chance'), rows)


def counts(run: Run) -> Table:
    """Return a table of how many labels the reward model learned from, was tested on, and so on."""
    rows = []
    for name, value in run.trainer.labels.items():
        if not isinstance(value, Mapping):
            rows.append((name.replace('_', ' ').capitalize(), short(number(value))))
    return Table((), rows)


def labellers(run: Run) -> Table:
    """Return a table with a row for each labeller."""
    shown = {}
    for name, facts in run.trainer.label_report.get('labellers', {}).items():
        alias = name if run.has_names else f'labeller {len(shown) + 1}'
        shown[alias] = {**facts, 'p': None}
    heads, *rows = label_report.labellers(shown) if shown else [[]]
    return Table([head.capitalize() for head in heads], rows)


def commands(run: Run) -> Table:
    """Return a table of a run's commands, their records, and the SHA-256 of each input file."""
    rows = []
    for command in run.commands:
        line = str(command.get('command') or NOT_RECORDED)
        if not run.has_names and any(option in line for option in NAMING):
            line = 'not shown: it names labellers'
        words = [shlex.quote(word) for word in shlex.split(line)]
        lines = [f'\\\n    {word}' if word.startswith('--') else word for word in words]
        rows.append(('Command', Text(' '.join(lines))))
        about = {'how': 'no end is recorded', **command, 'command': None, 'id': None}
        recorded = [f'{name} {number(value)}' for name, value in about.items() if value]
        rows.append(('Its record', ', '.join(recorded)))
    for name, digest in run.training.get('digests', {}).items():
        rows.append((f'SHA-256 of {name}', str(digest)))
    return Table((), rows)


def settings(named: Mapping[str, Run], experiments: Experiments) -> Table:
    """Return a table of runs' settings that differ from those of the first run's experiment."""
    columns = {name: run.settings for name, run in named.items() if run.settings is not None}
    (first, *_), options = columns.values(), {}
    (run, *_), usual = named.values(), type(first)()
    experiment = f'{usual.command}/{run.training.get("experiment")}'
    usual.override_from_dict(dict(experiments.get(experiment, {})))
    for each in columns.values():
        options |= {**differences(usual, each), **differences(each, usual)}
    rows = []
    for option in options:
        if run.has_names or not option.endswith(NAMING):
            values = [decided(each).get(option, '–') for each in (usual, *columns.values())]
            rows.append((option, *(Text(value) for value in values)))
    return Table(('Setting', 'Experiment', *map(Text, columns)), rows, 'Settings that differ.')


def collected(run: Run) -> dict[str, Any]:
    """Return the content of a run's page, with a warning for each file that cannot be read."""
    tables = {
        LEARN: (task, examples),
        GAIN: (gain,),
        SAYS: (),
        SURE: (sure,),
        LABELS: (counts, labellers),
        MADE: (commands,),
    }
    sections = {}
    for name, functions in tables.items():
        sections[name] = [run.tried(name, Table(), function, run) for function in functions]
    summary = run.tried('the state', ['', ''], head, run)
    answers = run.tried('the results', [], answer, run)
    warnings = run.tried('the warnings', [], mind, run)
    for name in run.unreadable:
        warnings.append((f'Cannot be read: {name}.', 'What it says is missing here.'))
    return {'head': summary, 'answer': answers, 'mind': warnings, 'sections': sections}
