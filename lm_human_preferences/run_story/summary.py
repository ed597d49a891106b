"""Summary of a run in a few sentences."""

from collections.abc import Iterator, Sequence

from lm_human_preferences.evaluation.report import CLASSIFIER, JUDGE
from lm_human_preferences.run_story import sentences
from lm_human_preferences.run_story.facts import KNOWN, RunFacts
from lm_human_preferences.runs import command_record, curves, run_lock
from lm_human_preferences.runs.run_files import POLICY, REWARD

MOST_SHOWN = 8  # alarms, and steps of other events
_FAR = 0.25  # from the target of the KL, as a share of it


def summary(facts: RunFacts) -> list[str]:
    """Return sentences on the training, its outcome, its troubles, and changed settings."""
    if facts.policy is not None:
        training, outcome = _policy_training(facts), _outcome(facts)
    else:
        labels = 'labels that are not known'
        if facts.labels is not None:
            labels = sentences.first_of_labels(facts.labels)
        training = f'A reward model learned from {labels}.'
        unknown = 'How well it predicts labels that it has not seen was not measured.'
        outcome = next(sentences.held_out(facts), unknown)
    last = 'Its files record nothing that went wrong: no alarm and no interruption.'
    troubles = '; '.join(_troubles(facts))
    if troubles:
        last = f'On the way: {troubles}.'
    return [training, outcome, last, *sentences.changes(facts)]


def _policy_training(facts: RunFacts) -> str:
    total = sentences.total_episodes(facts)
    done = facts.last('elapsed/episodes')
    episodes = f'{done or total:,.0f} episodes'
    if done is not None and round(done) < total:
        episodes = f'{done:,.0f} of {total:,} episodes'
    began = sentences.initial_model(facts) or 'a model that is not known'
    if ',' in began:
        began += ','  # ends what is said between commas
    return f'A policy that began as {began} learned in {episodes} of PPO to raise {_goal(facts)}.'


def _goal(facts: RunFacts) -> str:
    if facts.given_reward == KNOWN:
        return 'a known reward, the sentiment of words'
    if facts.reward_function is not None:
        return "a function of the user's"
    if facts.reward_kind == CLASSIFIER:
        return 'the score of a classifier'
    labels = facts.reward_trainer.labels
    if labels is None:
        return 'a reward that was given to it'
    return f'a reward that learned from {sentences.first_of_labels(labels)}'


def _outcome(facts: RunFacts) -> str:
    """Describe the KL and the score of the policy, and how far that is from the best."""
    values = sentences.last_values(facts)
    share = sentences.share_of_gain(facts)
    if share is None and not values:
        return 'What it reached is not known: there is no log, and it has not been evaluated.'
    if share is None:
        why = 'is more than its evaluation tells'
        if facts.evaluation is None:
            why = 'has not been measured'
        return (
            f'At the last step in its log it had {values}; how far that is from the best possible'
            f' {why}.'
        )
    assert facts.evaluation is not None
    (_, own), *others = facts.evaluation['rewards'].items()
    queries = facts.evaluation['queries']
    judge = facts.evaluation.get('judge')
    also = []
    for name, points in others:
        of_other = sentences.share(points.get('policy', {}), queries)
        if of_other is None:
            continue
        if name == JUDGE and isinstance(judge, str) and facts.has_learned_from(judge):
            also.append(f'by the {name}, a reward that it has learned from, {of_other}')
        else:
            also.append(f'by the {name}, which it has not learned from, {of_other}')
    by_others = f' ({"; ".join(also)})' if also else ''
    kl = sentences.with_interval(own['policy'], 'kl', queries)
    reward = sentences.with_interval(own['policy'], 'reward', queries)
    if step := sentences.older_step(facts):
        kl = f'{kl} (at {step}, when it was evaluated)'
    meaning = ' Each ± is a 95 % interval.' if '±' in f'{kl}{reward}{share}{by_others}' else ''
    return (
        f'It has a KL of {kl} nats from its initial model and a mean reward of {reward}: {share} of'
        f' the gain that the best possible policy has at that KL{by_others}.{meaning}'
    )


def _troubles(facts: RunFacts) -> Iterator[str]:
    """Yield clauses about what went wrong."""
    marks = [mark for log in facts.logs.values() for mark in curves.marks(log)]
    alarms = sorted(mark for mark in marks if mark.kind == curves.ALARM)
    if alarms:
        times = 'an alarm' if len(alarms) == 1 else f'{len(alarms)} alarms, the first'
        yield f'{times} at step {alarms[0].step + 1} ({alarms[0].text})'
    if any(log.broken for log in facts.logs.values()):
        yield 'statistics that end as NaN or infinity'
    resumed = [mark.step for mark in marks if mark.kind == curves.RESUMED]
    if resumed:
        yield f'interruptions, after which it was resumed before {_steps(resumed)}'
    done = facts.last('elapsed/episodes')
    if facts.policy is not None and done is None:
        yield 'no step of the policy that its log knows of'
    elif facts.policy is not None and done is not None:
        total = sentences.total_episodes(facts)
        if done < total and run_lock.is_held(facts.directory):
            yield f'no end yet: it is still training, after {done:,.0f} of {total:,} episodes'
        elif done < total:
            yield f'an end before its time, after {done:,.0f} of {total:,} episodes'
    recorded = command_record.read(facts.directory)
    failed = sum(str(each.get('how', '')).startswith('failed') for each in recorded)
    if failed:
        yield f'{failed} {"command" if failed == 1 else "commands"} that ended in an error'
    target, kl = facts.kl_target, facts.last('objective/kl')
    if target and kl is not None and abs(kl / target - 1) > _FAR:
        yield f'a KL of {kl:.2f} at the end, where {target:g} was the target'


def events(facts: RunFacts) -> Iterator[str]:
    """Yield a sentence for each alarm and for each other kind of event."""
    for command, network in ((REWARD.command, 'reward model'), (POLICY.command, 'policy')):
        log = facts.logs.get(command)
        if log is None:
            continue
        marks = list(curves.marks(log))
        alarms = [mark for mark in marks if mark.kind == curves.ALARM]
        for mark in alarms[:MOST_SHOWN]:
            yield f'Alarm at step {mark.step + 1} of the {network}: {mark.text}.'
        if len(alarms) > MOST_SHOWN:
            yield f'{len(alarms) - MOST_SHOWN} more alarms of the {network}.'
        for kind, event in (
            (curves.RESUMED, f'The training of the {network} was resumed'),
            (
                curves.RETRAINED,
                f'While the {network} trained, its reward model was trained again',
            ),
        ):
            steps = [mark.step for mark in marks if mark.kind == kind]
            if steps:
                yield f'{event} before {_steps(steps)}.'
        for tag, step in sorted(log.broken.items()):
            yield f'{tag} is not a number from step {step + 1} on.'


def _steps(steps: Sequence[int]) -> str:
    """Format steps, counted from 1; only some of many."""
    shown = ', '.join(str(step + 1) for step in steps[:MOST_SHOWN])
    if len(steps) > MOST_SHOWN:
        return f'steps {shown} and {len(steps) - MOST_SHOWN} more'
    return f'{"step" if len(steps) == 1 else "steps"} {shown}'
