"""Facts about a run as plain sentences. They may hold untrusted text: escape it in each format."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from lm_human_preferences.evaluation.report import margin, value_of
from lm_human_preferences.hparams.command_options import EvaluationHParams
from lm_human_preferences.hparams.reward_options import BEST
from lm_human_preferences.labels.report import wording
from lm_human_preferences.labels.report.agreement import SELECTED, wilson_interval
from lm_human_preferences.run_story.commands import shortened, shown
from lm_human_preferences.run_story.facts import (
    FILE,
    FOLDER,
    KNOWN,
    KNOWN_REWARD,
    MADE_UP,
    OF_MEAN,
    PEOPLE,
    LabelFacts,
    RunFacts,
    Source,
)
from lm_human_preferences.runs import command_record

OWN_MODELS = {
    'test': 'a tiny network with random weights, which tests the program',
    'reviews': 'a tiny language model of made-up film reviews, which tests the program',
}
# What the columns of an evaluation mean, and what stands in its rows.
EVALUATION = (
    'Each row is a way to answer the queries of the test part. KL: how far it is from the initial'
    ' model, in nats. Reward: its mean. Best at that KL: the highest mean reward that any policy'
    ' with that KL can have. Share of the gain: how much of the way from the initial model to that'
    ' best one it went.',
    'base: the initial model. policy: this one. best of n: the best of n responses of the initial'
    ' model. optimum: the best policy at the KL coefficient of the training.',
    'A high reward shows that the training worked, not that people like the responses: a policy'
    ' also finds what its reward is wrong about.',
)


def beginning(facts: RunFacts) -> list[str]:
    model = initial_model(facts)
    return [] if model is None else [f'It began as {model}.']


def initial_model(facts: RunFacts) -> str | None:
    """Return the words for the initial model; None where it is not known."""
    if facts.base_model is not None or facts.initial_model is None:
        return facts.base_model
    local = f'the local model {shortened(facts.initial_model)}'
    return OWN_MODELS.get(facts.initial_model, local)


def task(facts: RunFacts) -> Iterator[str]:
    """Describe queries and responses."""
    found = facts.task
    if found is None:
        return
    yield (
        f'Queries are texts of up to {found.query_length} tokens of the data set'
        f' {shortened(found.query_dataset)!r}; responses have up to {found.response_length} tokens'
        f'{_at_first(facts, "task.response_length")}, sampled at temperature'
        f' {found.policy.temperature:g}{_at_first(facts, "task.policy.temperature")}.'
    )
    if found.query_prefix or found.query_suffix:
        yield (
            f'The policy sees each query between {found.query_prefix!r} and'
            f' {found.query_suffix!r}; the reward does not see these.'
        )
    if found.chat:
        yield 'The policy sees each query in the chat template of the tokeniser.'
    if found.stops:
        yield 'A response is sampled up to its end, and only tokens up to there count.'


def policy_training(facts: RunFacts) -> Iterator[str]:
    """Describe the training of a policy and the end of its log."""
    if facts.policy is None:
        return
    rewards, ppo = facts.policy.rewards, facts.policy.ppo
    price = f'a KL coefficient of {rewards.kl_coef:g}{_at_first(facts, "rewards.kl_coef")}'
    if rewards.relative_kl_coef:
        price += " times the deviation of the first step's scores"
    if rewards.adaptive_kl is not None:
        price += f' that adapted to a target of {rewards.adaptive_kl.target:g} nats'
        price += _at_first(facts, 'rewards.adaptive_kl.target')
    yield (
        f'PPO was to take {total_episodes(facts)} episodes in batches of {ppo.batch_size}'
        f'{_at_first(facts, "ppo.batch_size")}, with {price}.'
    )
    yield from changes(facts)
    adapters = facts.policy.task.policy.lora
    if adapters is not None:
        learned = f'Heads and adapters of rank {adapters.rank} (LoRA)'
        if adapters.full is not None:
            learned += f', and {adapters.full} in full,'
        yield f'{learned} learned; the rest was frozen.'
    values = last_values(facts)
    if values:
        yield f'The last step in its log had {values}.'


def total_episodes(facts: RunFacts) -> int:
    """Return the episodes that a policy's run is to take, in whole batches."""
    assert facts.policy is not None
    return facts.policy.ppo.in_whole_batches(round(facts.last('elapsed/episodes') or 0))


def _at_first(facts: RunFacts, key: str) -> str:
    """Return the first value of a setting that was changed on the way, in brackets, else none."""
    for name, before, _ in facts.changed:
        if name == key:
            return f' (at first {shown(key, before)})'
    return ''


def changes(facts: RunFacts) -> Iterator[str]:
    """Say which settings were changed when the run was resumed."""
    parts = []
    for key, before, now in facts.changed:
        value, former = shown(key, now), shown(key, before)
        if value != former:  # as that of the run's own reward model, in a run that was moved
            parts.append(f'--{key} {value} (before: {former})')
    if parts:
        yield f'These settings were changed when it was resumed: {", ".join(parts)}.'


def reward_training(facts: RunFacts) -> Iterator[str]:
    """Describe the training of a reward model."""
    hparams = facts.reward
    if hparams is None:
        return
    own = '' if facts.policy is None else 'rewards.train_new_model.'
    epochs = 'once' if hparams.epochs == 1 else f'{hparams.epochs} times'
    yield (
        f'It learned each label {epochs}, {hparams.batch_size} at a time'
        f'{_at_first(facts, f"{own}batch_size")}, at a learning rate of {hparams.lr:g}'
        f'{_at_first(facts, f"{own}lr")} that fell to 0.'
    )
    if facts.policy is None:
        yield from changes(facts)
    if hparams.normalize_after:
        yield (
            'Then its scale was set such that responses of the initial model have a mean reward of'
            ' 0 with a standard deviation of 1, or that of the labels if they are numbers.'
        )


def last_values(facts: RunFacts) -> str:
    """Return the last values in the log of a policy; '' where there is no log."""
    return ', '.join(
        words.format(facts.last(tag))
        for tag, words in (
            ('objective/kl', 'a KL of {:.3g} nats from the initial model'),
            ('objective/score', 'a mean score of {:.3g}'),
            ('objective/kl_coef', 'a KL coefficient of {:.3g}'),
        )
        if tag in facts.curves
    )


def share_of_gain(facts: RunFacts) -> str | None:
    """Return the share of the possible gain in the policy's own reward; None if not known."""
    try:
        assert facts.evaluation is not None
        point = next(iter(facts.evaluation['rewards'].values()))['policy']
        return share(point, facts.evaluation['queries'])
    except (AssertionError, AttributeError, KeyError, StopIteration, TypeError, ValueError):
        return None


def share(point: Mapping[str, Any], queries: int) -> str | None:
    """Format the share of the gain of a point of an evaluation, with its 95 % interval if any."""
    value = value_of(point, 'share') if 'share' in point else None
    if value is None:
        return None
    width = margin(point, 'share', queries)
    return f'{100 * value:.1f} ± {100 * width:.1f} %' if width else _percent(value)


def with_interval(point: Mapping[str, Any], name: str, queries: int) -> str:
    """Format a number of a point of an evaluation, with its 95 % interval; '?' for None."""
    value, width = point[name], margin(point, name, queries)
    if value is None:
        return '?'
    return f'{value:.2f} ± {width:.2f}' if width else f'{value:.2f}'


def comparisons(facts: RunFacts) -> Iterator[str]:
    """Say how often labellers preferred the policy to the initial model before its last step."""
    wins, count = facts.last('online/policy_wins'), facts.last('online/comparisons')
    low, high = (facts.last(f'online/policy_wins_{end}') for end in ('low', 'high'))
    if wins is None or not count:
        return
    interval = ''
    if low is not None and high is not None:
        interval = f'; the 95 % interval is {100 * low:.1f} to {100 * high:.1f} %'
    yield (
        f'Beside the initial model, the policy was preferred in {_percent(wins)} of the last'
        f' {count:.0f} comparisons that were made while it trained{interval}.'
    )


def reward(facts: RunFacts) -> Iterator[str]:
    """Describe the reward of the policy."""
    if facts.policy is None:
        return
    rewards, given = facts.policy.rewards, facts.given_reward
    if given == KNOWN:
        yield (
            'The reward is a known function of the text (the sentiment of words), not a model that'
            ' learned from people.'
        )
    elif facts.reward_function is not None:
        yield f"The reward is a function of the user's, {shortened(facts.reward_function)}."
    elif given is not None:
        name = rewards.class_name
        of_class = '' if name is None else f' The reward is the log odds of its class {name!r}.'
        yield f'The {facts.reward_kind} was given to the run, as {shortened(given)}.{of_class}'
    elif rewards.online is not None:
        yield 'The reward model was trained again and again while the policy learned.'
    else:
        yield 'The same run trained the reward model first.'
    if rewards.members > 1:
        yield f'It is the mean of {rewards.members} reward models that differ by their seeds.'


def labels(found: LabelFacts | None) -> Iterator[str]:
    """Describe labels: their number and source, labellers, agreement."""
    if found is None:
        return
    count = 'An unknown number of' if found.count is None else str(found.count)
    type_ = f' of the type {found.label_type}' if found.label_type else ''
    yield f'{count} labels{type_} {" and ".join(map(_of_source, found.sources))}.'
    if found.labellers is not None and any(source.has_labellers for source in found.sources):
        are = 'labeller' if found.labellers == 1 else 'labellers'
        yield f'{found.labellers} {are} gave them.'
    if found.left_out:
        yield f'The answers of {found.left_out} more were left out.'
    if found.errors:
        yield f'Of these, {_percent(found.errors)} are answers at random.'
    if found.reward_models:
        yield f'From them, {found.reward_models} reward models were trained in turn.'
    for source in found.sources:
        if source.agreement is not None:
            yield from wording.agreement(source.agreement)


def first_of_labels(found: LabelFacts) -> str:
    """Return the number and the sources of labels, to go on in a sentence."""
    first = next(labels(found)).rstrip('.')
    return f'{first[0].lower()}{first[1:]}'


def _of_source(source: Source) -> str:
    return {
        PEOPLE: 'that people gave while the policy trained',
        KNOWN_REWARD: 'that the program made itself from a known reward: no person gave any',
        MADE_UP: 'that the program made up for a test: no person gave any',
        FOLDER: f'of the folder {shortened(source.path)}',
        FILE: f'of {shortened(source.path)}',
    }[source.kind]


def held_out(facts: RunFacts) -> Iterator[str]:
    """Say how well the reward model predicts held-out labels."""
    found, hparams = facts.held_out, facts.policy or facts.reward
    if found is None:
        return
    share = facts.labels.held_out if facts.labels is not None else 0
    part = f' (a share of {share:g} of all)' if share else ''
    is_online = facts.labels is not None and facts.labels.reward_models > 0
    members = 1 if hparams is None or is_online else hparams.members
    warning = SELECTED if facts.reward is not None and facts.reward.keep == BEST else ''
    model = 'The reward model'
    if members > 1:  # logs of earlier versions have the first model's
        which = 'mean' if found.prefix == OF_MEAN else 'first'
        model = f'The {which} of the {members} reward models'
    if found.name != 'accuracy':
        yield (
            f'{model} gives rewards that correlate by {found.value:.3f} with the labels that were'
            f' held out of its training{part}{warning}.'
        )
        return
    interval = ''
    if found.effective_labels:
        right = found.value * found.effective_labels
        low, high = wilson_interval(right, found.effective_labels)
        interval = f'; the 95 % interval is {100 * low:.1f} to {100 * high:.1f} %'
        interval += ', for independent queries'
    yield (
        f'{model} likes best what the labeller liked best in {_percent(found.value)} of the labels'
        f' that were held out of its training{part}{interval}{warning}.'
    )


def not_known(facts: RunFacts | None, *, has_policy: bool) -> Iterator[str]:
    """List what the files do not say. has_policy: whether it concerns a policy."""
    if facts is None:
        yield 'How this model was trained: its directory belongs to no run of this program.'
        return
    if facts.initial_model is None:
        yield 'The settings of the run: their file is missing or damaged.'
    elif facts.base_model is None and facts.initial_model not in OWN_MODELS:
        yield 'What the initial model is called on the hub.'
    if facts.reward_function is not None:
        yield 'What the function computes: its code is not a part of this page.'
    if facts.learned_reward:
        yield from dict.fromkeys(_not_known_of_reward(facts.reward_trainer, facts.reward_kind))
    if has_policy and facts.evaluation is None:
        yield (
            'How close the policy comes to the best one possible: it has not been evaluated'
            ' (./launch.py evaluate does that).'
        )
    if has_policy and 'objective/kl' not in facts.curves:
        yield 'The KL from the initial model at the end: the log is not at hand.'
    if not command_record.read(facts.directory):
        yield (
            'With which commands and versions of the libraries it was trained: there is no record.'
        )
    yield 'How it does on texts other than those of its task.'


def _not_known_of_reward(facts: RunFacts, kind: str) -> Iterator[str]:
    labels = facts.labels
    if labels is None:
        yield f'Which labels the {kind} learned from.'
        return
    if labels.count is None:
        yield 'How many labels the reward model learned from: there is no record of them.'
    for source in labels.sources:
        if source.kind == FILE:
            yield 'Who gave the labels, and how far they agree: label files do not say.'
        elif not source.has_labellers:
            continue
        elif source.agreement is None:
            yield 'How far the labellers agree: the folder of labels is not at hand.'
        elif not source.agreement['pairs']:
            yield 'How far the labellers agree: no question has two answers.'
    if facts.held_out is None:
        why = 'no labels were held out' if not labels.held_out else 'the log is not at hand'
        yield f'How well the reward model predicts labels it has not seen: {why}.'


def older_step(facts: RunFacts) -> str:
    """Return the step of a policy's evaluation and its last one; '' where they are the same."""
    step, last = (facts.evaluation or {}).get('step'), facts.last('elapsed/updates')
    is_older = isinstance(step, int) and last is not None and step < last
    return f'step {step} of {last:.0f}' if is_older else ''


def evaluation_settings(facts: RunFacts) -> str:
    """Return the settings of an evaluation that are not the defaults, by its file's name.

    They begin with the step, where the policy was trained on since.
    """
    names = '|'.join(field.name for field in dataclasses.fields(EvaluationHParams))
    settings = facts.evaluation_file.removesuffix('.json').removeprefix('evaluation')
    settings = re.sub(rf'-({names})_', r', \1 ', settings).removeprefix(', ')
    step = older_step(facts)
    of_older = f'{step}, after which it was trained on' if step else ''
    return ', '.join(filter(None, [of_older, settings]))


def evaluated(results: dict[str, Any]) -> list[str] | None:
    """Return the table of an evaluation as lines of text; None where it is damaged."""
    from lm_human_preferences.evaluation import report

    try:
        return list(report.table(results))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def _percent(share: float) -> str:
    return f'{100 * share:.1f} %'
