"""A new label type is one class: everything else works with it unchanged.

The class is the example in CONTRIBUTING.md: people rank N responses, and the loss is that of
Plackett and Luce, of which best_of_N is the first factor.
"""

import json
import math

import documentation
import pytest
import torch
from experiments import resolved

from lm_human_preferences import label_types, lm_tasks, train_reward
from lm_human_preferences.distributed.comm import LocalComm
from lm_human_preferences.errors import UserError
from lm_human_preferences.labels.files import load_labels
from lm_human_preferences.labels.simulated import simulated_labels
from lm_human_preferences.language import encodings
from lm_human_preferences.policy import Policy
from lm_human_preferences.synthetic.known_reward import KnownReward


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """Makes the class known, which is written for the end of label_types.py."""
    code = documentation.fenced('CONTRIBUTING.md', 'python')
    monkeypatch.setattr(label_types, 'TYPES', dict(label_types.TYPES))
    exec(code, dict(vars(label_types)))


def hparams_of(experiment, **options):
    hparams = train_reward.HParams()
    hparams.override_from_nested_dict(resolved('train_reward', experiment).to_nested_dict())
    hparams.override_from_dict(
        {
            'labels.type': 'ranking_of_4',
            'run.save_dir': None,
            'run.seed': 1,
            **{name.replace('__', '.'): value for name, value in options.items()},
        }
    )
    hparams.validate()
    return hparams


def test_it_is_known_by_its_name():
    assert label_types.get('ranking_of_3').samples == ('sample0', 'sample1', 'sample2')
    with pytest.raises(UserError, match=r'scalar_compare, ranking_of_N \(as in ranking_of_4, up'):
        label_types.get('ranking')


def test_loss_agrees_with_best_of_two():
    """Of two responses, ranking them is the same as picking the best."""
    rewards = torch.tensor([[0.5, 2.0], [1.0, -1.0], [0.0, 3.0]])
    best = torch.tensor([0, 0, 1])
    ranked = label_types.get('ranking_of_2').loss_of(
        rewards, {'ranking': torch.stack([best, 1 - best], dim=1)}
    )
    picked = label_types.get('best_of_2').loss_of(rewards, {'best': best})
    torch.testing.assert_close(ranked['loss'], picked['loss'])


def test_loss_of_three_by_hand():
    ranking = label_types.get('ranking_of_3')
    labels = {'ranking': torch.tensor([[2, 0, 1]])}
    rewards = torch.tensor([[1.0, 2.0, 0.5]], dtype=torch.float64)
    a, b, c = rewards[0].exp().tolist()
    expected = -math.log(c / (a + b + c)) - math.log(a / (a + b))
    assert ranking.loss_of(rewards, labels)['loss'].item() == pytest.approx(expected)
    guessed = ranking.loss_of(torch.zeros(1, 3), labels)['loss'].item()
    assert guessed == pytest.approx(math.log(6)) == ranking.guessing_loss({})


def test_it_agrees_with_whom_it_simulates():
    ranking = label_types.get('ranking_of_3')
    scores = torch.tensor([[0.3, -1.0, 2.0], [5.0, 4.0, 3.0]])
    labels = ranking.simulate(scores)
    assert labels['ranking'].tolist() == [[2, 0, 1], [0, 1, 2]]
    assert ranking.agreement(scores, labels) == 1 and ranking.agreement(-scores, labels) == -1


def write(tmp_path, *rankings):
    labels = [
        {'query': [1, 2, 3], **{f'sample{i}': [4, 5, 6, i] for i in range(4)}, 'ranking': ranking}
        for ranking in rankings
    ]
    path = tmp_path / 'labels.json'
    path.write_text(json.dumps(labels))
    return str(path)


def test_label_files_are_read(tmp_path):
    path = write(tmp_path, [0, 1, 2, 3], [3, 1, 0, 2])
    labels, _ = load_labels(
        hparams_of('test', labels__source=path, labels__num_train=2, batch_size=2), encodings.Test
    )
    assert labels['ranking'].tolist() == [[0, 1, 2, 3], [3, 1, 0, 2]]
    assert labels['ranking'].dtype == labels['sample3'].dtype == torch.int64


@pytest.mark.parametrize(
    'ranking, told',
    [
        ([0, 1, 1, 3], 'must be the numbers 0 to 3 in some order, not [0, 1, 1, 3]'),
        ([0, 1, 2], 'must be 4 values, not 3 values'),
        ([0, 1, 2, 'x'], 'must be integers, not [0, 1, 2, "x"]'),
        (2, 'must be 4 values, not a int'),
    ],
)
def test_mistakes_in_label_files_are_named(tmp_path, ranking, told):
    path = write(tmp_path, [0, 1, 2, 3], ranking)
    with pytest.raises(UserError) as caught:
        load_labels(
            hparams_of('test', labels__source=path, labels__num_train=2, batch_size=2),
            encodings.Test,
        )
    assert str(caught.value) == f"--labels.source {path}: label 1, field 'ranking' {told}"


def test_labels_are_simulated():
    hparams = hparams_of('mock_sentiment', labels__num_train=32)
    policy = Policy(lm_tasks.initial_model('reviews'))
    labels = simulated_labels(hparams, policy, LocalComm())
    reward = KnownReward(encodings.Reviews)
    scores = [reward.score(labels['query'], labels[f'sample{i}']) for i in range(4)]
    ranked = torch.stack(scores, dim=1).gather(1, labels['ranking'])
    assert (ranked.diff(dim=1) <= 0).all() and (ranked[:, 0] > ranked[:, 3]).any()


def test_a_reward_model_learns_from_it(monkeypatch):
    losses, agreements = [], []
    train_batch = train_reward.RewardModelTrainer.train_batch

    def watched(trainer, *args, **kwargs):
        stats = train_batch(trainer, *args, **kwargs)
        losses.append(stats['loss'])
        agreements.append(trainer.agreement)
        return stats

    monkeypatch.setattr(train_reward.RewardModelTrainer, 'train_batch', watched)
    hparams = hparams_of('test', labels__num_train=4096, lr=0.02)
    train_reward.train(hparams, LocalComm())
    assert len(losses) == 4096 // hparams.batch_size
    assert sum(losses[-8:]) / 8 < 0.8 * math.log(24)
    assert sum(agreements[-8:]) / 8 > 0.5
