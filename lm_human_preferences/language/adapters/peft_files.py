"""Adapters in PEFT's format: merge a saved adapter into its base model, or save our adapters."""

import os
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.language.adapters.layers import attach
from lm_human_preferences.language.adapters.record import Record, read
from lm_human_preferences.language.causal_lm.library import explained
from lm_human_preferences.language.networks.model_kinds import PEFT_CONFIG
from lm_human_preferences.language.networks.weights import (
    CAUSAL_LM,
    EMBEDDING_LAYER,
    OUTPUT_LAYER,
    listed,
    load_parameters,
    open_safetensors,
)

WEIGHTS = 'adapter_model.safetensors'
PREFIX = 'base_model.model.'  # prefix of all tensor names in PEFT's files
ROWS = 'token_adapter.trainable_tokens_delta'  # found in names of tensors with embedding rows
_TABLE = re.compile(
    rf'((?P<output>{OUTPUT_LAYER.pattern})|{EMBEDDING_LAYER.pattern})'
    r'\.((base_layer\.)?(?P<whole>weight)$)?'
)
SAVED = 'modules_to_save.'  # PEFT saves enlarged layers twice, once with this in tensor names
TOLERANCE = 1e-4  # largest change that merging may make to a logit, relative to the largest logit
MOST_REPEATS = 5  # limit of repetitions in a regex for layer names; a regex with 8 can take 15 s
_OF_PROMPTS = ('PROMPT_TUNING', 'MULTITASK_PROMPT_TUNING', 'P_TUNING', 'PREFIX_TUNING')


@torch.no_grad()
def merged(directory: str, model: Any) -> Any:
    """Merge the adapter in `directory` into a transformers model in place; return the result."""
    path = storage.join(directory, WEIGHTS)
    file = open_safetensors(path)
    tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    folder = os.path.dirname(storage.cached_path(path))
    check_patterns(directory)
    changes = changes_of(directory)
    import peft  # importing peft takes seconds

    with explained(path, ': PEFT cannot merge it'):
        warnings.simplefilter('ignore')  # UserErrors below replace PEFT's warnings
        if 'vocab_size' in changes:
            model.resize_token_embeddings(changes['vocab_size'], mean_resizing=False)
        adapted = peft.PeftModel.from_pretrained(model, folder).eval()
        found: Any = peft.set_peft_model_state_dict(adapted, tensors)
        wrong = _without_place(adapted, tensors, found)
        if wrong:
            # Weights are missing, or the adapter was saved inside a wrapper such as DDP.
            raise UserError(
                f"{path}: these tensors do not fit the adapter's base model: {listed(wrong)};"
                ' unwrap the PEFT model, and save the adapter again by `save_pretrained`; under'
                ' DeepSpeed ZeRO-3, gather the weights first'
            )
        # Compare logits: PEFT does not notice if the merged model computes something else.
        table = model.get_input_embeddings().weight
        tokens = torch.arange(8, device=table.device).unsqueeze(0) % len(table)
        expected = adapted(input_ids=tokens).logits
        if changes:
            _untie(adapted)  # merging into one of two tied layers must not change the other
        whole: Any = adapted.merge_and_unload(safe_merge=True)  # safe_merge refuses NaN
        difference = (whole(input_ids=tokens).logits - expected).abs().max()
    # Unlike a comparison by `>`, `not ... <=` also refuses NaN.
    if not difference <= TOLERANCE * expected.abs().max():
        raise UserError(f'{path}: merging the adapter changes outputs, by up to {difference:.3g}')
    return whole


def _without_place(adapted: Any, tensors: dict[str, torch.Tensor], found: Any) -> list[str]:
    """Return the names of tensors that only the file has, and of tensors that only the model has.

    found: PEFT's result of loading the tensors, with its missing_keys and unexpected_keys.
    """
    state, missing = adapted.state_dict(), set(found.missing_keys)
    loaded = {each.data_ptr() for name, each in state.items() if name not in missing}
    own = {name for name in missing if '.default' in name}  # names of the adapter's tensors
    lacking = {name for name in own if state[name].data_ptr() not in loaded}
    twins = {name for name in tensors if SAVED in name and name.replace(SAVED, '') in tensors}
    return sorted(lacking | (set(found.unexpected_keys) - twins))


def _untie(model: Any) -> None:
    """Give a model's output layer its own copy of the embedding to which it is tied."""
    modules = list(model.modules())
    tables = {id(each.weight) for each in modules if isinstance(each, nn.Embedding)}
    for layer in modules:
        if isinstance(layer, nn.Linear) and id(layer.weight) in tables:
            layer.weight = nn.Parameter(layer.weight.detach().clone())


def check_patterns(directory: str) -> None:
    """Raise UserError if a regex in an adapter's config, such as `([a-z]+)+!`, may never end."""
    for setting, value in read_config(directory).items():
        if not value or not setting.endswith(('_pattern', '_modules', '_parameters')):
            continue
        for pattern in [value] if isinstance(value, str) else value:
            repeats = re.findall(r'(\)?)[*+{]', str(pattern))
            if ')' in repeats or len(repeats) > MOST_REPEATS:
                raise UserError(
                    f'{storage.join(directory, PEFT_CONFIG)}: {setting} has a pattern that may take'
                    f' for ever to match, {pattern!r:.80}: list the names of layers instead'
                )


def changes_of(directory: str) -> dict[str, Any]:
    """Return {setting: new value} for settings in the base's config.json that an adapter changes.

    An adapter may untie the output layer from the embedding, and add tokens to the vocabulary.
    """
    file = open_safetensors(storage.join(directory, WEIGHTS))
    changes: dict[str, Any] = {}
    for name in file.keys():  # noqa: SIM118
        layer = _TABLE.match(name)
        if layer is None or (ROWS in name and not layer['output']):
            continue
        changes['tie_word_embeddings'] = False
        if layer['whole'] is not None:
            changes['vocab_size'] = file.get_slice(name).get_shape()[0]
    return changes


def read_config(directory: str) -> dict[str, Any]:
    """Return an adapter's settings {name: value}; UserError if the adapter cannot be merged."""
    path = storage.join(directory, PEFT_CONFIG)
    config: Any = storage.read_json(path)
    if not isinstance(config, dict) or not isinstance(config.get('peft_type'), str):
        raise UserError(f'{path} is damaged: it does not describe adapters')
    if config['peft_type'] in _OF_PROMPTS:
        raise UserError(f'{path}: adapters of type {config["peft_type"]} cannot be merged')
    if config.get('megatron_config'):  # megatron_config names code that PEFT would run
        raise UserError(f'{path}: adapters with megatron_config are not supported')
    return config


def base_of(directory: str) -> str:
    """Return the name of an adapter's base model, with @REVISION if its config names one."""
    config = read_config(directory)
    name, revision = config.get('base_model_name_or_path'), config.get('revision')
    if not isinstance(name, str) or not name:
        path = storage.join(directory, PEFT_CONFIG)
        raise UserError(
            f'{path}: base_model_name_or_path is {name!r:.40}: set it to the model that the'
            ' adapter was trained on'
        )
    is_on_hub = not os.path.exists(name) and isinstance(revision, str)
    return f'{name}@{revision}' if is_on_hub else name


def write(directory: str, saved: Any, scope: str, base_of: Callable[[Record], str]) -> str:
    """Save a language model's adapters in PEFT's format; UserError if it has none.

    base_of: returns the path or hf://ORG/NAME@COMMIT of a base model that PEFT can load.

    Return the path of the base model, or its name on the hub.
    """
    from safetensors.torch import save_file

    of_base = read(saved.savedir)
    options = None if of_base is None else of_base.options(scope)
    if of_base is None or options is None:
        raise UserError(f'--form adapter: {saved.name} was not trained with --task.policy.lora on')
    network = saved.create([])
    names = {name for name, _ in network.named_parameters()}
    attach(network, options)
    adapters = {name: each for name, each in network.named_parameters() if name not in names}
    load_parameters(saved.open_weights(), adapters, scope)
    tensors = {}
    for name, adapter in adapters.items():
        tensors[f'{PREFIX}{name.removeprefix(CAUSAL_LM)}.weight'] = adapter.detach()
    base, revision = base_of(of_base), None
    if storage.is_hub(base):
        base, _, revision = base.removeprefix(storage.HUB).partition('@')
    layers = {name.rpartition('.')[0].removeprefix(CAUSAL_LM) for name in adapters}
    config = {
        'peft_type': 'LORA',
        'task_type': 'CAUSAL_LM',
        'base_model_name_or_path': base,
        'revision': revision or None,
        'r': options.rank,
        'lora_alpha': options.alpha,
        'lora_dropout': 0.0,
        'target_modules': sorted(layers),
        'fan_in_fan_out': of_base.transposed,
        'bias': 'none',
        'modules_to_save': None,
        'inference_mode': True,
    }
    os.makedirs(directory, exist_ok=True)
    save_file(tensors, os.path.join(directory, WEIGHTS), {'format': 'pt'})
    storage.write_json(os.path.join(directory, PEFT_CONFIG), config)
    return base
