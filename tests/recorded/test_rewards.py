"""Reward models: normalisation and the scores of saved ones, against reward_training/."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from compare import assert_close, tokens
from experiments import resolved
from golden_data import found, json_if_there, load_json, load_npz, npz_keys, require, under
from trainers import trained_model

from lm_human_preferences import lm_tasks
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import UserError
from lm_human_preferences.language import encodings
from lm_human_preferences.reward_sources.sources import source_of
from lm_human_preferences.rewards import RewardModel, TrainedRewardModel
from lm_human_preferences.synthetic.known_reward import KnownReward

ATOL = 2e-5
SCORED = sorted({key.split('/')[0] for key in npz_keys('reward_training', 'scores.npz')})
OF_TEST_ENCODING = [
    directory
    for directory in found('*/reward_model') + found('reward_training/saved_*/reward_model')
    if json_if_there(directory, 'encoding') == 'test'
]
NORMS = json_if_there('reward_training', 'set_reward_norm.json', default={'cases': ()})


@pytest.fixture
def fresh():
    return RewardModel(trained_model('train_model'))


@pytest.mark.parametrize(
    'case', NORMS['cases'], ids=lambda case: f'{case["old_mean"]:.3g}+-{case["old_std"]:.3g}'
)
def test_set_reward_norm(fresh, case):
    scales = {name: case[name] for name in ('old_mean', 'old_std', 'new_mean', 'new_std')}
    fresh.set_reward_norm(**scales)
    assert_close(fresh.reward_gain, case['gain'], rtol=1e-6)
    assert_close(fresh.reward_bias, case['bias'], rtol=1e-6, atol=1e-7)
    told = NORMS['calling_it_without_reset']['message'].split(', not ')[0]
    with pytest.raises(ValueError, match=f'^{told}'):
        fresh.set_reward_norm(**scales)
    fresh.reset_reward_scale()
    fresh.set_reward_norm(**scales)
    assert_close(fresh.reward_gain, case['gain'], rtol=1e-6)


@pytest.mark.parametrize(
    'scales', [dict(old_std=0.0), dict(old_mean=np.nan), dict(new_std=np.inf)], ids=str
)
def test_scales_that_cannot_be(fresh, scales):
    with pytest.raises(ValueError, match='^cannot map rewards of '):
        usual = dict(old_mean=0.0, old_std=1.0, new_mean=0.0, new_std=1.0)
        fresh.set_reward_norm(**{**usual, **scales})


@pytest.mark.parametrize('name', SCORED)
def test_scores_of_a_saved_reward_model(name):
    directory = require('reward_training', f'saved_{name}', 'reward_model')
    recorded = under(load_npz('reward_training', 'scores.npz'), f'{name}/')
    model = TrainedRewardModel(str(directory), encodings.Test)
    scores = model.score(tokens(recorded['queries']), tokens(recorded['responses']))
    assert_close(scores, recorded['rewards'], rtol=0, atol=ATOL)
    assert_close(model.reward_gain, recorded['gain'], rtol=0)
    assert_close(model.reward_bias, recorded['bias'], rtol=0)
    assert not scores.requires_grad and not any(p.requires_grad for p in model.get_params())


@pytest.mark.parametrize('directory', OF_TEST_ENCODING)
def test_a_run_directory_will_do(directory):
    models = [
        TrainedRewardModel(str(path), encodings.Test)
        for path in (require(directory), require(directory).parent)
    ]
    for a, b in zip(*(model.get_params() for model in models), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    'files, told',
    [
        ({'hparams.json': {'n_vocab': 50257}}, "knows 50257 tokens, but encoding 'test' of"),
        # Even where it has as many tokens.
        ({'hparams.json': {}, 'encoding': 'tokenizer-1'}, "has the encoding 'tokenizer-1', not"),
        ({}, r'no sequence classifier of transformers, and no hparams.json, nor does its'),
    ],
)
def test_what_is_no_reward_model_of_this_encoding_is_refused(tmp_path, files, told):
    sizes = load_json('train_model', 'hparams.json')
    for name, content in files.items():
        content = content if name == 'encoding' else {**sizes, **content}
        (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(UserError, match=f'^--rewards.trained_model .*{told}'):
        TrainedRewardModel(str(tmp_path), encodings.Test)


def test_a_run_whose_reward_model_was_deleted_has_a_copy_in_its_policy(tmp_path):
    hparams = resolved('train_policy', 'test')
    assert source_of(hparams).place_in(str(tmp_path)) == f'{tmp_path}/policy'
    (tmp_path / 'reward_model').mkdir()
    (tmp_path / 'reward_model/hparams.json').touch()
    assert source_of(hparams).place_in(str(tmp_path)) == f'{tmp_path}/reward_model'


@pytest.mark.parametrize('rank', [0, 1])
def test_every_rank_reads_a_saved_reward_model_and_rank_0_one_of_this_run(rank, tmp_path):
    """Other hosts may not see the directory of a run, and get the values from rank 0."""
    comm = Comm()
    comm.rank = rank
    hparams = resolved('train_policy', 'mock_sentiment')
    reference = SimpleNamespace(trained_model=lm_tasks.initial_model('reviews'))
    hparams.rewards.trained_model = f'{tmp_path}/reward_model'
    if rank == 0:
        with pytest.raises(UserError, match=f'--rewards.trained_model {tmp_path}'):
            source_of(hparams).for_training(comm, reference)
    else:
        assert source_of(hparams).for_training(comm, reference).model.sizes.n_vocab == 50
    hparams.rewards.train_new_model, hparams.rewards.trained_model = None, 'mock'
    assert isinstance(source_of(hparams).for_training(comm, reference), KnownReward)
