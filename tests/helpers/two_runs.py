"""Two runs, each with a story of its own, told only by their files.

amber   was interrupted, resumed, killed and resumed, and then games its reward model, which learned
        from simulated labels: the known reward likes it less than the initial model
birch   learned from two people, moved far from the initial model, and was stopped by an alarm
"""

from label_folders import make_folder
from run_folders import (
    write_alarm,
    write_command,
    write_curves,
    write_learned,
    write_samples,
    write_settings,
)

from lm_human_preferences import storage
from lm_human_preferences.labels.folder import LabelFolder
from lm_human_preferences.labels.labeller import Labeller

QUERIES = [f'the {noun} was' for noun in 'acting plot cast script score film pace ending'.split()]
LABELLERS = ('hedda', 'ivo')


def make_two_runs(directory):
    return {make.__name__: make(directory / make.__name__) for make in (amber, birch)}


def amber(run):
    """Interrupted by Ctrl-C after 8 of 20 steps, killed after 14, of which 12 were saved."""
    write_settings(
        run, 'train_policy', 'mock_sentiment', ranks=2, ppo__total_episodes=5120, ppo__lr=0.002
    )
    counts = {'found': 64, 'learned_from': 48, 'held_out': 16, 'held_out_queries': 12}
    write_learned(run, source='mock', **counts, simulated=64, digest='606121d3' * 8)
    line = (
        './launch.py train_policy mock_sentiment amber --mpi 2 --ppo.total_episodes 5120'
        ' --ppo.lr 0.002'
    )
    times = [f'2026-11-0{day}T08:00:00Z' for day in (2, 3, 4, 5)]
    write_command(run, line, times[0], times[1], 'interrupted', ranks=2)
    write_command(run, './launch.py resume amber', times[1], ranks=2)
    write_command(run, './launch.py resume amber', times[2], times[3], ranks=2)
    curves = _curves(20, 256, kl=(0.02, 1.97), score=(-0.2, 1.46))
    for begin, end in ((0, 8), (8, 12), (12, 20)):
        part = {tag: values[begin:end] for tag, values in curves.items()}
        write_curves(run / 'tb/ppo', part, begin, is_resumed=begin > 0)
    held_out = {'accuracy': [0.5625], 'effective_labels': [16.0]}
    tags = {f'train_reward/held_out/{name}': values for name, values in held_out.items()}
    write_curves(run / 'tb/reward_model', tags)
    write_samples(run, {0: _samples('weak and bad', 0), 20: _samples('moving and superb', 1)})
    errors = {'kl': 0.012, 'reward': 0.031, 'share': 0.011}
    by_model = {'kl': 1.968, 'reward': 1.337, 'frontier': 1.474, 'share': 0.907}
    by_known = {'kl': 1.968, 'reward': -0.612, 'frontier': 5.104, 'share': -0.078}
    rewards = {}
    for name, base, policy in (
        ('reward model', {'kl': 0.0, 'reward': -0.192}, by_model),
        ('known reward', {'kl': 0.0, 'reward': -0.2}, by_known),
    ):
        rewards[name] = {'base': base, 'policy': {**policy, 'standard_errors': errors}}
    results = {'exact': False, 'responses': 64, 'queries': 32, 'rewards': rewards}
    storage.write_json(str(run / 'evaluation.json'), results)
    return run


def birch(run):
    """Two people answered 4 questions each and agree on 3; the KL passed its limit, which is 60."""
    online = {'rewards__online': 'on', 'rewards__online__labels': 50}
    write_settings(run, 'train_policy', 'test', ranks=1, run__on_anomaly='stop', **online)
    line = './launch.py train_policy test birch --rewards.online.labels 50 --run.on_anomaly stop'
    times = '2026-11-06T08:00:00Z', '2026-11-06T09:00:00Z'
    write_command(run, line, *times, 'failed: UserError')
    make_folder(run / 'labels', 4, labellers=2)
    for name, seconds in zip(LABELLERS, (2.0, 5.0), strict=True):
        with Labeller(LabelFolder(str(run / 'labels')), name) as labeller:
            while question := labeller.next_question():
                is_other = name == 'ivo' and question.id == min(labeller.folder.questions)
                labeller.answer(question, int(is_other), seconds)
    counts = {'found': 8, 'learned_from': 8, 'held_out': 0, 'simulated': 0}
    write_learned(run, source='online', **counts, answers=dict.fromkeys(LABELLERS, 4))
    write_curves(run / 'tb/ppo', _curves(12, 64, kl=(0.5, 64.5), score=(0.4, -0.9)))
    write_alarm(run / 'tb/ppo', 12, 'the policy is far from the initial model')
    write_curves(run / 'tb/ppo', {'online/held_out_accuracy': [0.625]}, 6)
    write_samples(run, {step: _samples('abc', step / 12) for step in (0, 10)})
    return run


def _curves(steps, batch, **ends):
    """The curves of a policy. ends: {name below objective/: its first and last value}."""
    named = {f'objective/{name}': values for name, values in ends.items()}
    curves = {}
    for tag, (first, last) in {**named, 'elapsed/episodes': (batch, batch * steps)}.items():
        curves[tag] = [first + (last - first) * i / (steps - 1) for i in range(steps)]
    return curves


def _samples(response, share):
    """An answer to each query, `share` of the way through a training."""
    return [
        (query, f'{response} {number}', share * 1.4 - 0.01 * number, share * (2.1 + number / 50))
        for number, query in enumerate(QUERIES)
    ]
