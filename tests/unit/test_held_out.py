"""Held-out labels: choosing them, predicting them, and a training with some."""

import math
import re

import pytest
import torch
from command_line import error_of, invoke, last_error_of, succeed
from events import events_of
from experiments import resolved
from ranks import give_each_thread_its_own_numpy_random, on_ranks

from lm_human_preferences import label_types, train_reward
from lm_human_preferences.commands import learning_curve
from lm_human_preferences.distributed.comm import LocalComm
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.reward_options import HParams
from lm_human_preferences.labels import simulated
from lm_human_preferences.labels.held_out import is_held_out, predict, split
from lm_human_preferences.labels.report.agreement import clustered_interval

PAIRS = label_types.get('best_of_2')
TRAINING = (
    'train_reward test run --mpi 1 --labels.num_train 160 --labels.held_out 0.2'
    ' --normalize_samples 64 --run.save_interval 1'
)


def pairs(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randint(26, (count, 4), generator=generator)  # noqa: E731
    best = torch.randint(2, (count,), generator=generator)
    return {'query': draw(), 'sample0': draw(), 'sample1': draw(), 'best': best}


def test_a_question_is_held_out_by_its_tokens_alone():
    labels = pairs(4000)
    mask = is_held_out(labels, PAIRS, 0.1)
    assert 0.08 < mask.double().mean() < 0.12
    # Other answers, another order, other labels beside them: the same questions.
    shuffled = torch.randperm(4000)
    some = {field: values[shuffled][:500] for field, values in labels.items()}
    some['best'] = 1 - some['best']
    assert is_held_out(some, PAIRS, 0.1).tolist() == mask[shuffled][:500].tolist()
    # A larger share takes more of them beside these.
    assert is_held_out(labels, PAIRS, 0.3)[mask].all()
    assert not is_held_out(labels, PAIRS, 0.0).any()


def hparams(share):
    result = HParams()
    result.override_from_dict({'labels.type': 'best_of_2', 'labels.held_out': share})
    return result


def test_split_loses_nothing():
    labels = pairs(203)
    train, held_out, (note,) = split(labels, hparams(0.25))
    assert held_out is not None
    mask = is_held_out(labels, PAIRS, 0.25)
    for field, values in labels.items():
        assert held_out[field].tolist() == values[mask].tolist()
        assert train[field].tolist() == values[~mask].tolist()
    count = int(mask.sum())
    assert note == f'Held out: {count} of 203 labels; training on {203 - count}'
    assert split(labels, hparams(0.0)) == (labels, None, [])
    few = {field: values[mask] for field, values in labels.items()}
    with pytest.raises(UserError, match='--labels.held_out 0.25 leaves none of'):
        split(few, hparams(0.25))


def rewards_are_first_tokens(queries, responses):
    return responses[:, :, 0].float()


@pytest.mark.parametrize('size', [1, 2, 3])
def test_predictions_do_not_depend_on_ranks_and_batches(size):
    labels = {
        'query': torch.zeros(4, 2, dtype=torch.int64),
        'sample0': torch.tensor([[5, 0], [1, 0], [9, 0], [2, 0]]),
        'sample1': torch.tensor([[4, 0], [2, 0], [3, 0], [7, 0]]),
        'best': torch.tensor([0, 1, 1, 1]),
    }
    for count, accuracy in ((4, 3 / 4), (1, 1.0)):
        some = {field: values[:count] for field, values in labels.items()}
        for prediction in on_ranks(
            size, lambda comm, some=some: predict(rewards_are_first_tokens, some, PAIRS, 2, comm)
        ):
            assert prediction is not None
            assert (prediction.labels, prediction.accuracy, prediction.chance) == (
                count,
                accuracy,
                1 / 2,
            )
            assert prediction.questions == count
    twice = {field: torch.cat([values, values]) for field, values in labels.items()}
    prediction = predict(rewards_are_first_tokens, twice, PAIRS, 2, LocalComm())
    assert prediction is not None and (prediction.labels, prediction.questions) == (8, 4)
    nothing = {field: values[:0] for field, values in labels.items()}
    assert predict(rewards_are_first_tokens, nothing, PAIRS, 2, LocalComm()) is None


def test_what_is_right_in_each_label_type():
    rewards = torch.tensor([[1.0, 3.0], [2.0, -1.0]])
    compare = label_types.get('scalar_compare')
    right = compare.is_right(rewards, {'difference': torch.tensor([0.5, 2.0])})
    assert right is not None and right.tolist() == [True, False]
    rating = label_types.get('scalar_rating')
    assert rating.is_right(rewards[:, :1], {'score': torch.tensor([0.5, 2.0])}) is None
    assert (compare.chance, rating.chance, label_types.get('best_of_4').chance) == (0.5, None, 0.25)


def test_all_answers_to_one_question_are_together_in_the_interval():
    """Four labellers agree on nine of ten questions; the rewards get eight right."""
    query = torch.arange(10).repeat_interleave(4)[:, None]
    samples = {'sample0': torch.zeros(40, 1, dtype=torch.int64), 'sample1': query % 5 + 1}
    best = (query[:, 0] < 8).long()
    best[:2] = 0
    labels = {'query': query, **samples, 'best': best}
    best_of_2 = label_types.get('best_of_2')
    prediction = predict(rewards_are_first_tokens, labels, best_of_2, 16, LocalComm())
    assert prediction.accuracy == 0.75
    interval = clustered_interval([2] + [4] * 7 + [0] * 2, [4] * 10)
    assert prediction.interval() == pytest.approx(interval)
    assert str(prediction) == (
        'as the labeller in 75.0 % of 40 labels (95 % interval 46.0 to 91.3); chance is 50.0 %'
    )


def test_ratings_are_predicted_by_their_correlation():
    sample = torch.tensor([[1], [2], [3]])
    labels = {'query': sample, 'sample': sample, 'score': torch.tensor([2.0, 4.0, 6.0])}
    rating = label_types.get('scalar_rating')
    prediction = predict(rewards_are_first_tokens, labels, rating, 2, LocalComm())
    assert str(prediction) == 'correlation 1.000 with 3 labels'


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp('held_out')
    result = succeed(f'{TRAINING} --save_dir {directory}')
    return directory / 'run', result.stdout


def test_a_training_logs_and_prints_its_accuracy(trained):
    run, printed = trained
    (training_on,) = re.findall(r'Held out: \d+ of 160 labels; training on (\d+)', printed)
    steps = math.ceil(int(training_on) / 32)
    curve = events_of(run / 'tb/reward_model')['train_reward/held_out/accuracy']
    assert [step + 1 for step, _ in curve] == sorted({steps // 4, steps // 2, steps} - {0})
    (percent,) = re.findall(r'held out: as the labeller in ([\d.]+) % of \d+ labels', printed)
    assert curve[-1][1] == pytest.approx(float(percent) / 100, abs=1e-3)
    last = printed.splitlines()[-1]
    assert re.fullmatch(
        rf'Held-out labels: as the labeller in {percent} % of \d+ labels \(95 % interval [\d.]+ to'
        r' [\d.]+\); chance is 25.0 %',
        last,
    )


def test_two_ranks_have_one_accuracy(monkeypatch, capsys):
    """Both take part in every measurement, or one would wait for the other for ever."""
    give_each_thread_its_own_numpy_random(monkeypatch)
    settings = {'labels.num_train': 96, 'labels.held_out': 0.3, 'normalize_samples': 64}
    hparams = resolved('train_reward', 'test', settings)
    on_ranks(2, lambda comm: train_reward.train(hparams, comm))
    assert capsys.readouterr().out.count('held out: as the labeller') == 1


def test_simulated_labels_err_as_often_as_they_should():
    labels = {'best': torch.zeros(8000, dtype=torch.int64)}
    torch.manual_seed(0)
    wrong = simulated._with_errors(labels, label_types.get('best_of_4'), 0.4)['best'] != 0
    assert wrong.double().mean().item() == pytest.approx(0.4 * 3 / 4, abs=0.02)
    assert not labels['best'].any()


def test_errors_are_for_the_source_mock_alone(tmp_path):
    error = error_of(
        invoke(f'train_reward test x --dry_run --labels.error 0.1 --save_dir {tmp_path}')
    )
    assert '--labels.error 0.1: --labels.source test is not' in error


def test_a_dry_run_notices_that_no_label_is_left(tmp_path):
    words = f'train_reward test x --dry_run --save_dir {tmp_path} --batch_size 1'
    words += ' --labels.num_train 1'
    told = last_error_of(invoke(f'{words} --labels.type best_of_3 --labels.held_out 0.9'))
    assert '--labels.held_out 0.9 leaves none of 1 labels' in told
    succeed(words)


@pytest.mark.parametrize('of_run, share', [(0.25, 0.25), (0, 0.1)])
def test_a_learning_curve_holds_out_as_much_as_the_run_or_a_tenth(monkeypatch, of_run, share):
    hparams = resolved('train_reward', 'test')
    hparams.labels.held_out = of_run
    monkeypatch.setattr(learning_curve, 'record_of', lambda run: hparams)
    settings = learning_curve._settings('folder', 'run', None)
    assert (settings.labels.source, settings.labels.held_out) == ('folder', share)


def test_repetitions_of_a_learning_curve_have_seeds_that_follow_the_runs(monkeypatch):
    hparams = resolved('train_reward', 'test')
    hparams.run.seed = 5
    trained = []
    monkeypatch.setattr(learning_curve, 'record_of', lambda run: hparams)
    monkeypatch.setattr(
        learning_curve,
        '_train_on_part',
        lambda hparams, part, seed, found: trained.append((part, seed)),
    )
    learning_curve.learning_curve('folder', 'run', repetitions=2)
    assert trained == [(part, seed) for seed in (5, 6) for part in (8, 4, 2, 1)]


def test_agreement_of_a_comparison_is_that_of_signs():
    """Right about two of three."""
    rewards = torch.tensor([[0.0, 1.0], [2.0, 1.0], [1.0, 2.0]])
    labels = {'difference': torch.tensor([3.0, -1.0, -2.0])}
    agreement = label_types.get('scalar_compare').agreement(rewards, labels)
    assert agreement.item() == pytest.approx((1 + 1 - 1) / 3)
