"""Experiment `mock_sentiment`: reviews from a grammar, a model of them, a known reward."""

import itertools
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from experiments import resolved
from query_sequences import sequences_of

from lm_human_preferences import lm_tasks
from lm_human_preferences.datasets import reviews
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.hparams import reward_options
from lm_human_preferences.labels import training_data
from lm_human_preferences.language import encodings
from lm_human_preferences.language.datasets import get_dataset
from lm_human_preferences.language.networks import reviews_model
from lm_human_preferences.policy import Policy
from lm_human_preferences.synthetic import known_reward

ENCODER = encodings.Reviews.get_encoder()


@pytest.fixture(scope='module')
def reward():
    return known_reward.KnownReward(encodings.Reviews)


def tokens(*texts):
    return torch.tensor([ENCODER.encode(text) for text in texts])


def test_grammar_and_encoding():
    assert len(set(reviews.WORDS)) == len(reviews.WORDS)
    starts = reviews.queries()
    assert len(set(starts)) == len(starts) == 32
    for part in ('train', 'valid', 'test'):
        for text in itertools.islice(reviews.generator(part), 500):
            query, response = text.rsplit(maxsplit=3)[0], ' '.join(text.split()[-3:])
            assert query in starts and len(response.split()) == reviews.RESPONSE
            assert response in reviews.responses(True) or response in reviews.responses(False)
            assert ENCODER.decode(ENCODER.encode(text)) == text
    assert all(math.isclose(sum(reviews.responses(liked).values()), 1) for liked in (True, False))
    assert next(reviews.generator('train')) != next(reviews.generator('valid'))


def test_queries_end_where_the_response_begins():
    """The task's settings cut reviews into exactly the queries of the grammar, padded."""
    task = resolved('train_policy', 'mock_sentiment').task
    end = ENCODER.encode(task.end_text)[0]
    dataset = get_dataset(task.query_dataset)
    sequences = sequences_of(dataset, task.query_length, encoder=ENCODER, end_token=end)
    found = list(itertools.islice(sequences, 1000))
    assert task.query_length == max(len(query.split()) for query in reviews.queries())
    assert {len(tokens) for tokens in found} == {task.query_length}
    assert {ENCODER.decode(tokens) for tokens in found} == set(reviews.queries())


def test_classifier_agrees_with_sentiment(reward):
    texts = [*reviews.responses(True), *reviews.responses(False)]
    scores = reward.score(tokens('the film was').expand(len(texts), -1), tokens(*texts))
    said = torch.tensor([reviews.sentiment(text.split()) for text in texts])
    assert scores.dtype == torch.float32 and torch.corrcoef(torch.stack([scores, said]))[0, 1] > 0.9
    held_out = itertools.islice(reviews.labelled_reviews('test'), 4000)
    texts, liked = zip(*[(text, liked) for text, liked in held_out if len(text.split()) == 6])
    odds = reward.score(tokens(*texts)[:, :3], tokens(*texts)[:, 3:])
    predicted = torch.sigmoid(odds)
    for low in (0, 0.25, 0.5, 0.75):  # calibrated: among those it gives 80 %, 80 % are positive
        among = (predicted >= low) & (predicted < low + 0.25)
        assert abs(predicted[among].mean() - np.mean(np.array(liked)[among.numpy()])) < 0.08


def test_classifier_sums_its_weights(reward):
    """By hand, for three words that no review has in this order; padding says nothing."""
    a, b, c = words = ENCODER.encode('and was good')
    one, two, three = reward.weights
    by_hand = sum(one[word, word] for word in words) + two[a, b] + two[b, c] + three[a, c]
    query, response = tokens('and'), tokens('was good')
    padded = torch.cat([query, torch.full((1, 2), ENCODER.padding_token)], dim=1)
    assert reward.score(query, response).item() == pytest.approx(by_hand.item())
    assert reward.score(padded, response) == reward.score(query, response)


def test_base_model_has_learnt_the_grammar():
    """To the nats that a response takes on average where the grammar is known, exactly."""
    least, good, bad = 0, *map(reviews.responses, (True, False))
    for share in reviews.SUBJECTS.values():
        mixed = [share * good.get(r, 0) + (1 - share) * bad.get(r, 0) for r in {**good, **bad}]
        least -= sum(p * math.log(p) for p in mixed) / len(reviews.SUBJECTS)
    policy = Policy(lm_tasks.initial_model('reviews'))
    drawn = itertools.islice(reviews.generator('test'), 20000)
    texts = [text for text in drawn if len(text.split()) == 6]
    queries, answers = tokens(*texts)[:, :3], tokens(*texts)[:, 3:]
    loss = -policy.analyze_responses(queries, answers)['logprobs'].sum(1).mean().item()
    assert abs(loss - least) < 0.1


def test_a_cached_result_is_made_in_an_empty_directory(monkeypatch, tmp_path):
    monkeypatch.setenv('LMHP_CACHE', str(tmp_path))
    found = []

    def create(directory):
        found.append(os.listdir(directory))
        (Path(directory) / 'made').touch()
        if len(found) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reviews_model.computed_once('thing', create, [reviews_model])
    for _ in range(2):
        path = reviews_model.computed_once('thing', create, [reviews_model])
    assert found == [[], []] and os.listdir(path) == ['made']


def test_base_model_is_made_once_and_always_the_same():
    model = lm_tasks.initial_model('reviews')
    assert lm_tasks.initial_model('reviews').savedir == model.savedir
    assert model.encoding == encodings.Reviews
    first, again = (
        dict(reviews_model.train(model.sizes(), steps=5).named_parameters()) for _ in range(2)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)


def labels_of(kind, seed=0):
    hparams = reward_options.CommandHParams()
    hparams.override_from_nested_dict(resolved('train_reward', 'mock_sentiment').to_nested_dict())
    hparams.labels.type, hparams.labels.num_train = kind, 64
    torch.manual_seed(seed)
    policy = Policy(lm_tasks.initial_model('reviews'))
    return training_data.simulated_labels(hparams, policy, Comm())


def test_best_is_the_best(reward):
    labels, again, other = labels_of('best_of_4'), labels_of('best_of_4'), labels_of('best_of_4', 1)
    assert all(torch.equal(labels[name], again[name]) for name in labels)
    assert not torch.equal(labels['sample0'], other['sample0'])
    scores = torch.stack([reward.score(labels['query'], labels[f'sample{i}']) for i in range(4)])
    assert torch.equal(labels['best'], scores.argmax(0)) and len(set(labels['best'].tolist())) == 4
    assert list(labels) == ['query', 'sample0', 'sample1', 'sample2', 'sample3', 'best']
    assert labels['query'].shape == (64, 5) and labels['sample3'].shape == (64, 3)


def test_other_kinds_of_labels(reward):
    rated, compared = labels_of('scalar_rating'), labels_of('scalar_compare')
    torch.testing.assert_close(rated['score'], reward.score(rated['query'], rated['sample']))
    worse, better = (reward.score(compared['query'], compared[f'sample{i}']) for i in (0, 1))
    torch.testing.assert_close(compared['difference'], better - worse)
