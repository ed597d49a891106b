"""The facts about a run in words: plain sentences, without marks of any format.

Text of others in them is as they wrote it; who shows it makes it safe, see markdown.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lm_human_preferences.labels.report.agreement import wilson_interval
from lm_human_preferences.run_story import label_facts
from lm_human_preferences.run_story.commands import shortened
from lm_human_preferences.run_story.facts import KNOWN, RunFacts
from lm_human_preferences.run_story.label_facts import Agreement, LabelFacts, Source
from lm_human_preferences.runs import command_record, run_settings

PAPER = 'Ziegler et al., "Fine-Tuning Language Models from Human Preferences" (arXiv:1909.08593)'
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
    ' also finds what its reward model is wrong about.',
)


def beginning(facts: RunFacts) -> list[str]:
    """What the networks were before the training."""
    model = facts.initial_model
    if model is None:
        return []
    if facts.base_model is not None:
        return [f'It began as {facts.base_model}.']
    return [f'It began as {OWN_MODELS.get(model, f"the local model {shortened(model)}")}.']


def task(facts: RunFacts) -> list[str]:
    """What the queries and the responses are."""
    found = facts.task
    if found is None:
        return []
    sentences = [
        f'Queries are texts of up to {found.query_length} tokens of the data set'
        f' {shortened(found.query_dataset)!r}; responses have up to {found.response_length} tokens,'
        f' sampled at temperature {found.policy.temperature:g}.'
    ]
    if found.query_prefix or found.query_suffix:
        sentences.append(
            f'The policy sees each query between {found.query_prefix!r} and'
            f' {found.query_suffix!r}; the reward model does not see these.'
        )
    if found.chat:
        sentences.append('The policy sees each query in the chat template of the tokeniser.')
    return sentences


def policy_training(facts: RunFacts) -> list[str]:
    """How the policy was trained, and what the end of its log says."""
    hparams = facts.policy
    if hparams is None:
        return []
    adaptive = hparams.rewards.adaptive_kl
    price = f'a KL coefficient of {hparams.rewards.kl_coef:g}'
    if adaptive is not None:
        price += f' that adapted to a target of {adaptive.target:g} nats'
    sentences = [
        f'PPO was to take {hparams.ppo.total_episodes} episodes in batches of'
        f' {hparams.ppo.batch_size}, with {price}.'
    ]
    found = ends(facts)
    if found:
        sentences.append(f'The last step in its log had {found}.')
    return sentences


def ends(facts: RunFacts) -> str:
    """What the last step in the log of a policy had; '' where there is no log."""
    return ', '.join(
        words.format(facts.curves[tag].last)
        for tag, words in (
            ('objective/kl', 'a KL of {:.3g} nats from the initial model'),
            ('objective/score', 'a mean score of {:.3g}'),
            ('objective/kl_coef', 'a KL coefficient of {:.3g}'),
        )
        if tag in facts.curves
    )


def share_of_gain(facts: RunFacts) -> str | None:
    """How much of the possible gain of its own reward the policy has; None where not measured."""
    try:
        assert facts.evaluation is not None
        return share(next(iter(facts.evaluation['rewards'].values()))['policy'])
    except (AssertionError, AttributeError, KeyError, StopIteration, TypeError, ValueError):
        return None


def share(point: Mapping[str, Any]) -> str | None:
    """The share of the gain of a point of an evaluation, with its standard error if it has one."""
    value = point.get('share')
    if value is None:
        return None
    error = point.get('standard_errors', {}).get('share')
    return f'{100 * value:.1f} ± {100 * error:.1f} %' if error else f'{100 * value:.1f} %'


def with_error(point: Mapping[str, Any], name: str) -> str:
    """A number of a point of an evaluation, with its standard error if it has one."""
    error = point.get('standard_errors', {}).get(name)
    return f'{point[name]:.2f} ± {error:.2f}' if error else f'{point[name]:.2f}'


def comparisons(facts: RunFacts) -> list[str]:
    """How often labellers preferred the policy to the initial model while it trained."""
    wins, count = (facts.curves.get(f'online/{name}') for name in ('policy_wins', 'comparisons'))
    if wins is None or count is None or not count.last:
        return []
    return [
        f'Beside the initial model, the policy was preferred in {_percent(wins.last)} of'
        f' {count.last:.0f} comparisons, made while it trained.'
    ]


def reward(facts: RunFacts) -> list[str]:
    """Where the policy's reward is from."""
    if facts.policy is None:
        return []
    members = facts.policy.rewards.members
    if members == 1:
        return _origin_of_reward(facts)
    mean = f'It is the mean of {members} reward models that differ by their seeds.'
    return [*_origin_of_reward(facts), mean]


def _origin_of_reward(facts: RunFacts) -> list[str]:
    assert facts.policy is not None
    given = facts.given_reward
    if given == KNOWN:
        return [
            'The reward is a known function of the text (the sentiment of words), not a model that'
            ' learned from people.'
        ]
    if facts.reward_function is not None:
        return [f"The reward is a function of the user's, {shortened(facts.reward_function)}."]
    if given is not None:
        name = facts.policy.rewards.class_name
        of_class = '' if name is None else f' The reward is the log odds of its class {name!r}.'
        return [f'The reward model was given to the run, as {shortened(given)}.{of_class}']
    if facts.policy.rewards.online is not None:
        return ['The reward model was trained again and again while the policy learned.']
    return ['The same run trained the reward model first.']


def one_of(members: int) -> list[str]:
    """That a reward model is one of so many in its ensemble."""
    if members == 1:
        return []
    return [
        f'It is one of {members} reward models that learned from the same labels with other seeds;'
        ' the reward of the run is the mean of their scores.'
    ]


def labels(found: LabelFacts | None) -> list[str]:
    """Which labels the reward model learned from: how many, and whose."""
    if found is None:
        return []
    count = 'An unknown number of' if found.count is None else str(found.count)
    type_ = f' of the type {found.label_type}' if found.label_type else ''
    whose = ' and '.join(map(_whose, found.sources))
    sentences = [f'{count} labels{type_} {whose}.']
    if found.labellers is not None and any(source.has_labellers for source in found.sources):
        are = 'labeller' if found.labellers == 1 else 'labellers'
        sentences.append(f'{found.labellers} {are} gave them.')
    if found.left_out:
        sentences.append(f'The answers of {found.left_out} more were left out.')
    if found.errors:
        sentences.append(f'Of these, {_percent(found.errors)} are answers at random.')
    if found.reward_models:
        sentences.append(f'From them, {found.reward_models} reward models were trained in turn.')
    for source in found.sources:
        sentences += agreement(source.agreement)
    return sentences


def _whose(source: Source) -> str:
    """Which labels those of a source are: what follows on `labels`."""
    return {
        label_facts.PEOPLE: 'that people gave while the policy trained',
        label_facts.KNOWN_REWARD: 'that the program made itself from a known reward: no person'
        ' gave any',
        label_facts.MADE_UP: 'that the program made up for a test: no person gave any',
        label_facts.FOLDER: f'of the folder {shortened(source.path)}',
        label_facts.FILE: f'of {shortened(source.path)}',
    }[source.kind]


def agreement(found: Agreement | None) -> list[str]:
    """How far labellers agree."""
    if found is None or not found.pairs:
        return []
    where = f'{found.pairs} pairs of answers to {found.questions} questions'
    alpha = '' if found.alpha is None else f"; Krippendorff's alpha is {found.alpha:.3f}"
    if found.same is None or found.chance is None:
        return [f'Labellers rated the same question in {where}{alpha}.']
    ends = ''
    if found.interval is not None:
        low, high = found.interval
        ends = f' (95 % interval {100 * low:.1f} to {100 * high:.1f} %)'
    return [
        f'Labellers who answered the same question agreed in {_percent(found.same)} of'
        f' {where}{ends}; chance is {_percent(found.chance)}{alpha}.'
    ]


def held_out(facts: RunFacts) -> list[str]:
    """How well the reward model predicts labels that it has not learned from."""
    if facts.held_out is None:
        return []
    name, value = facts.held_out
    share = facts.labels.held_out if facts.labels is not None else 0
    part = f' (a share of {share:g} of all)' if share else ''
    model = _measured_on_held_out(facts)
    if name == 'accuracy':
        return [
            f'{model} likes best what the labeller liked best in {_percent(value)} of the'
            f' labels that were held out of its training{part}{_interval(facts, value)}.'
        ]
    return [
        f'{model} gives rewards that correlate by {value:.3f} with the labels that were held out of'
        f' its training{part}.'
    ]


def _measured_on_held_out(facts: RunFacts) -> str:
    """Which reward model the log tells of: of an ensemble the first, or online the mean of all."""
    hparams = facts.policy or facts.reward
    is_online = facts.labels is not None and facts.labels.reward_models > 0
    if hparams is None or is_online or run_settings.members(hparams) == 1:
        return 'The reward model'
    return f'The first of the {run_settings.members(hparams)} reward models'


def _interval(facts: RunFacts, accuracy: float) -> str:
    """The 95 % interval of the accuracy on labels held out; '' where it is not known."""
    count = facts.held_out_labels
    if not count:
        return ''
    low, high = wilson_interval(accuracy * count, count)
    return f'; the 95 % interval is {100 * low:.1f} to {100 * high:.1f} %'


def not_known(facts: RunFacts | None, *, has_policy: bool) -> list[str]:
    """What a reader would want to know and the files do not tell. has_policy: it is about one."""
    if facts is None:
        return ['How this model was trained: its directory belongs to no run of this program.']
    found = []
    if facts.initial_model is None:
        found.append('The settings of the run: their file is missing or damaged.')
    elif facts.base_model is None and facts.initial_model not in OWN_MODELS:
        found.append('What the initial model is called on the hub.')
    if facts.reward_function is not None:
        found.append('What the function computes: its code is not a part of this page.')
    if facts.learned_reward:
        found += _not_known_of_reward(facts.reward_trainer)
    if has_policy and facts.evaluation is None:
        found.append(
            'How close the policy comes to the best one possible: the run has no evaluation.json'
            ' (./launch.py evaluate writes one).'
        )
    if has_policy and 'objective/kl' not in facts.curves:
        found.append('The KL from the initial model at the end: the log is not at hand.')
    if not command_record.read(facts.directory):
        found.append(
            'With which commands and versions of the libraries it was trained: there is no record.'
        )
    found.append('How it does on texts other than those of its task.')
    return found


def _not_known_of_reward(facts: RunFacts) -> list[str]:
    labels = facts.labels
    if labels is None:
        return ['Which labels the reward model learned from.']
    found = []
    if labels.count is None:
        found.append('How many labels the reward model learned from: there is no record of them.')
    for source in labels.sources:
        found += [told for told in _not_known_of_source(source) if told not in found]
    if facts.held_out is None:
        why = 'no labels were held out' if not labels.held_out else 'the log is not at hand'
        found.append(f'How well the reward model predicts labels it has not seen: {why}.')
    return found


def _not_known_of_source(source: Source) -> list[str]:
    if source.kind == label_facts.FILE:
        return ['Who gave the labels, and how far they agree: label files do not say.']
    if not source.has_labellers:
        return []
    if source.agreement is None:
        return ['How far the labellers agree: the folder of labels is not at hand.']
    if not source.agreement.pairs:
        return ['How far the labellers agree: no question has two answers.']
    return []


def evaluated(results: dict[str, Any]) -> list[str] | None:
    """The table of an evaluation as lines of text; None where it is damaged."""
    from lm_human_preferences.evaluation import report

    try:
        return list(report.table(results))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def _percent(share: float) -> str:
    return f'{100 * share:.1f} %'
