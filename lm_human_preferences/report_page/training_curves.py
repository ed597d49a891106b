"""Curves of a run's trainings, with events."""

from lm_human_preferences.report_page import charts
from lm_human_preferences.report_page.charts import Chart, Event, Series
from lm_human_preferences.run_story.facts import RunFacts
from lm_human_preferences.runs import curves
from lm_human_preferences.runs.run_files import POLICY, REWARD

# (title, y, {tag: name}) of each chart; STEP is its x.
_RIGHT = 'share predicted right'
OF_POLICY = [
    ('Score', 'mean score', {'objective/score': 'score'}),
    (
        'Responses that end',
        'share',
        {'responses/ended': 'ended', 'responses/valid': 'with an end that counts'},
    ),
    ('Length of the responses', 'tokens', {'responses/length': 'tokens up to the end'}),
    ('Spread of the scores', 'standard deviation', {'objective/score_std': 'spread'}),
    ('KL from the initial model', 'nats', {'objective/kl': 'KL'}),
    ('KL coefficient', 'coefficient', {'objective/kl_coef': 'KL coefficient'}),
    (
        'Value',
        'return',
        {'ppo/val/mean': 'predicted by the value head', 'ppo/returns/mean': 'observed'},
    ),
    (
        'Loss',
        'loss',
        {
            'ppo/loss/total': 'loss',
            'ppo/loss/policy': "the policy's part",
            'ppo/loss/value': "the value head's part",
        },
    ),
    ('Entropy of the policy', 'nats per token', {'ppo/policy/entropy': 'entropy'}),
]
OF_REWARD = [
    ('Loss of the reward model', 'loss', {'train_reward/minibatch/loss': 'loss'}),
    ('Held-out labels', _RIGHT, {'train_reward/held_out/accuracy': 'accuracy'}),
    ('Held-out labels, while the policy learned', _RIGHT, {'online/held_out_accuracy': 'accuracy'}),
    (
        'Cross-validation, while the policy learned',
        _RIGHT,
        {'online/cross_validated_accuracy': 'accuracy'},
    ),
]


def charts_of_training(facts: RunFacts, identity: str) -> list[Chart]:
    """Return the charts of the trainings of a policy and of a reward model."""
    parts = {tag: tag.removeprefix('score/') for tag in facts.curves if tag.startswith('score/')}
    found = []
    for files, plans in (
        (POLICY, [*OF_POLICY, ('Parts of the score', 'mean', parts)]),
        (REWARD, OF_REWARD),
    ):
        log = facts.logs.get(files.command)
        events = [] if log is None else [Event(*each) for each in curves.marks(log)]
        for place, (title, y, tags) in enumerate(plans):
            name = f'{identity}-{files.command}-{place}'
            series = _series(facts, tags)
            found.append(charts.layout(title, charts.STEP, y, series, events, identity=name))
    return [chart for chart in found if chart is not None]


def _series(facts: RunFacts, tags: dict[str, str]) -> list[Series]:
    series = [
        Series(name, facts.curves[tag].steps, facts.curves[tag].values, colour=colour)
        for colour, (tag, name) in enumerate(tags.items())
        if tag in facts.curves
    ]
    kl = facts.curves.get('objective/kl')
    if 'objective/kl' in tags and kl is not None and facts.kl_target is not None:
        ends = (kl.steps[0], kl.steps[-1])
        series.append(Series('target', ends, (facts.kl_target,) * 2, charts.DASHED, 5))
    return series
