"""Facts of a run as tables, for its report and its model card."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from lm_human_preferences import label_types
from lm_human_preferences.evaluation.report import margin
from lm_human_preferences.labels.report.agreement import wilson_interval
from lm_human_preferences.report import words
from lm_human_preferences.report.label_facts import instructions
from lm_human_preferences.report.run import DAMAGED, KNOWN, Run
from lm_human_preferences.report.words import Table, number, of_all, percent, short

POINTS = {  # {row of an evaluation: (point of the results, number of the point)}
    'Before': ('base', 'reward'),
    'After': ('policy', 'reward'),
    'Best possible at that KL': ('policy', 'frontier'),
    'Fraction of the possible gain': ('policy', 'share'),
    'Best of 4, without training': ('best_of_4', 'reward'),
    'Best of 16, without training': ('best_of_16', 'reward'),
}
# Prefixes of the tags of accuracies: of an ensemble's mean, of one reward model, of an online one,
# and of heads by cross-validation
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
MISSED = 0.25  # relative distance at which a KL has missed its target
UNENDED = 0.2  # fraction of responses without an end that is worth a warning
MOST_SAMPLES = 8


def head(run: Run) -> list[str]:
    """Return the experiment, kind, state and length of a run."""
    name = run.experiment or words.NOT_RECORDED
    last = run.commands[-1] if run.commands else {'how': words.NOT_RECORDED}
    state = 'still training' if run.is_at_work else last.get('how', 'killed')
    kind, length = 'A reward model, from labels', []
    if run.policy is not None:
        kind = 'A policy, and its reward model from labels'
        if run.given is not None:
            kind = 'A policy, by a given reward'
        total = run.policy.ppo.nupdates * run.policy.ppo.batch_size
        length = [f'{run.last("elapsed/episodes") or 0:,.0f} of {total:,} responses']
    return [
        f'{name}: {words.TASKS[name]}' if name in words.TASKS else name,
        kind,
        f'{state} {words.moment(last.get("ended"))}'.strip(),
        *length,
    ]


def answer(run: Run) -> list[tuple[str, str, list[str]]]:
    """Return up to four (name, number, notes) that say how good a run is."""
    found = []
    scores, unseen, labels = run.logged('objective/score'), accuracy(run), run.trainer.labels
    own, *others = run.rewards or ['']
    for compared in run.comparisons[:1]:
        notes = ['of the answers prefer it to', short(compared['other'])]
        found.append(('By people', of_all(compared['wins'], compared['n']), notes))
    for name in others[: 1 - len(found)]:
        found.append((words.JUDGES.get(name, name), *_attained(run.rewards[name])))
    if run.rewards:
        found.append((words.OWN, *_attained(run.rewards[own])))
    elif scores:
        way = f'{number(scores[0])} → {number(scores[-1])}'
        found.append((words.OWN, way, ['mean score of the first and of the last step']))
    if unseen is not None:
        found.append((words.UNSEEN, unseen['measured'], [f'right; by chance {unseen["chance"]}']))
    if labels:
        notes = []
        if 'simulated' in labels:
            notes = [f'{number(labels["simulated"])} of {number(labels.get("found"))} simulated']
        found.append(('Labels learned from', number(labels.get('learned_from')), notes))
    return found


def _attained(points: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return the fraction of the possible gain that a policy attained, and its rewards."""
    policy = points['policy']
    way = f'{number(points["base"]["reward"])} → {number(policy["reward"])}'
    if policy.get('share') is None:
        return way, ['mean reward, before and after']
    best = number(policy.get('frontier'))
    return percent(policy['share']), ['of the possible gain', f'{way}, best {best}']


def mind(run: Run) -> list[tuple[str, str]]:
    """Return warnings for the reader: (numbers, constant sentence)."""
    labels, results, log = run.trainer.labels, run.evaluation, run.logs[0]
    queries, seen = labels.get('held_out_queries') or 0, results.get('queries_trained_on')
    kl, ended = run.last('objective/kl'), run.last('responses/ended')
    unended = 0 if ended is None else 1 - ended
    adaptive = None if run.policy is None else run.policy.rewards.adaptive_kl
    found = []
    if labels.get('simulated'):
        numbers = f'{number(labels["simulated"])} of {number(labels.get("found"))}'
        found.append((f'{numbers} labels are simulated.', 'A program answered, not people.'))
    if run.policy is not None and not run.comparisons and len(run.rewards) < 2:
        sentence = 'A policy also exploits the errors of its reward.'
        found.append(('Judged by its own reward alone.', sentence))
    if adaptive is not None and kl and abs(kl / adaptive.target - 1) > MISSED:
        sentence = 'The target is missed, so a longer run would go on changing.'
        found.append((f'KL {number(kl)}, target {number(adaptive.target)}.', sentence))
    if 0 < queries < FEW_QUERIES:
        sentence = 'Fewer than 10: what the reward model gets right may be chance.'
        found.append((f'{queries} held-out queries.', sentence))
    if seen:
        sentence = 'of the evaluation were in the training, too.'
        found.append((f'{number(seen)} of {number(results.get("queries"))} queries', sentence))
    if unended >= UNENDED:
        sentence = 'They were cut off where they were.'
        found.append((f'{percent(unended)} of the last responses have no end.', sentence))
    for name, events in (('Resumed', log.resumed), ('Alarms', log.alarms)):
        if events:
            found.append((f'{name}: {len(events)}.', 'The steps stand under “How it was made”.'))
    if log.broken:
        broken = ', '.join(sorted(log.broken))
        found.append((f'NaN or infinity at the end: {broken}.', 'These curves are left out.'))
    if run.unreadable:
        names = ', '.join(run.unreadable)
        found.append((f'Cannot be read: {names}.', 'The facts in it are missing here.'))
    return found


def task(run: Run) -> Table:
    """Return the task of a run."""
    settings = run.task
    if settings is None:
        return words.facts_table({'Settings': words.NOT_RECORDED})
    model = settings.policy.initial_model
    rows = {
        'Text given': f'{short(settings.query_dataset)}, up to {settings.query_length} tokens',
        'Put around it': f'{settings.query_prefix} … {settings.query_suffix}',
        'Response': f'{settings.response_length} tokens',
        'Model before': words.MODELS.get(model, short(model)),
        'Labellers were told': instructions(run.trainer.folder),
    }
    if settings.end_text:
        rows['Text given'] += f', cut after “{settings.end_text}”'
    if not settings.query_prefix + settings.query_suffix:
        rows['Put around it'] = ''
    if run.policy is not None:
        rewards = run.policy.rewards
        held = f'coefficient {number(rewards.kl_coef)}'
        if rewards.adaptive_kl is not None:
            held = f'target {number(rewards.adaptive_kl.target)} nats'
        rows['Rewarded by'] = _rewarded_by(run, run.policy.members)
        rows['Held back by'] = f'KL from the model before, {held}'
    return words.facts_table(rows)


def _rewarded_by(run: Run, members: int) -> str:
    """Return the reward of a policy and its origin. members: reward models of its ensemble."""
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
    """Return the gain by each reward of the evaluation; without an evaluation, by the log."""
    if not run.rewards:
        steps = list(zip(run.logged('objective/kl'), run.logged('objective/score'), strict=False))
        ends = zip(('First step', 'Last step'), steps[:1] + steps[1:][-1:], strict=False)
        rows = [(name, *map(number, step)) for name, step in ends]
        return Table(('Policy', 'KL, nats', 'Score'), rows, words.LOGGED)
    own, *others = run.rewards
    rows = []
    for name, (point, key) in POINTS.items():
        cells = ['' if key == 'share' else _measured(run, own, point, 'kl')]
        cells += [_measured(run, reward, point, key) for reward in run.rewards]
        rows.append((name, *cells))
    caption = words.EXACT if run.evaluation.get('exact') is True else words.ESTIMATED
    sizes = (number(run.evaluation.get(name)) for name in ('responses', 'queries'))
    caption = f'{caption.format(*sizes)} {words.MEANING}'
    return Table(('Policy', 'KL, nats', own, *others), rows, caption)


def _measured(run: Run, reward: str, point: str, key: str) -> str:
    """Return a number of a point with its 95 % interval; a dash if it is unknown."""
    points = run.rewards[reward]
    if point.startswith('best_of_') and reward != next(iter(run.rewards)):
        point += '_by_reward_model'  # chosen by the reward of the training
    with contextlib.suppress(*DAMAGED):
        values, show = points[point], percent if key == 'share' else number
        value, width = values[key], margin(values, key, run.evaluation['queries'])
        if value is not None:
            return f'{show(value)} ± {show(width)}' if width else show(value)
    return '–'


def samples(runs: Sequence[Run], columns: Sequence[str]) -> Table:
    """Return answers to the first run's tracked queries, before and after each of `runs`.

    The first run's best answer comes first, then its least certain, least likely and worst ones.
    """
    first = runs[0].samples
    if all(len(answers) < 2 for run in runs for answers in run.samples.values()):
        return Table((), [])  # a run that was killed before the second time
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
        cells = [words.Text(query), *_sample(first[query][0])]
        for run in runs:
            cells += _sample(run.samples[query][-1]) if query in run.samples else ('–', '')
        rows.append((*cells, reasons.get(query, '')))
    heads = ['Text given', 'Before', 'Score']
    for column in columns:
        heads += [column, 'Score']
    return Table((*heads, ''), rows)


def _sample(record: Mapping[str, Any]) -> tuple[str, str]:
    """Return a response and its score, with the standard deviation of a head."""
    score = number(record.get('score'))
    if 'score_std' in record:
        score += f' ± {number(record["score_std"])}'
    return words.Text(record['response']), score


def accuracy(run: Run) -> dict[str, str] | None:
    """Return the last accuracy of a reward model on labels that it had not seen."""
    trainer = run.trainer
    total, queries = trainer.labels.get('held_out'), trainer.labels.get('held_out_queries')
    for prefix in MEASURED:
        right, correlation = trainer.last(f'{prefix}accuracy'), trainer.last(f'{prefix}agreement')
        if right is not None or correlation is not None:
            break
    else:
        return None
    measured = f'correlation {number(correlation)}'
    interval = f'{queries} queries: none' if queries else 'none'
    if right is not None:
        measured = of_all(round(right * total), total) if total else percent(right)
        effective = trainer.last(f'{prefix}effective_labels') or 0
        if effective > 0:
            interval = words.ends(*wilson_interval(right * effective, effective))
    settings = trainer.reward
    chance = None if settings is None else label_types.get(settings.labels.type).chance
    shown = words.NOT_RECORDED if chance is None else percent(chance)
    return {'measured': measured, 'interval': interval, 'chance': shown}


def sure(run: Run) -> Table:
    """Return measured accuracies with interval and chance, then what was not measured."""
    rows, unseen, agreed = [], accuracy(run), run.trainer.label_report.get('agreement', {})
    if unseen is not None:
        rows.append((words.UNSEEN, *unseen.values()))
    if agreed.get('pairs') and agreed.get('raw') is not None:
        equal = of_all(round(agreed['raw'] * agreed['pairs']), agreed['pairs'])
        interval, chance = words.ends(agreed['low'], agreed['high']), percent(agreed['chance'])
        rows.append(('Two labellers agree about a question', equal, interval, chance))
    for each in run.comparisons:
        preferred, interval = of_all(each['wins'], each['n']), words.ends(*each['interval'])
        rows.append((f'People prefer it to {short(each["other"])}', preferred, interval, '50 %'))
    unknown = {
        words.UNSEEN: unseen is None and bool(run.trainer.labels),
        'Its distance from the best policy possible': run.policy is not None and not run.rewards,
        'Texts that are not of this task': True,
        'Other seeds': True,
    }
    rows += [(name, words.NOT_MEASURED, '', '') for name, is_so in unknown.items() if is_so]
    return Table(('Question', 'Measured', '95 % interval', 'By chance'), rows)
