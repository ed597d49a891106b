"""Facts of a run as {section: tables}, for its report and its model card."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from lm_human_preferences import label_types
from lm_human_preferences.evaluation.report import margin
from lm_human_preferences.labels.report.agreement import wilson_interval
from lm_human_preferences.report import words
from lm_human_preferences.report.label_facts import instructions
from lm_human_preferences.report.run import DAMAGED, KNOWN, Run
from lm_human_preferences.report.words import (
    Table,
    Text,
    ends,
    moment,
    number,
    of_all,
    percent,
    short,
)
from lm_human_preferences.runs import run_lock

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
    name, last = (
        run.experiment or words.NOT_RECORDED,
        (run.commands or [{'how': words.NOT_RECORDED}])[-1],
    )
    state = 'still training' if run_lock.is_held(run.directory) else last.get('how', 'killed')
    found = [f'{name}: {words.TASKS[name]}' if name in words.TASKS else name]
    kind = 'A reward model, from labels'
    if run.policy is not None:
        kind = 'A policy, and its reward model from labels'
        if run.given is not None:
            kind = 'A policy, by a given reward'
    found += [kind, f'{state} {moment(last.get("ended"))}'.strip()]
    if run.policy is not None:
        done = (run.logged('elapsed/episodes') or [0])[-1]
        total = run.policy.ppo.nupdates * run.policy.ppo.batch_size
        found.append(f'{done:,.0f} of {total:,} responses')
    return found


def answer(run: Run) -> list[tuple[str, str, list[str]]]:
    """Return up to four (name, number, notes) that say how good a run is."""
    found = []
    scores, unseen, labels = run.logged('objective/score'), accuracy(run), run.trainer.labels
    own, *others = run.rewards or ['']
    for compared in comparisons(run)[:1]:
        notes = ['of the answers prefer it to', compared['other']]
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
        notes = [f'{number(labels.get("simulated"))} of {number(labels.get("found"))} simulated']
        found.append(('Labels learned from', number(labels.get('learned_from')), notes))
    return found


def _attained(points: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return the fraction of the possible gain that a policy attained, and its rewards."""
    way = f'{number(points["base"]["reward"])} → {number(points["policy"]["reward"])}'
    with contextlib.suppress(*DAMAGED):  # such as a missing share
        share, best = (points['policy'][name] for name in ('share', 'frontier'))
        if share is not None:
            return percent(share), ['of the possible gain', f'{way}, best {number(best)}']
    return way, ['mean reward, before and after']


def comparisons(run: Run) -> list[dict[str, Any]]:
    """Return the comparisons with other policies by people, the one with most answers first."""
    found = []
    for each in run.comparisons:
        for own, other in (('against', 'policy'), ('policy', 'against')):
            path = each[own].partition(' (weights ')[0].removesuffix('/policy')
            if os.path.abspath(path) != os.path.abspath(run.directory) or not each['n']:
                continue
            wins, interval = each['wins_of_against'], (each['low'], each['high'])
            if own == 'policy':
                wins, interval = each['n'] - wins, (1 - interval[1], 1 - interval[0])
            name = short(each[other])
            found.append({'n': each['n'], 'wins': wins, 'ends': ends(*interval), 'other': name})
    return sorted(found, key=lambda each: -each['n'])


def mind(run: Run) -> list[tuple[str, str]]:
    """Return warnings for the reader: (numbers, constant sentence)."""
    found: dict[str, tuple[object, ...]] = {}
    labels, results, log = run.trainer.labels, run.evaluation, run.logs[0]
    kl, ended = run.logged('objective/kl'), run.logged('responses/ended')
    adaptive = None if run.policy is None else run.policy.rewards.adaptive_kl
    queries = run.trainer.label_count('held_out_queries')
    if labels.get('simulated'):
        found['simulated'] = (labels['simulated'], labels.get('found'))
    if run.policy is not None and not comparisons(run) and len(run.rewards) < 2:
        found['own'] = ()
    if adaptive is not None and kl and abs(kl[-1] / adaptive.target - 1) > MISSED:
        found['kl'] = (kl[-1], adaptive.target)
    if 0 < queries < FEW_QUERIES:
        found['few'] = (queries,)
    if results.get('queries_trained_on'):
        found['seen'] = (results['queries_trained_on'], results.get('queries'))
    if ended and 1 - ended[-1] >= UNENDED:
        found['unended'] = (percent(1 - ended[-1]),)
    if log.resumed:
        found['resumed'] = (len(log.resumed),)
    if log.alarms:
        found['alarms'] = (len(log.alarms),)
    if log.broken:
        found['broken'] = (', '.join(sorted(log.broken)),)
    if run.unreadable:
        found['unreadable'] = (', '.join(run.unreadable),)
    return [
        (words.MIND[key][0].format(*map(number, found[key])), words.MIND[key][1]) for key in found
    ]


def task(run: Run) -> Table:
    """Return the task of a run."""
    settings, folder = run.task, run.trainer.folder
    if settings is None:
        return Table((), [('Settings', words.NOT_RECORDED)])
    text = f'{short(settings.query_dataset)}, up to {settings.query_length} tokens'
    model, lora = settings.policy.initial_model, settings.policy.lora
    learned = '' if lora is None else f'heads, and adapters of rank {lora.rank}'
    if run.policy is None and run.reward is not None and run.reward.is_head:
        learned = 'a head'
    rows = {
        'Text given': f'{text}, cut after “{settings.end_text}”' if settings.end_text else text,
        'Put around it': f'{settings.query_prefix} … {settings.query_suffix}',
        'Response': f'{settings.response_length} tokens',
        'Model before': words.MODELS.get(model, short(model)),
        'Weights that learned': learned,
        'Labellers were told': instructions(folder),
    }
    if not settings.query_prefix + settings.query_suffix:
        del rows['Put around it']
    if run.policy is not None:
        adaptive = run.policy.rewards.adaptive_kl
        held = f'coefficient {number(run.policy.rewards.kl_coef)}'
        if adaptive is not None:
            held = f'target {number(adaptive.target)} nats'
        rows['Rewarded by'] = _rewarded_by(run)
        rows['Held back by'] = f'KL from the model before, {held}'
    return Table((), [(name, value) for name, value in rows.items() if value])


def _rewarded_by(run: Run) -> str:
    """Return the reward of a policy and its origin."""
    assert run.policy is not None
    if run.given == KNOWN:
        return 'the known sentiment of words'
    name, source = 'a reward model', 'trained on the labels'
    if run.policy.rewards.online is not None:
        source = 'trained again and again as labels came in'
    if run.reward is not None and run.reward.is_head:
        name = 'a head on the model before'
    if run.policy.members > 1:
        name = f'the mean of {run.policy.members} reward models'
    if run.given is None:
        return f'{name}, {source}'
    return f'{name}: {short(run.given)}' if run.policy.members > 1 else short(run.given)


def gain(run: Run) -> Table:
    """Return the gain by each reward of the evaluation; without an evaluation, by the log."""
    if not run.rewards:
        steps = list(zip(run.logged('objective/kl'), run.logged('objective/score'), strict=False))
        ends = dict(zip(('First step', 'Last step'), steps[:1] + steps[1:][-1:], strict=False))
        rows = [(name, *map(number, step)) for name, step in ends.items()]
        return Table(('Policy', 'KL, nats', 'Score'), rows, words.LOGGED)
    own, *others = run.rewards
    rows = []
    for name, (point, key) in POINTS.items():
        cells = ['' if key == 'share' else _measured(run, own, point, 'kl')]
        cells += [_measured(run, reward, point, key) for reward in run.rewards]
        rows.append((name, *cells))
    caption = words.EXACT if run.evaluation.get('exact') is True else words.ESTIMATED
    sizes = (number(run.evaluation.get(name)) for name in ('responses', 'queries'))
    return Table(
        ('Policy', 'KL, nats', own, *others),
        rows,
        f'{caption.format(*sizes)} {words.MEANING}',
    )


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
    found = [tracked(run) for run in runs]
    first, *_ = found
    if all(len(answers) < 2 for of_run in found for answers in of_run.values()):
        return Table((), [])  # a run that was killed before the second time
    reasons: dict[str, str] = {}
    for field, sign, reason in SPECIAL:
        left = [query for query in first if query not in reasons and field in first[query][-1]]
        if len(left) > 1:
            reasons[max(left, key=lambda query: _rank(first[query][-1][field], sign))] = reason
    rows = []
    for query in [*reasons, *(query for query in first if query not in reasons)][:MOST_SAMPLES]:
        cells = [Text(query), *_sample(first[query][0])]
        for of_run in found:
            cells += _sample(of_run[query][-1]) if query in of_run else ('–', '')
        rows.append((*cells, reasons.get(query, '')))
    heads = ['Text given', 'Before', 'Score']
    for column in columns:
        heads += [column, 'Score']
    return Table((*heads, ''), rows)


def tracked(run: Run) -> dict[str, list[dict[str, Any]]]:
    """Return {query: its answers in the order of the steps}."""
    found: dict[str, list[dict[str, Any]]] = {}
    for record in run.samples:
        found.setdefault(record['query'], []).append(record)
    return found


def _sample(record: Mapping[str, Any]) -> tuple[str, str]:
    """Return a response and its score, with the standard deviation of a head."""
    score = number(record.get('score'))
    if 'score_std' in record:
        score += f' ± {number(record["score_std"])}'
    return Text(record['response']), score


def _rank(value: object, sign: int) -> tuple[bool, float]:
    """Return the sort key of a number, times 1 or -1; what is no number comes first."""
    if isinstance(value, int | float) and value == value:
        return True, sign * value
    return False, 0


def accuracy(run: Run) -> dict[str, str] | None:
    """Return the last accuracy of a reward model on labels that it had not seen."""
    trainer, measured = run.trainer, None
    total, queries = (trainer.label_count(name) for name in ('held_out', 'held_out_queries'))
    for prefix in MEASURED:
        right, correlation = (trainer.logged(prefix + name) for name in ('accuracy', 'agreement'))
        if right or correlation:
            break
    else:
        return None
    interval = f'{queries} queries: none' if queries else 'none'
    if right:
        effective = (*trainer.logged(f'{prefix}effective_labels'), 0)[-2:][0]
        measured = of_all(round(right[-1] * total), total) if total else percent(right[-1])
        if effective > 0:
            interval = ends(*wilson_interval(right[-1] * effective, effective))
    settings = trainer.reward
    chance = None if settings is None else label_types.get(settings.labels.type).chance
    return {
        'measured': measured or f'correlation {number(correlation[-1])}',
        'interval': interval,
        'chance': words.NOT_RECORDED if chance is None else percent(chance),
    }


def sure(run: Run) -> Table:
    """Return measured accuracies with interval and chance, then what was not measured."""
    rows, unseen, agreed = [], accuracy(run), run.trainer.label_report.get('agreement', {})
    if unseen is not None:
        rows.append((words.UNSEEN, unseen['measured'], unseen['interval'], unseen['chance']))
    if agreed.get('pairs') and agreed.get('raw') is not None:
        equal = of_all(round(agreed['raw'] * agreed['pairs']), agreed['pairs'])
        interval, chance = ends(agreed['low'], agreed['high']), percent(agreed['chance'])
        rows.append(('Two labellers agree about a question', equal, interval, chance))
    for each in comparisons(run):
        preferred = of_all(each['wins'], each['n'])
        rows.append((f'People prefer it to {each["other"]}', preferred, each['ends'], '50 %'))
    if run.rewards:
        how = 'exact' if run.evaluation.get('exact') is True else '± in the table'
        rows.append(('Rewards and KL of the evaluation', how, how, ''))
    unknown = {
        words.UNSEEN: unseen is None and bool(run.trainer.labels),
        'Its distance from the best policy possible': run.policy is not None and not run.rewards,
        'Texts that are not of this task': True,
        'Other seeds': True,
    }
    rows += [(name, words.NOT_MEASURED, '', '') for name, is_so in unknown.items() if is_so]
    return Table(('Question', 'Measured', '95 % interval', 'By chance'), rows)
