"""Three runs, each with a story of its own, told only by their files.

amber   was interrupted, resumed, killed and resumed, and then came close to the best possible
birch   learned from two people, moved far from the initial model, and was stopped by an alarm
cedar   games its reward: its reward model likes it ever more, the known reward ever less
"""

import math

from label_folders import make_folder
from run_folders import (
    write_alarm,
    write_command,
    write_curves,
    write_learned,
    write_lines,
    write_samples,
    write_settings,
)

from lm_human_preferences import storage
from lm_human_preferences.labels.folder import LabelFolder
from lm_human_preferences.labels.labeller import Labeller

QUERIES = [f'the {noun} was' for noun in 'acting plot cast script score film pace ending'.split()]
LABELLERS = ('hedda', 'ivo')
NEW_MODEL = 'rewards__train_new_model__'


def make_three_runs(directory):
    return {make.__name__: make(directory / make.__name__) for make in (amber, birch, cedar)}


def amber(run):
    """Interrupted by Ctrl-C after 8 of 20 steps, killed after 14, of which 12 were saved."""
    write_settings(
        run, 'train_policy', 'mock_sentiment', ranks=2, ppo__total_episodes=5120, ppo__lr=0.002
    )
    counts = {'found': 4096, 'learned_from': 4096, 'held_out': 0, 'simulated': 4096}
    write_learned(run, source='mock', **counts, digest='606121d3' * 8)
    line = (
        './launch.py train_policy mock_sentiment amber --mpi 2 --ppo.total_episodes 5120'
        ' --ppo.lr 0.002'
    )
    times = [f'2026-11-0{day}T08:00:00Z' for day in (2, 3, 4, 5)]
    seeds = {'reward_model': 1, 'policy': 1}
    write_command(run, line, times[0], times[1], 'interrupted', seeds, ranks=2)
    write_command(run, './launch.py resume amber', times[1], ranks=2)
    write_command(run, './launch.py resume amber', times[2], times[3], ranks=2)
    curves = _curves(20, 256, kl=(0.02, 1.97), score=(-0.2, 1.46), kl_coef=(1.5, 1.31))
    for begin, end in ((0, 8), (8, 12), (12, 20)):
        part = {tag: values[begin:end] for tag, values in curves.items()}
        write_curves(run / 'tb/ppo', part, begin, is_resumed=begin > 0)
    write_curves(run / 'tb/reward_model', {'train_reward/minibatch/loss': _line(128, (1.39, 0.35))})
    samples = {step: _samples('weak and bad', step / 20) for step in (0, 5, 10, 15)}
    write_samples(run, samples | {20: _samples('moving and superb', 1)})
    policy = {'kl': 1.968, 'reward': 1.337, 'frontier': 1.474, 'share': 0.907}
    errors = {'kl': 0.012, 'reward': 0.031, 'share': 0.011}
    policy |= {'standard_errors': errors, 'effective_samples': 41.0, 'kl_to_optimum': 0.213}
    points = {'base': {'kl': 0.0, 'reward': -0.192}, 'policy': policy, 'frontier': _frontier(1.8)}
    _evaluate(
        run,
        {'reward model': points},
        exact=False,
        responses=64,
        kl_coef=1.31,
        kl_coef_is_last=True,
    )
    return run


def birch(run):
    """Two people answered 4 questions each and agree on 3; the KL passed its limit, which is 60."""
    online = {'rewards__online': 'on', 'rewards__online__labels': 50}
    write_settings(run, 'train_policy', 'test', ranks=1, run__on_anomaly='stop', **online)
    write_command(
        run,
        './launch.py train_policy test birch --rewards.online.labels 50 --run.on_anomaly stop',
        '2026-11-06T08:00:00Z',
        '2026-11-06T09:00:00Z',
        'failed: UserError',
        {'policy': 1},
    )
    _answer(run / 'labels')
    counts = {'found': 8, 'learned_from': 8, 'held_out': 0, 'simulated': 0}
    write_learned(run, source='online', **counts, answers=dict.fromkeys(LABELLERS, 4))
    batches = [
        {'model': 1, 'step': 0, 'wanted': 4, 'labels': 4, 'answers': dict.fromkeys(LABELLERS, 2)},
        {'model': 2, 'step': 6, 'wanted': 8, 'labels': 8, 'answers': dict.fromkeys(LABELLERS, 4)},
    ]
    for batch in batches:
        write_lines(run / 'labels/used.jsonl', [{**batch, 'digest': 'd' * 64}])
    curves = _curves(12, 64, kl=(0.5, 64.5), score=(0.4, -0.9), kl_coef=(0.15, 0.17))
    write_curves(run / 'tb/ppo', curves)
    write_alarm(run / 'tb/ppo', 12, 'the policy is far from the initial model')
    for step, model, accuracy in ((0, 1, 0.25), (6, 2, 0.625)):
        told = {'model': model, 'labels': 4 * model, 'held_out_accuracy': accuracy}
        tags = {f'online/{name}': [value] for name, value in told.items()}
        write_curves(run / 'tb/ppo', tags, step)
    write_samples(run, {step: _samples('abc', step / 12) for step in (0, 10)})
    return run


def cedar(run):
    """Its reward model learned from 64 labels, a third of them at random."""
    few = {'labels__num_train': 64, 'labels__error': 0.3, 'labels__held_out': 0.25}
    write_settings(
        run,
        'train_policy',
        'mock_sentiment',
        ranks=1,
        rewards__adaptive_kl='off',
        rewards__kl_coef=0.05,
        **{NEW_MODEL + name: value for name, value in few.items()},
    )
    counts = {'found': 64, 'learned_from': 48, 'held_out': 16, 'held_out_queries': 12}
    write_learned(run, source='mock', **counts, simulated=64, digest='0c5edb21' * 8)
    write_command(
        run,
        './launch.py train_policy mock_sentiment cedar --rewards.adaptive_kl off'
        ' --rewards.kl_coef 0.05 --rewards.train_new_model.labels.num_train 64'
        ' --rewards.train_new_model.labels.error 0.3'
        ' --rewards.train_new_model.labels.held_out 0.25',
        '2026-11-07T08:00:00Z',
        '2026-11-07T08:10:00Z',
        seeds={'reward_model': 1, 'policy': 1},
    )
    curves = _curves(200, 256, kl=(0.1, 5.41), score=(-0.02, 3.12), kl_coef=(0.05, 0.05))
    write_curves(run / 'tb/ppo', curves)
    write_alarm(run / 'tb/ppo', 110, 'the policy is far from the initial model')
    held_out = {'accuracy': [0.5625], 'effective_labels': [16.0]}
    tags = {f'train_reward/held_out/{name}': values for name, values in held_out.items()}
    write_curves(run / 'tb/reward_model', tags)
    last = _samples('odd odd odd', 1, score=3.1, kl=5.2)
    last[5] = (QUERIES[5], 'vast vast vast', 3.94, 9.71)
    write_samples(run, {0: _samples('weak and bad', 0), 100: _samples('odd and odd', 0.5)})
    write_samples(run, {200: last})
    by_model = {'kl': 5.41, 'reward': 3.118, 'frontier': 3.149, 'share': 0.99}
    by_known = {'kl': 5.41, 'reward': -0.612, 'frontier': 5.104, 'share': -0.078}
    _evaluate(
        run,
        {
            'reward model': {
                'base': {'kl': 0.0, 'reward': -0.021},
                'policy': by_model,
                'frontier': _frontier(3.3),
            },
            'known reward': {
                'base': {'kl': 0.0, 'reward': -0.197},
                'policy': by_known,
                'frontier': _frontier(5.3),
            },
        },
        exact=True,
        responses=125_000,
        kl_coef=0.05,
    )
    return run


def _line(count, ends):
    """`count` numbers from the first of `ends` to the second."""
    first, last = ends
    return [first + (last - first) * i / (count - 1) for i in range(count)]


def _curves(steps, batch, **ends):
    """The curves of a policy. ends: {name below objective/: its first and last value}."""
    others = {
        'objective/entropy': (7.2, 6.1),
        'ppo/policy/entropy': (2.4, 1.9),
        'ppo/loss/total': (0.09, 0.05),
        'ppo/loss/policy': (-0.001, -0.003),
        'ppo/loss/value': (0.6, 0.4),
        'ppo/val/mean': (0.03, 1.2),
        'ppo/returns/mean': (-0.2, 1.3),
        'ppo/val/var_explained': (0.05, 0.62),
        'elapsed/updates': (1, steps),
        'elapsed/episodes': (batch, batch * steps),
        'elapsed/time': (0.1, 0.1 * steps),
    }
    named = {f'objective/{name}': values for name, values in ends.items()}
    return {tag: _line(steps, values) for tag, values in {**named, **others}.items()}


def _samples(response, share, score=1.4, kl=2.1):
    """An answer to each query, `share` of the way through a training. score, kl: at its end."""
    return [
        (query, f'{response} {number}', share * score - 0.01 * number, share * (kl + number / 50))
        for number, query in enumerate(QUERIES)
    ]


def _frontier(most):
    """A curve that rises towards a reward of `most`."""
    kl = [0.05 * 1.12**i for i in range(50)]
    return {'kl': kl, 'reward': [most * (1 - math.exp(-each)) - 0.2 for each in kl]}


def _evaluate(run, rewards, **found):
    storage.write_json(
        str(run / 'evaluation.json'),
        {'save_dir': str(run), 'queries': 32, 'rewards': rewards, **found},
    )


def _answer(folder):
    make_folder(folder, 4, labellers=2)
    for name, seconds in zip(LABELLERS, (2.0, 5.0), strict=True):
        number = 0
        with Labeller(LabelFolder(str(folder)), name) as labeller:
            while question := labeller.next_question():
                is_other = name == 'ivo' and question.id == min(labeller.folder.questions)
                labeller.answer(question, int(is_other), seconds)
                number += 1
        assert number == 4
