"""The curves of a run's trainings, with what happened on the way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lm_human_preferences.report_page import charts
from lm_human_preferences.report_page.charts import Chart, Event, Series
from lm_human_preferences.run_story import happenings
from lm_human_preferences.run_story.facts import RunFacts
from lm_human_preferences.runs.run_files import POLICY, REWARD

EVENTS = {  # kind: what the legend says
    happenings.ALARM: 'an alarm',
    happenings.RESUMED: 'resumed',
    happenings.RETRAINED: 'a new reward model',
}


class Plan(NamedTuple):
    """A chart of curves: {tag: name}, the first of which must be there."""

    title: str
    y: str
    tags: dict[str, str]


OF_POLICY = (
    Plan('Score', 'mean score', {'objective/score': 'score'}),
    Plan('Spread of the reward models', 'standard deviation', {'objective/score_std': 'spread'}),
    Plan('KL from the initial model', 'nats', {'objective/kl': 'KL'}),
    Plan('KL coefficient', 'coefficient', {'objective/kl_coef': 'KL coefficient'}),
    Plan(
        'Value',
        'return',
        {'ppo/val/mean': 'predicted by the value head', 'ppo/returns/mean': 'what came'},
    ),
    Plan(
        'Loss',
        'loss',
        {
            'ppo/loss/total': 'loss',
            'ppo/loss/policy': "the policy's part",
            'ppo/loss/value': "the value head's part",
        },
    ),
    Plan('Entropy of the policy', 'nats per token', {'ppo/policy/entropy': 'entropy'}),
)
OF_REWARD = (
    Plan('Loss of the reward model', 'loss', {'train_reward/minibatch/loss': 'loss'}),
    Plan(
        'Labels held out',
        'share predicted right',
        {'train_reward/held_out/accuracy': 'accuracy'},
    ),
    Plan(
        'Labels held out, while the policy learned',
        'share predicted right',
        {'online/held_out_accuracy': 'accuracy'},
    ),
)


def of_policy(facts: RunFacts, identity: str) -> list[Chart]:
    """The charts of a policy's training."""
    log = facts.logs.get(POLICY.command)
    if log is None:
        return []
    events = [Event(*each) for each in happenings.marks(log)]
    return list(_charts(facts, OF_POLICY, events, f'{identity}-policy'))


def of_reward(facts: RunFacts, identity: str) -> list[Chart]:
    """The charts of a reward model's training."""
    log = facts.logs.get(REWARD.command)
    events = [] if log is None else [Event(*each) for each in happenings.marks(log)]
    return list(_charts(facts, OF_REWARD, events, f'{identity}-reward'))


def _charts(
    facts: RunFacts, plans: Sequence[Plan], events: Sequence[Event], identity: str
) -> Iterator[Chart]:
    for place, plan in enumerate(plans):
        series = [
            Series(name, facts.curves[tag].steps, facts.curves[tag].values, colour=colour)
            for colour, (tag, name) in enumerate(plan.tags.items())
            if tag in facts.curves
        ]
        if next(iter(plan.tags)) == 'objective/kl':
            series += _target(facts)
        chart = charts.draw(
            plan.title, charts.STEP, plan.y, series, events, identity=f'{identity}-{place}'
        )
        if chart is not None:
            yield chart


def _target(facts: RunFacts) -> Iterator[Series]:
    """A line at the KL that the coefficient aims at."""
    adaptive = None if facts.policy is None else facts.policy.rewards.adaptive_kl
    curve = facts.curves.get('objective/kl')
    if adaptive is None or curve is None:
        return
    ends = (curve.steps[0], curve.steps[-1])
    yield Series('target', ends, (adaptive.target,) * 2, charts.DASHED, 5)
