"""The whole chain with models of transformers: every command that takes or makes one."""

import shutil

import numpy as np
import pytest
import torch
from command_line import invoke, last_error_of, succeed
from tiny_causal_lms import both_steps, save, tiny
from tiny_tokenisers import write_byte_level

from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.checkpointing.tf_bundle import Bundle
from lm_human_preferences.language.trained_models import TrainedModel

N_VOCAB = 448  # rows of the embedding, more than the tokeniser has tokens


def make_model(directory, family, disk='float32', shards=None, **settings):
    model = tiny(family, vocab_size=N_VOCAB, **settings).to(getattr(torch, disk))
    sizes = {} if shards is None else {'max_shard_size': shards}
    model.save_pretrained(directory, **sizes)
    write_byte_level(directory)
    return directory


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """A run that was moved, and what it began with, which is gone."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp('trained')
    made = {'disk': 'bfloat16', 'shards': '30KB', 'tie_word_embeddings': True}
    model = make_model(folder / 'model', 'qwen3', attention_dropout=0.1, **made)
    original = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    weight_files = [*model.glob('*.safetensors*')]
    printed = succeed(both_steps(model, folder)).stdout
    (folder / 'run').rename(folder / 'moved')
    shutil.rmtree(model)
    return folder / 'moved', original, weight_files, printed


def test_a_run_begins_with_the_weights_that_are_in_the_files(trained):
    """In bfloat16, in several files; the policy learns all of them."""
    run, original, weight_files, printed = trained
    assert len(weight_files) == 4
    saved = Bundle(checkpoints.latest(str(run / 'policy/checkpoints')))
    for name, parameter in original.named_parameters():
        np.testing.assert_array_equal(saved[f'ref_policy/{name}'], parameter.detach().numpy())
        assert not np.array_equal(saved[f'policy/{name}'], saved[f'ref_policy/{name}'])
    name = 'model.norm.weight'
    assert not np.array_equal(saved[f'reward_model/{name}'], saved[f'ref_policy/{name}'])
    assert 'time left' in printed


@pytest.mark.parametrize(
    'family, settings, dry, told',
    [
        ('mpt', {}, '', 'models of the family mpt are not supported: their positions cannot be'),
        ('mistral', {'sliding_window': 5}, '--dry_run', 'are 7, more than the 5 of --task.'),
    ],
)
def test_what_cannot_be_driven_is_refused_before_a_run_is_there(
    family, settings, told, dry, tmp_path
):
    model = make_model(tmp_path / 'model', family, **settings)
    result = invoke(both_steps(model, tmp_path, dry))
    assert told in last_error_of(result)
    assert '1 rank on a CPU' not in result.output
    assert not (tmp_path / 'run').exists()


def test_a_dry_run_reads_no_weights_of_gpt2(tmp_path, monkeypatch):
    save(tiny('gpt2', vocab_size=50257), tmp_path / 'model')
    monkeypatch.setattr(TrainedModel, 'open_weights', lambda self: pytest.fail('weights are read'))
    succeed(f'train_reward test a --dry_run --task.policy.initial_model {tmp_path}/model')
