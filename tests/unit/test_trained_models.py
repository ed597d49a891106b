"""Where models come from: TensorFlow checkpoints whole and damaged, Hugging Face directories,
names; and export."""

import json
import shutil

import numpy as np
import pytest
import torch
from command_line import invoke
from compare import assert_close
from golden_data import require, require_bpe

from lm_human_preferences import storage
from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.checkpointing.checkpoints import write_bundle
from lm_human_preferences.checkpointing.tf_bundle import Bundle
from lm_human_preferences.errors import UserError
from lm_human_preferences.language import encodings, trained_models
from lm_human_preferences.language.parameters import as_tf
from lm_human_preferences.language.trained_models import TrainedModel
from lm_human_preferences.utils import logging

SIZES = dict(n_vocab=27, n_ctx=8, n_embd=4, n_head=2, n_layer=1)
TOKENS = torch.tensor([[3, 1, 4, 1, 5]])


@pytest.fixture
def model_dir(tmp_path):
    """A tiny model directory in TensorFlow's format, with the 27-letter encoding and a value
    head."""
    directory = tmp_path / 'model'
    model = trained_models.model.Model(
        trained_models.model.HParams(**SIZES), ['value']
    ).initialize()
    storage.write_json(str(directory / 'hparams.json'), SIZES)
    storage.write_json(str(directory / 'encoding'), 'test')
    checkpoints.save(str(directory), 'model.ckpt', variables(model))
    return directory


def variables(model, scope=''):
    named = model.tf_parameters(scope)
    return {name: as_tf(name, p.detach()).numpy() for name, p in named.items()}


def rewrite(directory, change):
    """Change the tensors of a checkpoint: `change` edits a dict."""
    tensors = {
        name: np.array(value) for name, value in Bundle(str(directory / 'model.ckpt')).items()
    }
    change(tensors)
    write_bundle(str(directory / 'model.ckpt'), tensors)


def error_of(directory, **settings):
    with pytest.raises(UserError) as caught:
        TrainedModel(str(directory), **settings).build(scope='policy', scalar_heads=['value'])
    assert '\n' not in str(caught.value)
    return str(caught.value)


def test_a_directory_is_loaded_and_nothing_is_missing(model_dir, capsys):
    model = TrainedModel(str(model_dir)).build(scope='policy', scalar_heads=['value'])
    bundle = Bundle(str(model_dir / 'model.ckpt'))
    assert variables(model).keys() == bundle.keys()
    for name, value in variables(model).items():
        np.testing.assert_array_equal(value, bundle[name])
    assert capsys.readouterr().out == ''


def test_missing_heads_are_drawn_and_reported(model_dir, capsys, monkeypatch):
    """A new head is no news, so this is printed as the original did only where that is asked
    for."""
    monkeypatch.setattr(logging, '_console', 'original')
    model = TrainedModel(str(model_dir)).build(scope='reward_model', scalar_heads=['reward'])
    assert capsys.readouterr().out.splitlines() == [
        f'Param reward_model/model/heads/reward/{part} is missing from checkpoint'
        f' {model_dir}/model.ckpt'
        for part in 'wb'
    ]
    assert model.heads['reward'].w.any() and model.heads['reward'].b == 0


def test_a_fresh_value_head_is_zero_and_a_reward_head_has_the_deviation_of_the_original():
    sizes = trained_models.model.HParams(n_vocab=27, n_ctx=8, n_embd=1000, n_head=1, n_layer=1)
    heads = trained_models.model.Model(sizes, ['value', 'reward']).initialize().heads
    assert not heads['value'].w.any() and not heads['value'].b and not heads['reward'].b
    assert heads['reward'].w.std().item() == pytest.approx(1 / np.sqrt(1001), rel=0.2)


@pytest.mark.parametrize(
    'change, told',
    [
        (
            lambda t: t.update({'model/wpe': t['model/wpe'][:4]}),
            '{}/model.ckpt: model/wpe is float32 (4, 4), the model needs float32 (8, 4)',
        ),
        (
            lambda t: t.update({'model/ln_f/g': t['model/ln_f/g'].astype(np.float64)}),
            '{}/model.ckpt: model/ln_f/g is float64 (4,), the model needs float32 (4,)',
        ),
        (
            lambda t: t.pop('model/h0/ln_1/g'),
            '{}/model.ckpt lacks model/h0/ln_1/g and 0 more of the model',
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(model_dir, change, told):
    rewrite(model_dir, change)
    assert error_of(model_dir) == told.format(model_dir)


def test_what_is_no_model_is_refused(tmp_path, model_dir):
    assert (
        error_of('125M')
        == "there is no model '125M': give one of 124M, 355M, 774M, 1558M, or the directory of a"
        ' model'
    )
    (tmp_path / 'empty').mkdir()
    assert (
        error_of(tmp_path / 'empty') == f'{tmp_path}/empty/hparams.json: no such file or directory'
    )
    storage.write_json(str(model_dir / 'hparams.json'), {**SIZES, 'n_vocab': 28})
    assert error_of(model_dir) == f"{model_dir}: its sizes have n_vocab 28, encoding 'test' has 27"
    storage.write_json(str(model_dir / 'hparams.json'), {**SIZES, 'n_head': 'two'})
    assert error_of(model_dir).startswith(
        f'{model_dir}/hparams.json does not hold the sizes of a model: '
    )
    shutil.rmtree(model_dir)
    model_dir.mkdir()
    storage.write_json(str(model_dir / 'hparams.json'), SIZES)
    storage.write_json(str(model_dir / 'encoding'), 'test')
    assert (
        error_of(model_dir)
        == f'{model_dir} has no TensorFlow checkpoint: no `checkpoint` file there or in'
        ' checkpoints/'
    )


def test_the_scope_of_a_training_checkpoint_is_found(tmp_path):
    hparams = trained_models.model.HParams(**SIZES)
    policy, reference = (trained_models.model.Model(hparams).initialize() for _ in range(2))
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
            logits = trained_model.build(scope='policy')(X=TOKENS)['lm_logits']
            assert_close(logits, expected(X=TOKENS)['lm_logits'], rtol=0, atol=0)


@pytest.mark.parametrize('suffix', ['.index', '.data-00000-of-00001', '.resume.json'])
def test_a_damaged_checkpoint_is_passed_over(model_dir, suffix, capsys):
    """The one before it is read, and it is said; with none before it, that is an error."""
    older, newer = (
        TrainedModel(str(model_dir)).build(scope='policy', scalar_heads=['value']) for _ in range(2)
    )
    with torch.no_grad():
        newer.heads['value'].b.add_(1)
    checkpoints.save(str(model_dir), 'model.ckpt-2', variables(newer), state={})
    read = TrainedModel(str(model_dir)).build(scope='policy', scalar_heads=['value'])
    assert read.heads['value'].b == newer.heads['value'].b
    path = model_dir / f'model.ckpt-2{suffix}'
    path.write_bytes(path.read_bytes()[:-1])
    read = TrainedModel(str(model_dir)).build(scope='policy', scalar_heads=['value'])
    assert read.heads['value'].b == older.heads['value'].b
    warning = capsys.readouterr().out
    assert warning.startswith(f'WARNING: {model_dir}/model.ckpt-2')
    assert warning.endswith('; using the checkpoint before it\n')
    (model_dir / 'model.ckpt.index').write_bytes(b'')
    with pytest.raises(UserError, match='model.ckpt.index'):
        TrainedModel(str(model_dir)).build(scope='policy')


def test_hugging_face_directories_are_read_and_written(tmp_path, model_dir, monkeypatch):
    from transformers import GPT2LMHeadModel  # here, as it takes seconds to import

    theirs = tmp_path / 'theirs'
    result = invoke(f'export {model_dir} {theirs}')
    assert result.exit_code == 0, result.output
    network = GPT2LMHeadModel.from_pretrained(theirs)
    ours = TrainedModel(str(model_dir)).build(scope='policy')
    monkeypatch.setattr(
        encodings, 'Main', encodings.Test
    )  # where there is no `encoding` file, it is GPT-2's
    back = TrainedModel(str(theirs)).build(scope='policy')
    with torch.no_grad():
        expected = ours(X=TOKENS)['lm_logits']
        assert_close(network(TOKENS).logits, expected, rtol=1e-5, atol=1e-6)
        assert_close(back(X=TOKENS)['lm_logits'], expected, rtol=0, atol=0)
    assert not list(theirs.glob('*.bin'))


def test_exported_encoding_is_the_one_of_the_model(tmp_path, monkeypatch):
    from transformers import GPT2TokenizerFast

    monkeypatch.setenv('LMHP_GPT2_ENCODINGS', str(require_bpe()))
    result = invoke(f'export {require("tiny_main_model")} {tmp_path}/out')
    assert result.exit_code == 0, result.output
    tokenizer = GPT2TokenizerFast(
        str(tmp_path / 'out' / 'vocab.json'), str(tmp_path / 'out' / 'merges.txt')
    )
    assert tokenizer('Never mind the weather.')['input_ids'] == encodings.Main.get_encoder().encode(
        'Never mind the weather.'
    )


def test_export_keeps_what_is_there(tmp_path, model_dir):
    (tmp_path / 'out').mkdir()
    (tmp_path / 'out' / 'notes.txt').write_text('mine')
    result = invoke(f'export {model_dir} {tmp_path}/out')
    assert (result.exit_code, result.stderr) == (
        2,
        f'error: {tmp_path}/out is not empty: give a new directory\n',
    )


@pytest.mark.parametrize('has_policy', [False, True])
def test_export_of_a_reward_run_says_what_can_be_exported(tmp_path, model_dir, has_policy):
    run = tmp_path / 'run'
    shutil.copytree(model_dir, run / 'reward_model')
    if has_policy:
        shutil.copytree(model_dir, run / 'policy')
    result = invoke(f'export {run} {tmp_path}/out')
    if has_policy:
        assert result.exit_code == 0, result.output
    else:
        assert (result.exit_code, result.stderr) == (
            2,
            (
                f'error: {run} holds a reward model but no policy, and a Hugging Face language'
                ' model has no place for a score. Give a run of train_policy, or the directory or'
                ' name of a language model\n'
            ),
        )
    assert (tmp_path / 'out').exists() == has_policy


@pytest.mark.parametrize(
    'config, told',
    [
        ({'model_type': 'llama'}, 'only GPT-2 with gelu_new is supported, not llama with gelu_new'),
        ({'model_type': 'gpt2', 'activation_function': 'relu'}, 'not gpt2 with relu'),
        (
            {'model_type': 'gpt2', 'vocab_size': 30},
            "its sizes have n_vocab 30, encoding 'main' has 50257",
        ),
    ],
)
def test_other_hugging_face_models_are_refused(tmp_path, config, told):
    (tmp_path / 'config.json').write_text(json.dumps(config))
    assert told in error_of(tmp_path)


def test_pickled_weights_are_not_read(tmp_path, model_dir, monkeypatch):
    monkeypatch.setattr(encodings, 'Main', encodings.Test)
    assert invoke(f'export {model_dir} {tmp_path}/out').exit_code == 0
    (tmp_path / 'out' / 'model.safetensors').rename(tmp_path / 'out' / 'pytorch_model.bin')
    assert 'pickled weights are not read' in error_of(tmp_path / 'out')
