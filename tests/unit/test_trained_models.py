"""Sources of models: TensorFlow checkpoints, Hugging Face directories, names; and export."""

import json
import math

import numpy as np
import pytest
import torch
from command_line import invoke, succeed
from compare import assert_close
from golden_data import require, require_bpe
from safetensors.torch import load_file, save_file
from sample_files import tf_variables, write_hugging_face
from tiny_causal_lms import write_chat_model
from tiny_tokenisers import write_byte_level

from lm_human_preferences import storage
from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.checkpointing.checkpoints import write_bundle
from lm_human_preferences.checkpointing.tf_bundle import Bundle
from lm_human_preferences.errors import UserError
from lm_human_preferences.language import encodings
from lm_human_preferences.language.model import Model
from lm_human_preferences.language.networks.gpt2_files import HParams
from lm_human_preferences.language.networks.model_kinds import RELEASED
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.utils import logging

SIZES = dict(n_vocab=27, n_ctx=8, n_embd=4, n_head=2, n_layer=1)
TOKENS = torch.tensor([[3, 1, 4, 1, 5]])


def logits_of(network):
    return network.logits(network.hidden(TOKENS))


@pytest.fixture
def model_dir(tmp_path):
    directory = tmp_path / 'model'
    model = Model(HParams(**SIZES), ['value']).initialize()
    storage.write_json(str(directory / 'hparams.json'), SIZES)
    storage.write_json(str(directory / 'encoding'), 'test')
    checkpoints.save(str(directory), 'model.ckpt', variables(model))
    return directory


def variables(model, scope=''):
    named = tf_variables(model.named_parameters(), scope)
    return {name: variable.numpy() for name, variable in named.items()}


def rewrite(directory, change):
    bundle = Bundle(str(directory / 'model.ckpt'))
    tensors = {name: np.array(value) for name, value in bundle.items()}
    change(tensors)
    write_bundle(str(directory / 'model.ckpt'), tensors)


def error_of(directory):
    with pytest.raises(UserError) as caught:
        TrainedModel(str(directory)).build(scope='policy', scalar_heads=['value'])
    assert '\n' not in str(caught.value)
    return str(caught.value)


def test_missing_heads_are_drawn_and_reported(model_dir, capsys, monkeypatch):
    monkeypatch.setattr(logging, '_console', 'original')
    model = TrainedModel(str(model_dir)).build(scope='reward_model', scalar_heads=['reward'])
    assert capsys.readouterr().out.splitlines() == [
        f'Param reward_model/model/heads/reward/{part} is missing from checkpoint'
        f' {model_dir}/model.ckpt'
        for part in 'wb'
    ]
    assert model.heads['reward'].w.any() and model.heads['reward'].b == 0


@pytest.mark.parametrize(
    'change, told',
    [
        (
            lambda t: t.update({'model/wpe': t['model/wpe'][:4]}),
            ': model/wpe is float32 (4, 4), the model needs float32 (8, 4)',
        ),
        (lambda t: t.pop('model/h0/ln_1/g'), ' lacks tensors of the model: model/h0/ln_1/g'),
    ],
)
def test_tensors_that_do_not_fit_are_named(model_dir, change, told):
    rewrite(model_dir, change)
    assert error_of(model_dir) == f'{model_dir}/model.ckpt{told}'


@pytest.mark.parametrize('kind', ['checkpoint', 'llama'])
def test_values_that_are_not_finite_are_named(tmp_path, model_dir, kind):
    """Of whatever family: the probe would call a NaN a difference of a family's own code."""
    if kind == 'checkpoint':
        rewrite(model_dir, lambda tensors: np.put(tensors['model/h0/ln_1/g'], 2, math.nan))
        name, directory, path = 'model/h0/ln_1/g', model_dir, model_dir / 'model.ckpt'
    else:
        write_chat_model(tmp_path)
        directory, path, name = tmp_path, tmp_path, 'model.layers.0.mlp.up_proj.weight'
        stored = load_file(tmp_path / 'model.safetensors')
        stored[name].flatten()[2] = -math.inf
        save_file(stored, tmp_path / 'model.safetensors', {'format': 'pt'})
    assert error_of(directory) == f'{path} has values that are not finite, first in {name}'


def test_what_is_no_model_is_refused(tmp_path, model_dir):
    assert "unknown model '125M': give one of 124M, 355M" in error_of('125M')
    (tmp_path / 'empty').mkdir()
    assert error_of(tmp_path / 'empty').startswith(f'{tmp_path}/empty/hparams.json: no such file')
    storage.write_json(str(model_dir / 'hparams.json'), {**SIZES, 'n_vocab': 28})
    told = "n_vocab is 28, but the encoding 'test' has 27 tokens"
    assert error_of(model_dir) == f'{model_dir}: {told}'
    storage.write_json(str(model_dir / 'hparams.json'), {**SIZES, 'n_head': 'two'})
    told = f'{model_dir}/hparams.json does not give the sizes of a model, such as n_layer: '
    assert error_of(model_dir).startswith(told)
    storage.write_json(str(model_dir / 'hparams.json'), SIZES)
    (model_dir / 'checkpoint').unlink()
    assert error_of(model_dir).startswith(f'{model_dir} has no weights: no `checkpoint` file')


def test_sizes_of_released_models():
    assert HParams(**RELEASED['124M']).parameters() == 124_439_808
    assert HParams(**RELEASED['1558M']).parameters() == 1_557_611_200


@pytest.mark.parametrize('owner', ['', 'openai-community/'])
def test_released_models_have_the_names_of_hugging_face_too(tmp_path, monkeypatch, owner):
    monkeypatch.chdir(tmp_path)
    names = {'gpt2': '124M', 'gpt2-medium': '355M', 'gpt2-large': '774M', 'gpt2-xl': '1558M'}
    for name, released in names.items():
        assert TrainedModel(owner + name).savedir == f'gs://gpt-2/models/{released}'
    for name, released in {'117M': '124M', '345M': '355M'}.items():
        assert TrainedModel(name).savedir == f'gs://gpt-2/models/{released}'
    # a directory of that name comes first
    (tmp_path / owner / 'gpt2').mkdir(parents=True)
    assert TrainedModel(f'{owner}gpt2').savedir == f'{owner}gpt2'
    assert "unknown model 'gpt3'" in error_of('gpt3')


def test_the_encoding_of_a_released_model_is_known_without_a_network(monkeypatch, cache):
    monkeypatch.setattr(storage.blobs, '_connected', lambda path: pytest.fail('a server is asked'))
    assert TrainedModel('gpt2-xl').encoding is encodings.Main


def test_the_scope_of_a_training_checkpoint_is_found(tmp_path):
    hparams = HParams(**SIZES)
    policy, reference = (Model(hparams).initialize() for _ in range(2))
    run = tmp_path / 'run' / 'policy'
    storage.write_json(str(run / 'hparams.json'), SIZES)
    storage.write_json(str(run / 'encoding'), 'test')
    checkpoints.save(
        str(run / 'checkpoints'),
        'model.ckpt-3',
        {**variables(policy, 'policy'), **variables(reference, 'ref_policy')},
    )
    with torch.no_grad():
        for trained_model, expected in [
            (TrainedModel(str(run)), policy),
            (TrainedModel(str(tmp_path / 'run')), policy),
            (TrainedModel('x', str(run), 'ref_policy'), reference),
        ]:
            logits = logits_of(trained_model.build(scope='policy'))
            assert_close(logits, logits_of(expected), rtol=0, atol=0)


def test_hugging_face_directories_are_read_and_written(tmp_path, model_dir, monkeypatch):
    theirs = tmp_path / 'theirs'
    succeed(f'export {model_dir} {theirs}')  # which compares it with transformers
    ours = TrainedModel(str(model_dir)).build(scope='policy')
    monkeypatch.setattr(encodings, 'Main', encodings.Test)  # without a file `encoding`
    back = TrainedModel(str(theirs)).build(scope='policy')
    with torch.no_grad():
        assert_close(logits_of(back), logits_of(ours), rtol=0, atol=0)
    assert 'is not empty: give a new dir' in invoke(f'export {model_dir} {theirs}').stderr
    (theirs / 'model.safetensors').rename(theirs / 'pytorch_model.bin')
    assert 'pickled weights are not read' in error_of(theirs)


def test_a_model_for_transformers_takes_no_random_numbers(model_dir):
    """A training that loads an adapter of PEFT draws the same ones as without."""
    state = torch.get_rng_state()
    TrainedModel(str(model_dir)).to_transformers()
    assert torch.equal(torch.get_rng_state(), state)


def test_safetensors_that_do_not_fit_are_named(tmp_path):
    write_hugging_face(tmp_path)
    path = tmp_path / 'model.safetensors'
    stored = load_file(path)
    save_file({**stored, 'wpe.weight': stored['wpe.weight'][:4].clone()}, path)
    told = f'{tmp_path}: transformer.wpe.weight is (4, 4), the model needs (8, 4)'
    assert error_of(tmp_path) == told
    stored.pop('h.0.ln_1.weight')
    stored.pop('h.0.ln_2.weight')
    save_file(stored, path)
    told = f'{tmp_path} lacks tensors of the model: transformer.h.0.ln_1.weight and 1 more'
    assert error_of(tmp_path) == told


def test_weights_that_were_fetched_in_part_say_what_is_missing(tmp_path):
    write_hugging_face(tmp_path)
    path, part = tmp_path / 'model.safetensors', tmp_path / 'model-00001-of-00002.safetensors'
    path.rename(part)
    told = f'{tmp_path} has neither model.safetensors nor model.safetensors.index.json'
    assert error_of(tmp_path).startswith(told)
    path.write_text('version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n')
    told = f'{path} is a Git LFS pointer: run `git lfs pull` in its folder'
    assert error_of(tmp_path).endswith(told)


def test_exported_encoding_is_the_one_of_the_model(tmp_path, monkeypatch):
    from transformers import GPT2TokenizerFast

    monkeypatch.setenv('LMHP_GPT2_ENCODINGS', str(require_bpe()))
    succeed(f'export {require("tiny_main_model")} {tmp_path}/out')
    files = [str(tmp_path / 'out' / name) for name in ('vocab.json', 'merges.txt')]
    tokenizer = GPT2TokenizerFast(*files)
    assert tokenizer('Never mind the weather.')['input_ids'] == encodings.Main.get_encoder().encode(
        'Never mind the weather.'
    )


@pytest.mark.parametrize(
    'config, told',
    [
        ({}, 'transformers knows no model None'),
        ({'model_type': 'own', 'auto_map': {'AutoModel': 'code.Model'}}, 'auto_map names, is not'),
        ({'quantization_config': {'quant_method': 'awq'}}, 'describes a quantised model, which'),
        ({'num_hidden_layers': 10**9}, 'no model can have num_hidden_layers = 1e+09'),
        ({'hidden_size': 0, 'head_dim': 8}, 'can make: --n_embd must be'),
        ({'vocab_size': 99}, 'the model knows 99 tokens, but its tokeniser'),
    ],
)
def test_models_that_cannot_be_are_refused(tmp_path, config, told):
    write_byte_level(tmp_path)
    config = {'model_type': 'llama', **config} if config else {}
    (tmp_path / 'config.json').write_text(json.dumps(config))
    assert told in error_of(tmp_path)
