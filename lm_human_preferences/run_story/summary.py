"""A run in a few sentences: what it was, what it reached, and what went wrong on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from lm_human_preferences.run_story import happenings, sentences
from lm_human_preferences.run_story.facts import RunFacts
from lm_human_preferences.run_story.happenings import ALARM, RESUMED, RETRAINED, Mark
from lm_human_preferences.runs import command_record
from lm_human_preferences.runs.run_files import POLICY, REWARD

MOST_TOLD = 8  # alarms, and steps of other things
_FAR = 0.25  # from the target of the KL, as a share of it


def what_happened(facts: RunFacts) -> list[str]:
    """Three sentences: what was trained on what, what came out, and what went wrong."""
    if facts.policy is None:
        return [_reward_model(facts), _of_labels_held_out(facts), _trouble(facts)]
    return [_policy(facts), _reached(facts), _trouble(facts)]


def on_the_way(facts: RunFacts) -> list[str]:
    """What happened while the run trained, a sentence for each alarm and each kind of the rest."""
    found = []
    for command, what in ((REWARD.command, 'reward model'), (POLICY.command, 'policy')):
        log = facts.logs.get(command)
        if log is None:
            continue
        marks = list(happenings.marks(log))
        alarms = [mark for mark in marks if mark.kind == ALARM]
        found += [
            f'Alarm at step {mark.step + 1} of the {what}: {mark.text}.'
            for mark in alarms[:MOST_TOLD]
        ]
        if len(alarms) > MOST_TOLD:
            found.append(f'{len(alarms) - MOST_TOLD} more alarms of the {what}.')
        for kind, told in (
            (RESUMED, 'The training of the {} was resumed'),
            (RETRAINED, 'While the {} trained, its reward model was trained again'),
        ):
            steps = [mark.step for mark in marks if mark.kind == kind]
            if steps:
                found.append(f'{told.format(what)} before {_steps(steps)}.')
        for tag, step in sorted(log.broken.items()):
            found.append(f'{tag} is not a number from step {step + 1} on.')
    return found


def _policy(facts: RunFacts) -> str:
    assert facts.policy is not None
    began = ' '.join(sentences.beginning(facts)).removeprefix('It began as ').rstrip('.')
    total = facts.policy.ppo.total_episodes
    done = facts.curves.get('elapsed/episodes')
    episodes = f'{total:,} episodes'
    if done is not None and round(done.last) < total:
        episodes = f'{done.last:,.0f} of {total:,} episodes'
    began = began or 'a model that is not known'
    if ',' in began:
        began += ','  # ends what is said between commas
    return f'A policy that began as {began} learned in {episodes} of PPO to raise {_reward(facts)}.'


def _reward(facts: RunFacts) -> str:
    """What was raised."""
    if facts.given_reward == 'mock':
        return 'a known reward, the sentiment of words'
    if facts.reward_function is not None:
        return "a function of the user's"
    labels = facts.reward_trainer.labels
    if labels is None:
        return 'a reward that was given to it'
    told = sentences.labels(labels)[0].rstrip('.')
    return f'a reward that learned from {told[0].lower()}{told[1:]}'


def _reached(facts: RunFacts) -> str:
    """The policy's KL and score at the end, and how far that is from the best."""
    ends = sentences.ends(facts)
    share = sentences.share_of_gain(facts)
    if share is None:
        if not ends:
            return 'What it reached is not known: there is no log, and it has not been evaluated.'
        return (
            f'At the last step in its log it had {ends}; how far that is from the best possible has'
            ' not been measured.'
        )
    assert facts.evaluation is not None
    policy = next(iter(facts.evaluation['rewards'].values()))['policy']
    others = [
        f'by the {name}, which it has not learned from, {sentences.share(points["policy"])}'
        for name, points in list(facts.evaluation['rewards'].items())[1:]
        if sentences.share(points.get('policy', {})) is not None
    ]
    also = f' ({"; ".join(others)})' if others else ''
    return (
        f'It has a KL of {sentences.with_error(policy, "kl")} nats from its initial model and a'
        f' mean reward of {sentences.with_error(policy, "reward")}: {share} of the gain that the'
        f' best possible policy has at that KL{also}.'
    )


def _reward_model(facts: RunFacts) -> str:
    labels = facts.labels
    told = 'labels that are not known'
    if labels is not None:
        first = sentences.labels(labels)[0].rstrip('.')
        told = f'{first[0].lower()}{first[1:]}'
    return f'A reward model learned from {told}.'


def _of_labels_held_out(facts: RunFacts) -> str:
    found = sentences.held_out(facts)
    if found:
        return found[0]
    return 'How well it predicts labels that it has not seen was not measured.'


def _trouble(facts: RunFacts) -> str:
    """What went wrong, as far as the run's files say."""
    marks: list[Mark] = []
    broken: dict[str, int] = {}
    for log in facts.logs.values():
        marks += happenings.marks(log)
        broken |= log.broken
    counts = Counter(mark.kind for mark in marks)
    found = []
    if counts[ALARM]:
        first = min((mark for mark in marks if mark.kind == ALARM), key=lambda mark: mark.step)
        times = 'an alarm' if counts[ALARM] == 1 else f'{counts[ALARM]} alarms, the first'
        found.append(f'{times} at step {first.step + 1} ({first.text})')
    if broken:
        found.append('numbers in its log that are none')
    if counts[RESUMED]:
        steps = [mark.step for mark in marks if mark.kind == RESUMED]
        found.append(f'interruptions, after which it was resumed before {_steps(steps)}')
    found += _unfinished(facts)
    found += _missed_target(facts)
    if not found:
        return 'Its files record nothing that went wrong: no alarm and no interruption.'
    return f'On the way: {"; ".join(found)}.'


def _unfinished(facts: RunFacts) -> list[str]:
    """Whether the run ended before its last step, or the last command on it in an error."""
    found = []
    done = facts.curves.get('elapsed/episodes')
    if facts.policy is not None:
        total = facts.policy.ppo.total_episodes
        if done is None:
            found.append('no step of the policy that its log knows of')
        elif done.last < total:
            found.append(f'an end before its time, after {done.last:,.0f} of {total:,} episodes')
    recorded: list[dict[str, Any]] = command_record.read(facts.directory)
    failed = [each for each in recorded if str(each.get('how', '')).startswith('failed')]
    if failed:
        found.append(f'{len(failed)} {_plural(failed, "command")} that ended in an error')
    return found


def _missed_target(facts: RunFacts) -> list[str]:
    adaptive = None if facts.policy is None else facts.policy.rewards.adaptive_kl
    curve = facts.curves.get('objective/kl')
    if adaptive is None or curve is None or not adaptive.target:
        return []
    if abs(curve.last / adaptive.target - 1) <= _FAR:
        return []
    return [f'a KL of {curve.last:.2f} at the end, where {adaptive.target:g} was the target']


def _steps(steps: Sequence[int]) -> str:
    """Steps as people count them, from 1; only some of many."""
    told = ', '.join(str(step + 1) for step in steps[:MOST_TOLD])
    if len(steps) > MOST_TOLD:
        return f'steps {told} and {len(steps) - MOST_TOLD} more'
    return f'{_plural(steps, "step")} {told}'


def _plural(things: Sequence[Any], name: str) -> str:
    return name if len(things) == 1 else f'{name}s'
