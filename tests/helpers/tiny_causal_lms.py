"""Tiny models of transformers' families, with random weights, and ways to train them."""

import torch
from tiny_tokenisers import END, write_byte_level

N_VOCAB = 60  # tokens of an encoding; the embedding has some more rows
SIZES = {
    'vocab_size': 64,
    'hidden_size': 32,
    'intermediate_size': 48,
    'num_hidden_layers': 2,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'head_dim': 8,
    'max_position_embeddings': 64,
}
WITHOUT_HEAD_DIM = {key: value for key, value in SIZES.items() if key != 'head_dim'}
OLDER = {'vocab_size': 64, 'n_embd': 32, 'n_layer': 2, 'n_head': 4, 'n_positions': 64}
EXPERTS = {**SIZES, 'num_experts_per_tok': 2, 'moe_intermediate_size': 16, 'num_local_experts': 4}
# What each family's config calls its sizes, where not as most do.
OTHERS = {
    'gpt2': OLDER,
    'gpt_bigcode': OLDER,
    'codegen': {**OLDER, 'rotary_dim': 4},
    'gptj': {**OLDER, 'rotary_dim': 4},
    'gpt_neo': {
        'vocab_size': 64,
        'hidden_size': 32,
        'num_layers': 2,
        'num_heads': 4,
        'attention_types': [[['global', 'local'], 1]],
        'window_size': 32,
        'max_position_embeddings': 64,
    },
    'gpt_neox': WITHOUT_HEAD_DIM,
    'falcon': WITHOUT_HEAD_DIM,
    'opt': {**SIZES, 'ffn_dim': 48, 'word_embed_proj_dim': 32},
    'phi': WITHOUT_HEAD_DIM,
    'stablelm': WITHOUT_HEAD_DIM,
    'qwen3_moe': EXPERTS,
    'mixtral': EXPERTS,
    'bloom': {'vocab_size': 64, 'hidden_size': 32, 'n_layer': 2, 'n_head': 4},
    'mpt': {'vocab_size': 64, 'd_model': 32, 'n_layers': 2, 'n_heads': 4, 'max_seq_len': 64},
}
# Tokens outside of such small vocabularies that some configs name by default.
NO_TOKENS = {'bos_token_id': None, 'eos_token_id': None, 'pad_token_id': None}
# {way: (ranks, settings of a reward training)}, all of which learn the same
WAYS = {
    'ranks': (2, {}),
    'micro-batches': (1, {'micro_batch_size': 4}),
    'gradient checkpointing': (1, {'run.gradient_checkpointing': True}),
    'bf16': (1, {'run.precision': 'bf16'}),
}


def tiny(family, seed=0, **settings):
    """A model of a family whose weights are large enough for all of its parts to matter."""
    # Not above: each process of pytest would spend a second on it as it collects tests.
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**NO_TOKENS, **OTHERS.get(family, SIZES), **settings})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.2)
    return model


def save(model, directory):
    model.save_pretrained(directory)
    return directory


CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}"
    f'{END}{{% endfor %}}[assistant]'
)


def write_chat_model(directory, seed=0, positions=128):
    """Write a Llama with a tokeniser of its own, which has a chat template."""
    write_byte_level(directory, chat_template=CHAT_TEMPLATE)
    model = tiny('llama', seed, vocab_size=512, max_position_embeddings=positions)
    return save(model, directory)


def both_steps(model, directory, more=''):
    """The command that trains a reward model and a policy, which begin with `model`."""
    small = (
        f'--run.save_interval 2 --task.policy.initial_model {model} --labels.num_train 160'
        ' --normalize_samples 64'
    ).replace('--', '--rewards.train_new_model.')
    return (
        f'train_policy test run --mpi 1 --save_dir {directory} --run.save_interval 2'
        f' --task.policy.initial_model {model} --ppo.total_episodes 192 {small} {more}'
    )
