"""Curves of a run's trainings, with events."""

from collections.abc import Sequence
from typing import NamedTuple

from lm_human_preferences.report_page import charts
from lm_human_preferences.report_page.charts import Chart, Event, Series
from lm_human_preferences.run_story.facts import RunFacts
from lm_human_preferences.runs import curves
from lm_human_preferences.runs.run_files import POLICY, REWARD


class Plan(NamedTuple):
    """Chart of curves {tag: name}, the first of which must be there."""

    title: str
    y: str
    tags: dict[str, str]


OF_POLICY = (
    Plan('Score', 'mean score', {'objective/score': 'score'}),
    Plan(
        'Responses that end',
        'share',
        {'responses/ended': 'ended', 'responses/valid': 'with an end that counts'},
    ),
    Plan('Length of the responses', 'tokens', {'responses/length': 'tokens up to the end'}),
    Plan('Spread of the reward models', 'standard deviation', {'objective/score_std': 'spread'}),
    Plan('KL from the initial model', 'nats', {'objective/kl': 'KL'}),
    Plan('KL coefficient', 'coefficient', {'objective/kl_coef': 'KL coefficient'}),
    Plan(
        'Value',
        'return',
        {'ppo/val/mean': 'predicted by the value head', 'ppo/returns/mean': 'observed'},
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
        'Held-out labels',
        'share predicted right',
        {'train_reward/held_out/accuracy': 'accuracy'},
    ),
    Plan(
        'Held-out labels, while the policy learned',
        'share predicted right',
        {'online/held_out_accuracy': 'accuracy'},
    ),
)


def of_run(facts: RunFacts, identity: str) -> list[Chart]:
    """Draw the charts of the trainings of a policy and of a reward model."""
    drawn = []
    for files, plans in ((POLICY, OF_POLICY), (REWARD, OF_REWARD)):
        log = facts.logs.get(files.command)
        events = [] if log is None else [Event(*each) for each in curves.marks(log)]
        parts = {
            tag: tag.removeprefix('score/') for tag in facts.curves if tag.startswith('score/')
        }
        if parts and files is POLICY:
            plans = (*plans, Plan('Parts of the score', 'mean', parts))
        for place, plan in enumerate(plans):
            drawn.append(_chart(facts, plan, events, f'{identity}-{files.command}-{place}'))
    return [chart for chart in drawn if chart is not None]


def _chart(facts: RunFacts, plan: Plan, events: Sequence[Event], identity: str) -> Chart | None:
    series = [
        Series(name, facts.curves[tag].steps, facts.curves[tag].values, colour=colour)
        for colour, (tag, name) in enumerate(plan.tags.items())
        if tag in facts.curves
    ]
    kl = facts.curves.get('objective/kl')
    if 'objective/kl' in plan.tags and kl is not None and facts.kl_target is not None:
        ends = (kl.steps[0], kl.steps[-1])
        series.append(Series('target', ends, (facts.kl_target,) * 2, charts.DASHED, 5))
    return charts.layout(plan.title, charts.STEP, plan.y, series, events, identity=identity)
