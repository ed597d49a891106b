"""language.model against the recordings model/*.npz: padding, masks, the cache, heads."""

import numpy as np
import pytest
import torch
from compare import assert_close, assert_equal, tokens
from golden_data import found, load_json, load_npz, npz_keys, require, under
from sample_files import tf_variables

from lm_human_preferences.language import model, trained_models
from lm_human_preferences.language.networks.attention import KVCache
from lm_human_preferences.language.networks.weights import CheckpointWeights, load_parameters

ATOL = 2e-5
HEADS = ('value', 'reward')
UNUSED = ('losses', '_regularizer')  # of the original's outputs: no training here reads them
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
    built = {}

    def get(name):
        if name not in built:
            directory = require('model', f'checkpoint_{name}')
            hparams = trained_models.load_hparams(str(directory / 'hparams.json'))
            built[name] = model.Model(hparams, HEADS)
            weights = CheckpointWeights(str(directory), model.Model.variable_names)
            assert load_parameters(weights, dict(built[name].named_parameters()), scope='') == []
        return built[name]

    return get


def outputs(network, X, *, past=None, past_tokens=None, mask=None, padding_token=None):
    """Return the original model's outputs for `X (batch, length)`: h, present, lm_logits, heads.

    Padding is given by `mask` (bool, of past and X) or by `padding_token`; the latter needs
    `past_tokens (batch, past_length)` beside `past (batch, n_layer, 2, n_head, past_length, d)`.
    """
    if padding_token is not None:
        mask = torch.ne(X, padding_token)
        X = X * mask
        if past is not None:
            mask = torch.cat([torch.ne(past_tokens, padding_token), mask], dim=1)
    start = 0 if past is None else past.shape[-2]
    cache = KVCache(start + X.shape[1])
    if past is not None:
        with_room = torch.nn.functional.pad(past, (0, 0, 0, X.shape[1]))
        cache.layers, cache.length = list(with_room.permute(1, 2, 0, 3, 4, 5)), start
    h = network.hidden(X, mask, cache)
    present = torch.stack(cache.layers)[..., start : cache.length, :].permute(2, 0, 1, 3, 4, 5)
    heads = {name: head(h) for name, head in network.heads.items()}
    return {'h': h, 'present': present, 'lm_logits': network.logits(h), **heads}


def padding_of(name):
    return PADDING[load_json('model', f'checkpoint_{name}', 'encoding')]


def check(results, recorded, columns):
    logits = results['lm_logits']
    for key in sorted(recorded):
        if key in ('X', 'mask', 'context', 'past') or key.endswith(UNUSED):
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
    check(outputs(build(name), **inputs), recorded, arrays['vocab_columns'])


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
    results = outputs(build(name), seen, padding_token=padding)
    check(results, under(recorded, 'context_'), columns)
    past, new, step = results['present'], tokens(recorded['new_tokens']), 0
    while f'step{step}_h' in recorded:
        expected = under(recorded, f'step{step}_')
        length = expected['h'].shape[1]
        chunk, new = new[:, :length], new[:, length:]
        results = outputs(build(name), chunk, past=past, past_tokens=seen, padding_token=padding)
        check(results, expected, columns)
        past = torch.cat([past, results['present']], dim=-2)
        seen, step = torch.cat([seen, chunk], dim=1), step + 1
    assert step and not new.numel()


@pytest.mark.parametrize('name', [n for n in NAMES if n == 'test'])
def test_what_the_model_refuses(build, name):
    net, n_ctx = build(name), build(name).sizes.n_ctx
    told = f"{n_ctx + 1} tokens are more than the model's context of {n_ctx}"
    with pytest.raises(ValueError, match=told):
        outputs(net, torch.zeros(1, n_ctx + 1, dtype=torch.int64))
    with pytest.raises(ValueError, match='row 1 has only padding, no token'):
        net.mask_padding(torch.tensor([[1, 27], [27, 27]]), 27)


def test_fresh_models_start_as_the_original_did():
    torch.manual_seed(0)
    hparams = model.HParams(n_vocab=500, n_ctx=400, n_embd=96, n_head=2, n_layer=3)
    network = model.Model(hparams, HEADS).initialize()
    parameters = tf_variables(network.named_parameters())
    for name, std in {
        'wte': 0.02,
        'wpe': 0.01,
        'h1/attn/c_attn/w': 96**-0.5,
        'h2/mlp/c_proj/w': (4 * 96 * 3) ** -0.5,
        'heads/reward/w': 97**-0.5,
    }.items():
        values = parameters[f'model/{name}']
        assert_close(values.std(), std, rtol=3 / np.sqrt(values.numel()), name=name)
    for name in 'h0/ln_1/b h0/attn/c_attn/b heads/value/w heads/value/b heads/reward/b'.split():
        assert not parameters[f'model/{name}'].any(), name
    assert (parameters['model/ln_f/g'] == 1).all()
