"""language.model against the recordings model/*.npz: padding, masks, the cache, heads."""

import numpy as np
import pytest
import torch
from compare import assert_close, assert_equal, tokens
from golden_data import found, load_json, load_npz, npz_keys, require, under

from lm_human_preferences.language import model, trained_models
from lm_human_preferences.language.parameters import as_tf

ATOL = 2e-5
HEADS = ('value', 'reward')
PADDING = {'main': 50259, 'test': 27}  # of the encodings; contract, section 4
NAMES = [name.removeprefix('model/').removesuffix('.npz') for name in found('model/*.npz')]
PREFIXES = [
    (name, prefix)
    for name in NAMES
    for prefix in sorted(
        {key.split('/')[0] for key in npz_keys('model', f'{name}.npz') if key.endswith('/X')}
    )
]


@pytest.fixture(scope='module')
def build():
    """Function of a name in the set ('test', 'main') -> the model with those weights."""
    built = {}

    def get(name):
        if name not in built:
            directory = require('model', f'checkpoint_{name}')
            hparams = trained_models.load_hparams(str(directory / 'hparams.json'))
            built[name] = model.Model(hparams, HEADS)
            names = {n: (n, p) for n, p in built[name].tf_parameters().items()}
            assert (
                trained_models.load_parameters(trained_models.open_bundle(str(directory)), names)
                == []
            )
        return built[name]

    return get


def padding_of(name):
    return PADDING[load_json('model', f'checkpoint_{name}', 'encoding')]


def check(results, recorded, columns):
    """Compare all recorded outputs; of the logits some columns and, over the whole vocabulary,
    three summaries."""
    logits = results['lm_logits']
    for key in sorted(recorded):
        if key in ('X', 'mask', 'context', 'past'):
            continue
        if key == 'lm_logits_argmax':
            assert_equal(logits.argmax(-1), recorded[key])
            continue
        ours = {
            'lm_logits': lambda: logits[..., tokens(columns)],
            'lm_logits_mean': lambda: logits.mean(-1),
            'lm_logits_logsumexp': lambda: logits.logsumexp(-1),
        }.get(key, lambda key=key: results[key])()
        assert_close(ours, recorded[key], rtol=1e-5, atol=ATOL, name=key)


@pytest.mark.parametrize('name, prefix', PREFIXES, ids='/'.join)
@torch.no_grad()
def test_outputs(build, name, prefix):
    arrays = load_npz('model', f'{name}.npz')
    recorded = under(arrays, f'{prefix}/')
    inputs = {'X': tokens(recorded['X'])}
    if 'past' in recorded:
        inputs['past'] = torch.from_numpy(recorded['past'])
    elif 'mask' in recorded:
        inputs['mask'] = torch.from_numpy(recorded['mask'])
    elif (recorded['X'] == padding_of(name)).any():
        inputs['padding_token'] = padding_of(name)
    check(build(name)(**inputs), recorded, arrays['vocab_columns'])


@pytest.mark.parametrize('name', NAMES)
@torch.no_grad()
def test_past_of_a_context_is_its_present(build, name):
    recorded = under(load_npz('model', f'{name}.npz'), 'past_plain/')
    if not recorded:
        pytest.skip('no recording of past_plain in this set')
    assert_close(
        build(name)(X=tokens(recorded['context']))['present'],
        recorded['past'],
        rtol=1e-5,
        atol=ATOL,
    )


@pytest.mark.parametrize('name', NAMES)
@torch.no_grad()
def test_incremental(build, name):
    """A context with padding, then its continuation in chunks through the cache."""
    arrays = load_npz('model', f'{name}.npz')
    recorded = under(arrays, 'incremental/')
    if not recorded:
        pytest.skip('no recording of incremental in this set')
    padding, columns = padding_of(name), arrays['vocab_columns']
    seen = tokens(recorded['context'])
    results = build(name)(X=seen, padding_token=padding)
    check(results, under(recorded, 'context_'), columns)
    past, new, step = results['present'], tokens(recorded['new_tokens']), 0
    while f'step{step}_h' in recorded:
        expected = under(recorded, f'step{step}_')
        chunk, new = new.split(
            [expected['h'].shape[1], new.shape[1] - expected['h'].shape[1]], dim=1
        )
        results = build(name)(X=chunk, past=past, past_tokens=seen, padding_token=padding)
        check(results, expected, columns)
        past, seen, step = (
            torch.cat([past, results['present']], dim=-2),
            torch.cat([seen, chunk], dim=1),
            step + 1,
        )
    assert step and not new.numel()


@pytest.mark.parametrize('name', NAMES)
@torch.no_grad()
def test_cache_gives_what_a_full_pass_gives(build, name):
    recorded = under(load_npz('model', f'{name}.npz'), 'incremental/')
    if not recorded:
        pytest.skip('no recording of incremental in this set')
    padding, context, new = (
        padding_of(name),
        tokens(recorded['context']),
        tokens(recorded['new_tokens']),
    )
    whole = build(name)(X=torch.cat([context, new], dim=1), padding_token=padding)
    past = build(name)(X=context, padding_token=padding)['present']
    part = build(name)(X=new, past=past, past_tokens=context, padding_token=padding)
    for key in ('h', 'lm_logits', *HEADS):
        assert_close(part[key], whole[key][:, context.shape[1] :], rtol=1e-5, atol=ATOL, name=key)


@pytest.mark.parametrize('name', [n for n in NAMES if n == 'test'])
@torch.no_grad()
def test_padding_repeats_the_last_real_token_and_changes_nothing(build, name):
    real = torch.tensor([[3, 1, 4, 1, 5]])
    padding = padding_of(name)
    padded = torch.tensor([[3, padding, 1, 4, padding, padding, 1, 5, padding]])
    h = build(name)(X=padded, padding_token=padding)['h']
    expected = build(name)(X=real)['h'][:, [0, 0, 1, 2, 2, 2, 3, 4, 4]]
    assert_close(h, expected, rtol=1e-5, atol=ATOL)


@pytest.mark.parametrize('name', [n for n in NAMES if n == 'test'])
def test_what_the_model_refuses(build, name):
    net, n_ctx = build(name), build(name).hparams.n_ctx
    with pytest.raises(
        ValueError, match=f"{n_ctx + 1} tokens are more than the model's context of {n_ctx}"
    ):
        net(X=torch.zeros(1, n_ctx + 1, dtype=torch.int64))
    with pytest.raises(ValueError, match='row 1 has no token, only padding'):
        net.mask_padding(torch.tensor([[1, 27], [27, 27]]), 27)
    with pytest.raises(ValueError, match='at most one of mask and padding_token'):
        net(
            X=torch.zeros(1, 2, dtype=torch.int64),
            mask=torch.ones(1, 2, dtype=torch.bool),
            padding_token=27,
        )


def test_fresh_models_start_as_the_original_did():
    torch.manual_seed(0)
    hparams = model.HParams(n_vocab=500, n_ctx=400, n_embd=96, n_head=2, n_layer=3)
    parameters = model.Model(hparams, HEADS).initialize().tf_parameters()
    for name, std in {
        'wte': 0.02,
        'wpe': 0.01,
        'h1/attn/c_attn/w': 96**-0.5,
        'h2/mlp/c_proj/w': (4 * 96 * 3) ** -0.5,
        'heads/reward/w': 97**-0.5,
    }.items():
        values = parameters[f'model/{name}'].detach()
        assert_close(values.std(), std, rtol=3 / np.sqrt(values.numel()), name=name)
    for name in (
        'h0/ln_1/b',
        'h0/attn/c_attn/b',
        'heads/value/w',
        'heads/value/b',
        'heads/reward/b',
    ):
        assert not parameters[f'model/{name}'].any(), name
    assert (parameters['model/ln_f/g'] == 1).all()


def test_names_and_shapes_of_a_tiny_checkpoint():
    """Every variable of the trained runs' starting point has its place in our model, and the other
    way round."""
    bundle = trained_models.open_bundle(str(require('train_model')))
    net = model.Model(
        trained_models.load_hparams(str(require('train_model', 'hparams.json'))), HEADS
    )
    ours = {name: tuple(as_tf(name, p).shape) for name, p in net.tf_parameters().items()}
    assert ours == {name: bundle[name].shape for name in bundle}
