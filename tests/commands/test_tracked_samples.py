"""SAVE_DIR/samples.jsonl: responses of a policy to the same queries during training."""

import math

import numpy as np
import pytest
from command_line import succeed
from online_runs import lines_of

from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.checkpointing.tf_bundle import Bundle
from lm_human_preferences.language import encodings
from lm_human_preferences.trainers.additions import tracked_samples

ENCODER = encodings.Test.get_encoder()
WORDS = (
    'train_policy test run --mpi 1 --rewards.train_new_model off --rewards.trained_model test'
    ' --ppo.total_episodes 192'
)


def train(directory, words=''):
    succeed(f'{WORDS} --save_dir {directory} {words}')
    return directory / 'run'


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracked_samples, 'TIMES', 2)  # every second of three steps
        return train(tmp_path_factory.mktemp('kept'))


def test_the_same_queries_are_answered_before_on_the_way_and_after(run):
    samples = lines_of(run / 'samples.jsonl')
    assert [sample['step'] for sample in samples] == [0] * 8 + [2] * 8 + [3] * 8
    queries = [sample['query'] for sample in samples]
    assert queries[:8] == queries[8:16] == queries[16:] and len(set(queries[:8])) == 8
    assert all(len(sample['response_tokens']) == 4 for sample in samples)
    responses = [sample['response'] for sample in samples]
    assert responses[:8] != responses[8:16] != responses[16:]
    for sample in samples:
        assert sample['response'] == ENCODER.decode(sample['response_tokens'])
        assert math.isfinite(sample['score'])
        assert 0 < abs(sample['kl']) < 2  # both policies began at random, and much alike


def test_training_is_the_same_without(run, tmp_path):
    other = train(tmp_path, '--run.sample_queries 0')
    assert not (other / 'samples.jsonl').exists()
    with_samples, without = (
        Bundle(checkpoints.latest(str(directory / 'policy/checkpoints')))
        for directory in (run, other)
    )
    names = [name for name in with_samples if not name.endswith('_time')]
    assert len(names) > 20
    for name in names:
        np.testing.assert_array_equal(with_samples[name], without[name])


ONCE_DOWN = """
def score(queries, responses):
    if len(responses) == 8 and not FAILED:
        FAILED.append(1)
        raise ConnectionError('down')
    return [len(response) for response in responses]
FAILED = []
"""


def test_a_reward_that_fails_for_them_alone_ends_no_training(tmp_path):
    (tmp_path / 'own.py').write_text(ONCE_DOWN)
    given = f'--rewards.function {tmp_path}/own.py:score --ppo.batch_size 16'
    words = f'train_policy test run --mpi 1 --save_dir {tmp_path} --rewards.train_new_model off'
    printed = succeed(f'{words} {given} --ppo.total_episodes 48').stdout
    assert f'WARNING: {tmp_path}/run/samples.jsonl has no samples of step 0: ' in printed
    assert 'raised ConnectionError: down' in printed
    samples = lines_of(tmp_path / 'run/samples.jsonl')
    assert sorted({sample['step'] for sample in samples}) == [1, 2, 3]


def test_what_comes_again_is_dropped(run, tmp_path):
    whole = (run / 'samples.jsonl').read_text()
    lines = whole.splitlines(keepends=True)
    assert tracked_samples._lines_before(whole, 2) == lines[:8]
    assert tracked_samples._lines_before(whole, 3) == lines[:16]
    assert tracked_samples._lines_before(whole[:-3], 4) == lines[:-1]
    separated = '{"step": 1, "response": "a\u2028b"}\n'  # U+2028 ends no line of JSON
    assert tracked_samples._lines_before(separated, 2) == [separated]
