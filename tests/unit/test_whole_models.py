"""Models come in and go out whole: every tensor of a file counts, as transformers computes it."""

import json
import shutil

import numpy as np
import pytest
import torch
from command_line import invoke, last_error_of, succeed
from safetensors.torch import load_file, save_file
from tiny_causal_lms import SIZES, both_steps, save, tiny
from tiny_tokenisers import write_byte_level

from lm_human_preferences.checkpointing import checkpoints
from lm_human_preferences.checkpointing.tf_bundle import Bundle
from lm_human_preferences.distributed.comm import Comm
from lm_human_preferences.errors import UserError
from lm_human_preferences.language import trained_models
from lm_human_preferences.language.adapters.shared import SharedBase
from lm_human_preferences.language.causal_lm import library
from lm_human_preferences.language.networks.network import Network
from lm_human_preferences.language.trained_models import GPT2, TrainedModel

# Families whose files have buffers: biases of routers, scales of layers
FAMILIES = {
    'deepseek_v3': {
        **SIZES,
        'moe_intermediate_size': 16,
        'n_routed_experts': 8,
        'n_group': 1,
        'topk_group': 1,
        'first_k_dense_replace': 0,
        'num_experts_per_tok': 2,
        'num_key_value_heads': 4,
        'q_lora_rank': 16,
        'kv_lora_rank': 16,
        'qk_nope_head_dim': 8,
        'qk_rope_head_dim': 8,
        'v_head_dim': 8,
    },
    'gemma4_text': {
        **SIZES,
        'hidden_size_per_layer_input': 0,
        'vocab_size_per_layer_input': 320,
        'global_head_dim': 8,
        'layer_types': ['full_attention'] * 2,
        'num_kv_shared_layers': 0,
    },
}


@torch.no_grad()
def write(family, directory, **settings):
    directory.mkdir(exist_ok=True)
    write_byte_level(directory)
    rows = trained_models.tokenisers.encoding_in(str(directory)).n_vocab
    model = tiny(family, **{**FAMILIES.get(family, {}), 'vocab_size': rows, **settings})
    saved = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in saved:
            buffer.copy_(torch.linspace(0.3, 1.3, buffer.numel()).flip(0).reshape(buffer.shape))
    return save(model, directory)


@torch.no_grad()
def logprobs_of(model):
    tokens = torch.arange(12).reshape(1, 12)
    if isinstance(model, Network):
        return model.logits(model.hidden(tokens)).log_softmax(-1)
    return model.eval()(input_ids=tokens).logits.log_softmax(-1)


def assert_whole(directory, out):
    """It computes as transformers does, as a network and after `export`."""
    from transformers import AutoModelForCausalLM  # takes seconds

    expected = logprobs_of(AutoModelForCausalLM.from_pretrained(directory))
    network = TrainedModel(str(directory)).build(scope='policy')
    torch.testing.assert_close(logprobs_of(network), expected, rtol=0, atol=1e-4)
    succeed(f'export {directory} {out}')
    exported = AutoModelForCausalLM.from_pretrained(out)
    torch.testing.assert_close(logprobs_of(exported), expected, rtol=0, atol=1e-4)
    return network


@pytest.mark.parametrize('family', FAMILIES)
def test_buffers_that_are_learned_are_weights(tmp_path, family):
    directory = write(family, tmp_path / 'model')
    network = assert_whole(directory, tmp_path / 'out')
    assert network.constants
    assert network.constants < network.own_parameters().keys()
    assert network.constants < SharedBase(TrainedModel(str(directory)), Comm()).parameters.keys()


@pytest.mark.parametrize('more', ['', '--task.policy.lora on'])
def test_a_training_keeps_what_does_not_learn(tmp_path, more):
    directory = write('gemma4_text', tmp_path / 'model')
    succeed(both_steps(directory, tmp_path, more))
    places = (directory, tmp_path / 'run')
    begun, trained = (TrainedModel(str(each)).build(scope='policy') for each in places)
    assert not torch.equal(logprobs_of(begun), logprobs_of(trained))
    for name in begun.constants:
        assert torch.equal(begun.get_parameter(name), trained.get_parameter(name))
    bundle = Bundle(checkpoints.latest(str(tmp_path / 'run/policy/checkpoints')))
    of_layers = [name for name in bundle if 'layer_scalar' in name]
    assert bool(of_layers) != bool(more) and not any('/mean' in name for name in of_layers)


@pytest.mark.parametrize('family', ['llama', 'gpt2'])
@pytest.mark.parametrize('says_tied', [True, False])
def test_an_output_layer_of_its_own_is_taken(tmp_path, family, says_tied):
    directory = write(family, tmp_path / 'model', tie_word_embeddings=False)
    path = directory / 'config.json'
    config = {**json.loads(path.read_text()), 'tie_word_embeddings': says_tied}
    path.write_text(json.dumps(config))
    assert_whole(directory, tmp_path / 'out')
    TrainedModel(str(directory)).write_files(str(tmp_path / 'copy'))
    copied = json.loads((tmp_path / 'copy/config.json').read_text())
    assert copied['tie_word_embeddings'] is False


def test_gpt2_with_names_of_sizes_that_it_shares_with_others_is_left_to_transformers(tmp_path):
    """As transformers takes `num_attention_heads` for `n_head`, which no weights show."""
    directory = write('gpt2', tmp_path / 'model')
    assert isinstance(TrainedModel(str(directory)).architecture, GPT2)
    path = directory / 'config.json'
    config = json.loads(path.read_text())
    config['num_attention_heads'] = config.pop('n_head')
    path.write_text(json.dumps(config))
    assert_whole(directory, tmp_path / 'out')


def add(directory, tensors):
    path = directory / 'model.safetensors'
    save_file({**load_file(path), **tensors}, path, {'format': 'pt'})


@pytest.mark.parametrize('family, name', [('llama', 'lm_head.bias'), ('gpt2', 'h.2.ln_1.weight')])
def test_a_tensor_without_a_place_is_named(tmp_path, family, name):
    directory = write(family, tmp_path / 'model')
    add(directory, {name: torch.ones(32)})
    with pytest.raises(UserError) as e:
        TrainedModel(str(directory)).build(scope='policy')
    assert str(e.value) == f'{directory} has tensors that do not fit: {name}'


def test_an_index_of_an_earlier_save_is_not_followed(tmp_path):
    from transformers import AutoModelForCausalLM

    directory = tmp_path / 'model'
    write('llama', directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    model.save_pretrained(tmp_path / 'shards', max_shard_size='20KB')
    parts = sorted((tmp_path / 'shards').glob('*safetensors*'))
    assert len(parts) > 2
    for part in parts:
        shutil.copy(part, directory)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(-2)
    model.save_pretrained(tmp_path / 'one')
    shutil.copy(tmp_path / 'one/model.safetensors', directory)
    assert_whole(directory, tmp_path / 'out')


def test_tensors_of_no_use_are_left_out(tmp_path):
    directory = write('gpt2', tmp_path / 'model')
    add(directory, {f'transformer.h.0.attn.{name}bias': torch.ones(1) for name in ('', 'masked_')})
    add(directory, {'v_head.summary.weight': torch.ones(1, 32)})
    embedding = load_file(directory / 'model.safetensors')['transformer.wte.weight']
    add(directory, {'lm_head.weight': embedding.clone()})
    assert_whole(directory, tmp_path / 'out')


def test_a_network_that_is_another_model_is_refused(tmp_path, monkeypatch):
    directory = write('gemma4_text', tmp_path / 'model')
    monkeypatch.setattr(library, '_name_constants', lambda _: None)
    refused = invoke(f'export {directory} {tmp_path}/out')
    told = 'of the family gemma4_text are not supported: transformers loads a model with other'
    assert refused.exit_code == 2 and told in refused.stderr


def test_adapters_of_buffers_are_what_peft_computes(tmp_path):
    import peft  # takes seconds
    from transformers import AutoModelForCausalLM

    directory = write('deepseek_v3', tmp_path / 'model')
    settings = {'target_modules': ['o_proj'], 'modules_to_save': ['gate']}
    config = peft.LoraConfig(r=2, lora_alpha=6, **settings)
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(directory), config)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, tensor in theirs.state_dict().items():
            if 'lora_' in name or 'modules_to_save' in name:
                tensor.add_(0.1 * torch.randn_like(tensor))
    theirs.save_pretrained(tmp_path / 'adapter')
    network = TrainedModel(str(tmp_path / 'adapter')).build(scope='policy')
    torch.testing.assert_close(logprobs_of(network), logprobs_of(theirs), rtol=0, atol=1e-4)


def test_a_run_begins_with_the_weights_that_are_in_the_files(tmp_path):
    """In bfloat16, in several files; the policy learns all of them. The run may be moved."""
    from transformers import AutoModelForCausalLM

    model, run = tmp_path / 'model', tmp_path / 'moved'
    write_byte_level(model)
    settings = {'vocab_size': 448, 'attention_dropout': 0.1, 'tie_word_embeddings': True}
    tiny('qwen3', **settings).bfloat16().save_pretrained(model, max_shard_size='30KB')
    assert len([*model.glob('*.safetensors*')]) == 4
    original = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    printed = succeed(both_steps(model, tmp_path)).stdout
    (tmp_path / 'run').rename(run)
    shutil.rmtree(model)
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
    model = write(family, tmp_path / 'model', **settings)
    result = invoke(both_steps(model, tmp_path, dry))
    assert told in last_error_of(result)
    assert '1 rank on a CPU' not in result.output
    assert not (tmp_path / 'run').exists()


def test_a_dry_run_reads_no_weights_of_gpt2(tmp_path, monkeypatch):
    save(tiny('gpt2', vocab_size=50257), tmp_path / 'model')
    monkeypatch.setattr(TrainedModel, 'open_weights', lambda self: pytest.fail('weights are read'))
    succeed(f'train_reward test a --dry_run --task.policy.initial_model {tmp_path}/model')
