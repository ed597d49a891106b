"""Tables of facts about a run, for its report and its model card. All wording is constant."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lm_human_preferences import label_types
from lm_human_preferences.evaluation.report import BEST_OF_N, BY_REWARD_MODEL, margin
from lm_human_preferences.labels.report.agreement import wilson_interval
from lm_human_preferences.report.run import DAMAGED, KNOWN, Run
from lm_human_preferences.report.texts import (
    NOT_MEASURED,
    NOT_RECORDED,
    Text,
    ends,
    moment,
    number,
    of_all,
    percent,
    short,
)

Row = Sequence[str]
TASKS = {
    'sentiment': 'continue a passage of a book with positive sentiment',
    'descriptiveness': 'continue a passage of a book with vivid description',
    'cnndm': 'summarise a news article',
    'tldr': 'summarise a text of Reddit',
    'mock_sentiment': 'continue a film review as labellers like it',
    'test': 'continue three letters, for tests',
    'chat': 'answer in a chat',
}
MODELS = {
    'test': 'test (a tiny network with random weights, for tests)',
    'reviews': 'reviews (a tiny model of made-up reviews, for tests)',
}
OWN, UNSEEN = 'By the reward that it was trained on', 'The reward model, on labels it had not seen'
JUDGES = {
    'known reward': 'By the known reward, which it was to learn',
    'judge': 'By the judge, another reward',
}
MIND = {  # {name of a warning: sentence that follows its numbers}
    'simulated': 'A program answered, not people.',
    'alone': 'A policy also exploits the errors of its reward.',
    'missed': 'The target is missed, so a longer run would go on changing.',
    'few': 'Fewer than 10: what the reward model gets right may be chance.',
    'seen': 'of the evaluation were in the training, too.',
    'unended': 'They were cut off where they were.',
    'resumed': 'The steps stand under “How it was made”.',
    'alarms': 'The steps stand under “How it was made”.',
    'broken': 'These curves are left out.',
    'unreadable': 'The facts in it are missing here.',
}
EXACT = 'Mean reward of a response. Exact: all {} responses to each of {} queries.'
ESTIMATED = 'Mean reward of a response, from {} to each of {} queries. ±: 95 % interval.'
MEANING = (
    ' KL: how far the responses have moved from what the model before would write. Best possible:'
    ' by the reward at the head of the column. Best of n samples of the model before: chosen by the'
    ' reward that the run was trained on.'
)
LOGGED = (
    'Mean score of the responses of the first and of the last step. The best possible score was not'
    ' measured.'
)
POINTS = {  # {name of a row: (point in the results of an evaluation, key of a number there)}
    'Before': ('base', 'reward'),
    'After': ('policy', 'reward'),
    'Best possible at that KL': ('policy', 'frontier'),
    'Fraction of the possible gain': ('policy', 'share'),
    'Best of 4, without training': ('best_of_4', 'reward'),
    'Best of 16, without training': ('best_of_16', 'reward'),
}
# Prefixes of TensorBoard tags with a reward model's accuracy: an ensemble's mean, a single model,
# a model retrained online; then cross-validated heads, fitted once or online
MEASURED = (
    'train_reward/held_out_of_mean/',
    'train_reward/held_out/',
    'online/held_out_',
    'train_reward/cross_validated/',
    'online/cross_validated_',
)
SPECIAL = (  # samples to show first: field, sign and reason
    ('score', 1, 'best score'),
    ('score_std', 1, 'widest ±'),
    ('kl', 1, 'least likely before'),
    ('score', -1, 'worst score'),
)
FEW_QUERIES = 10  # fewer held-out queries are worth a warning
MISSED = 0.25  # a KL whose relative distance from its target is larger has missed the target
UNENDED = 0.2  # fraction of responses without an end that is worth a warning
MOST_SAMPLES = 8


class Table(NamedTuple):
    """Table of a section; without columns, each row is a name and a value."""

    columns: Sequence[str]
    rows: Sequence[Row]
    caption: str = ''

    def __bool__(self) -> bool:
        """Return whether the table has rows; an empty one is not shown."""
        return bool(self.rows)


def facts_table(facts: Mapping[str, str]) -> Table:
    """Return a table of {name: value}, without empty values."""
    return Table((), [(name, value) for name, value in facts.items() if value])


def head(run: Run) -> list[str]:
    """Return lines about a run: its experiment, what it trained, its state, and its length."""
    name = run.training.get('experiment') or NOT_RECORDED
    last = run.commands[-1] if run.commands else {'how': NOT_RECORDED}
    state = 'still training' if run.is_at_work else last.get('how', 'killed')
    kind, length = 'A reward model, from labels', []
    if run.policy is not None:
        kind = 'A policy, and its reward model from labels'
        if run.given is not None:
            kind = 'A policy, by a given reward'
        total = run.policy.ppo.nupdates * run.policy.ppo.batch_size
        length = [f'{run.last("elapsed/episodes") or 0:,.0f} of {total:,} responses']
    task = f'{name}: {TASKS[name]}' if name in TASKS else name
    return [task, kind, f'{state} {moment(last.get("ended"))}'.strip(), *length]


def answer(run: Run) -> list[tuple[str, str, list[str]]]:
    """Return up to four (name, number, notes) that say how good a run is."""
    judges, labels, unseen = [], run.trainer.labels, accuracy(run)
    own, *others = run.rewards or ['']
    for each in run.comparisons:
        notes = ['of the answers prefer it to', short(each['other'])]
        judges.append(('By people', of_all(each['wins'], each['n']), notes))
    for name in others:
        judges.append((JUDGES.get(name, name), *_attained(run.rewards[name])))
    found = judges[:1]
    if own:
        found.append((OWN, *_attained(run.rewards[own])))
    if unseen is not None:
        measured, _, chance = unseen
        found.append((UNSEEN, measured, [f'right; by chance {chance}']))
    if labels:
        notes = []
        if 'simulated' in labels:
            notes = [f'{number(labels["simulated"])} of {number(labels.get("found"))} simulated']
        found.append(('Labels learned from', number(labels.get('learned_from')), notes))
    return found


def _attained(points: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return texts: the fraction of the possible gain that a policy attained, and its rewards."""
    policy = points['policy']
    way = f'{number(points["base"]["reward"])} → {number(policy["reward"])}'
    if policy.get('share') is None:
        return way, ['mean reward, before and after']
    best = number(policy.get('frontier'))
    return percent(policy['share']), ['of the possible gain', f'{way}, best {best}']


def mind(run: Run) -> list[tuple[str, str]]:
    """Return warnings for the reader: (numbers, constant sentence)."""
    labels, results, log = run.trainer.labels, run.evaluation, run.logs[0]
    simulated, queries = labels.get('simulated'), labels.get('held_out_queries')
    seen, all_queries = results.get('queries_trained_on'), number(results.get('queries'))
    kl, ended = run.last('objective/kl'), run.last('responses/ended')
    adaptive = None if run.policy is None else run.policy.rewards.adaptive_kl
    found = {}
    if simulated:
        of_found = f'{number(simulated)} of {number(labels.get("found"))}'
        found['simulated'] = f'{of_found} labels are simulated.'
    if run.policy is not None and not run.comparisons and len(run.rewards) < 2:
        found['alone'] = 'Judged by its own reward alone.'
    if adaptive is not None and kl and abs(kl / adaptive.target - 1) > MISSED:
        found['missed'] = f'KL {number(kl)}, target {number(adaptive.target)}.'
    if queries and queries < FEW_QUERIES:
        found['few'] = f'{queries} held-out queries.'
    if seen:
        found['seen'] = f'{number(seen)} of {all_queries} queries'
    if ended is not None and 1 - ended >= UNENDED:
        found['unended'] = f'{percent(1 - ended)} of the last responses have no end.'
    if log.resumed:
        found['resumed'] = f'Resumed: {len(log.resumed)}.'
    if log.alarms:
        found['alarms'] = f'Alarms: {len(log.alarms)}.'
    if log.broken:
        found['broken'] = f'NaN or infinity at the end: {", ".join(sorted(log.broken))}.'
    if run.unreadable:
        found['unreadable'] = f'Cannot be read: {", ".join(run.unreadable)}.'
    return [(numbers, MIND[fact]) for fact, numbers in found.items()]


def task(run: Run) -> Table:
    """Return a table of a run's task."""
    settings, folder = run.task, run.trainer.folder
    if settings is None:
        return facts_table({'Settings': NOT_RECORDED})
    model = settings.policy.initial_model
    around = (settings.query_prefix, settings.query_suffix)
    kinds = {each['kind'] for each in run.trainer.label_report.get('labellers', {}).values()}
    rows = {
        'Text given': f'{short(settings.query_dataset)}, up to {settings.query_length} tokens',
        'Put around it': ' … '.join(around) if any(around) else '',
        'Response': f'{settings.response_length} tokens',
        'Model before': MODELS.get(model, short(model)),
        'Labellers were told': '',
    }
    if settings.end_text:
        rows['Text given'] += f', cut after “{settings.end_text}”'
    if folder is not None and kinds - {'imported'}:
        rows['Labellers were told'] = folder.task['instructions']
    if run.policy is not None:
        rewards = run.policy.rewards
        held = f'coefficient {number(rewards.kl_coef)}'
        if rewards.adaptive_kl is not None:
            held = f'target {number(rewards.adaptive_kl.target)} nats'
        rows['Rewarded by'] = _rewarded_by(run, run.policy.members)
        rows['Held back by'] = f'KL from the model before, {held}'
    return facts_table(rows)


def _rewarded_by(run: Run, members: int) -> str:
    """Describe the reward of a policy and its origin. members: number of its reward models."""
    if run.given == KNOWN:
        return 'the known sentiment of words'
    name = f'the mean of {members} reward models' if members > 1 else 'a reward model'
    if run.given is not None:
        return f'{name}: {short(run.given)}' if members > 1 else short(run.given)
    if run.reward is not None and run.reward.is_head:
        name = 'a head on the model before'
    if run.policy is not None and run.policy.rewards.online is not None:
        return f'{name}, trained again and again as labels came in'
    return f'{name}, trained on the labels'


def gain(run: Run) -> Table:
    """Return a table of the gain by each reward, from the evaluation or else from the log."""
    rows, caption = [], LOGGED
    for name, (point, key) in POINTS.items():
        cells = [_measured(run, reward, point, key) for reward in run.rewards]
        if any(cells):
            kl = '' if key == 'share' else _measured(run, next(iter(run.rewards)), point, 'kl')
            rows.append((name, kl, *cells))
    if run.evaluation:
        caption = EXACT if run.evaluation.get('exact') is True else ESTIMATED
        sizes = (number(run.evaluation.get(name)) for name in ('responses', 'queries'))
        caption = caption.format(*sizes) + MEANING
    return Table(('Policy', 'KL, nats', *run.rewards), rows, caption)


def _measured(run: Run, reward: str, point: str, key: str) -> str:
    """Format number `key` of a point with its 95 % interval; a dash if unknown, '' if missing."""
    points = run.rewards[reward]
    if point.startswith(BEST_OF_N) and reward != next(iter(run.rewards)):
        point += BY_REWARD_MODEL  # the reward that was trained on chooses the best of n
    with contextlib.suppress(*DAMAGED):
        values, show = points[point], percent if key == 'share' else number
        value, width = values[key], margin(values, key, run.evaluation.get('queries', 0))
        if value is None:
            return '–'
        return f'{show(value)} ± {show(width)}' if width else show(value)
    return ''


def samples(runs: Sequence[Run], columns: Sequence[str]) -> Table:
    """Return a table of answers to the first run's tracked queries, before and after each run.

    The first run's best answer comes first, then its least certain, least likely and worst ones.
    """
    first = runs[0].samples
    if all(len(answers) < 2 for run in runs for answers in run.samples.values()):
        return Table((), [])  # the run was killed before it sampled again
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
    for query in list({**reasons, **first})[:MOST_SAMPLES]:
        cells = [Text(query), *_sample(first[query][0])]
        for run in runs:
            cells += _sample(run.samples[query][-1]) if query in run.samples else ('–', '')
        rows.append((*cells, reasons.get(query, '')))
    heads = ['Text given', 'Before', 'Score']
    for column in columns:
        heads += [column, 'Score']
    return Table((*heads, ''), rows)


def _sample(record: Mapping[str, Any]) -> tuple[str, str]:
    """Return a response and its score; if a head gave it, with its standard deviation."""
    score = number(record.get('score'))
    if 'score_std' in record:
        score += f' ± {number(record["score_std"])}'
    return Text(record['response']), score


def accuracy(run: Run) -> tuple[str, str, str] | None:
    """Return (accuracy, interval, chance) of a reward model on labels that it had not seen."""
    trainer, chance = run.trainer, None
    total, queries = (trainer.labels.get(name) for name in ('held_out', 'held_out_queries'))
    if trainer.reward is not None:
        chance = label_types.get(trainer.reward.labels.type).chance
    by_chance = NOT_RECORDED if chance is None else percent(chance)
    for prefix in MEASURED:
        interval = f'{queries} queries: none' if queries else 'none'
        right, correlation = trainer.last(f'{prefix}accuracy'), trainer.last(f'{prefix}agreement')
        if right is not None:
            effective = trainer.last(f'{prefix}effective_labels') or 0
            if effective > 0:
                interval = ends(*wilson_interval(right * effective, effective))
            measured = of_all(round(right * total), total) if total else percent(right)
            return measured, interval, by_chance
        if correlation is not None:
            return f'correlation {number(correlation)}', interval, by_chance
    return None


def sure(run: Run) -> Table:
    """Return a table of accuracies with interval and chance, and of what was not measured."""
    rows, unseen, agreed = [], accuracy(run), run.trainer.label_report.get('agreement', {})
    if unseen is not None:
        rows.append((UNSEEN, *unseen))
    if agreed.get('pairs') and agreed.get('raw') is not None:
        equal = of_all(round(agreed['raw'] * agreed['pairs']), agreed['pairs'])
        interval, chance = ends(agreed['low'], agreed['high']), percent(agreed['chance'])
        rows.append(('Two labellers agree about a question', equal, interval, chance))
    for each in run.comparisons:
        preferred, interval = of_all(each['wins'], each['n']), ends(*each['interval'])
        rows.append((f'People prefer it to {short(each["other"])}', preferred, interval, '50 %'))
    unknown = {
        UNSEEN: unseen is None and bool(run.trainer.labels),
        'Its distance from the best policy possible': run.policy is not None and not run.evaluation,
        'Texts that are not of this task': True,
        'Other seeds': True,
    }
    rows += [(name, NOT_MEASURED, '', '') for name, is_so in unknown.items() if is_so]
    return Table(('Question', 'Measured', '95 % interval', 'By chance'), rows)
