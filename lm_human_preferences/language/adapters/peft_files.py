"""Directories of PEFT, without the library: it imports slowly and knows few families."""

import functools
import math
import os
import re
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.language.adapters.layers import attach
from lm_human_preferences.language.adapters.record import Record, read
from lm_human_preferences.language.network import Network
from lm_human_preferences.language.weights import (
    CAUSAL_LM,
    EMBEDDING_LAYER,
    OUTPUT_LAYER,
    Weights,
    copy_value,
    load_parameters,
)
from lm_human_preferences.training import model_sizes

CONFIG, WEIGHTS = 'adapter_config.json', 'adapter_model.safetensors'
PREFIX = 'base_model.model.'  # what names of tensors begin with
MAGNITUDE = 'lora_magnitude_vector'  # of DoRA
ROWS = 'token_adapter.trainable_tokens_delta'  # rows of an embedding
WHOLE = 'base_layer'  # a parameter in place of the base's
_NAME = re.compile(
    rf'{re.escape(PREFIX)}(?P<module>.+?)'
    rf'(\.(?P<part>lora_(embedding_)?[AB]|{MAGNITUDE}|{re.escape(ROWS)}|{WHOLE}))?'
    r'(\.(?P<kind>weight|bias))?'
)
_TRANSPOSED = ('Conv1D', 'Projection')  # linear layers whose weight is (inputs, outputs)
# Ways to begin that leave the base as it is; the others take something away from it.
_BEGINNINGS = (None, True, False, 'gaussian', 'eva', 'orthogonal')
# Settings that decide nothing here, or that are read below.
_READ = {
    *('alpha_pattern auto_mapping base_model_name_or_path bias corda_config eva_config'.split()),
    *('ensure_weight_tying exclude_modules fan_in_fan_out inference_mode'.split()),
    *('init_lora_weights layers_pattern layers_to_transform loftq_config lora_alpha'.split()),
    *('lora_bias lora_dropout megatron_core modules_to_save peft_type peft_version'.split()),
    *('qalora_group_size r rank_pattern revision target_modules task_type'.split()),
    *('trainable_token_indices use_dora use_rslora'.split()),
}


class PeftWeights:
    """Weights of a base with PEFT's adapters merged; UserError if unfit.

    network: of the merged model, without values.
    """

    def __init__(self, directory: str, base: Weights, network: Network) -> None:
        self.path = storage.join(directory, WEIGHTS)
        self._base = base
        self._config = read_config(directory)
        self._network = network
        self._changes: dict[str, dict[str, torch.Tensor]] = {}  # by own name of the parameter
        parameters = dict(network.named_parameters())
        file = _opened(self.path)
        for name in file.keys():  # noqa: SIM118
            module, part, kind = _parsed(name)
            own = f'{module}.{kind}'.removesuffix('.')
            if own not in parameters:
                own = CAUSAL_LM + own
            if own not in parameters:
                raise UserError(f'{self.path}: {name} is not an adapter of a layer of {base.path}')
            if part.startswith('lora_embedding') and self._config.get('ensure_weight_tying'):
                raise UserError(f'{self.path}: {name} with ensure_weight_tying is not supported')
            tensor = file.get_tensor(name)
            if not tensor.is_floating_point() or not tensor.isfinite().all():
                raise UserError(f'{self.path}: {name} has values that are not finite numbers')
            self._changes.setdefault(own, {})[part] = tensor.float()
        if not self._changes:  # as some ways to train on several GPUs have saved it
            raise UserError(f'{self.path} holds no adapters: merged, they would be {base.path}')

    def __contains__(self, name: object) -> bool:
        return name in self._base

    def nbytes(self) -> int:
        return self._base.nbytes()

    def scopes(self) -> list[str]:
        return self._base.scopes()

    def name_of(self, name: str) -> str:
        return self._base.name_of(name)

    def unread(self, names: Collection[str]) -> list[str]:
        return self._base.unread(names)

    @torch.no_grad()
    def load(self, name: str, parameter: torch.Tensor) -> None:
        """Copy a tensor into `parameter` on the CPU; UserError unless it fits."""
        self._base.load(name, parameter)
        own = name.rpartition('/')[2]
        parts = dict(self._changes.get(own, {}))
        if WHOLE in parts:
            copy_value(parts.pop(WHOLE).numpy(), parameter, f'{self.path}: {own}')
        for embedding, changes in self._changes.items():
            if ROWS in changes and own in (embedding, self._tied_to(embedding)):
                rows = self._rows(embedding, len(parameter))
                copied = parameter[rows]
                copy_value(changes[ROWS].numpy(), copied, f'{self.path}: {embedding}')
                parameter[rows] = copied
        parts.pop(ROWS, None)
        if parts:
            self._merge(parts, parameter, own)

    def _tied_to(self, embedding: str) -> str | None:
        """Return the output layer whose rows PEFT replaces with those of an embedding, if any."""
        # Said by a config.json of transformers, so by causal_lm's weights alone.
        if not getattr(self._base, 'says_tied', False):
            return None
        for name, _ in self._network.named_parameters():
            is_output_layer = OUTPUT_LAYER.fullmatch(name.removesuffix('.weight')) is not None
            if is_output_layer and ROWS not in self._changes.get(name, {}):
                return name
        return None

    def _merge(self, parts: dict[str, torch.Tensor], parameter: torch.Tensor, own: str) -> None:
        """Add the product of two matrices, or a bias, to a parameter of the base."""
        module = own.rpartition('.')[0]
        layer = self._network.get_submodule(module)
        is_embedding = isinstance(layer, nn.Embedding)
        is_transposed = is_embedding or type(layer).__name__ in _TRANSPOSED
        weight = parameter.mT if is_transposed and parameter.ndim == 2 else parameter
        rank, alpha = self._rank_and_alpha(module.removeprefix(CAUSAL_LM))
        outputs, *inputs = weight.shape
        infix = 'embedding_' * is_embedding
        expected = {f'lora_{infix}B': (outputs, rank), f'lora_{infix}A': (rank, *inputs)}
        if self._config['use_dora']:
            expected[MAGNITUDE] = (outputs,)
        if own.endswith('.bias'):
            expected = {'lora_B': (outputs,)}
        found = {part: tuple(tensor.shape) for part, tensor in parts.items()}
        if found != expected:
            raise UserError(f'{self.path}: {own} has adapters {found}, not {expected}')
        factors = [parts[part] for part in expected if part != MAGNITUDE]
        scale = alpha / (rank**0.5 if self._config['use_rslora'] else rank)
        adapted = weight + scale * functools.reduce(torch.matmul, factors)
        if MAGNITUDE in parts:
            adapted *= (parts[MAGNITUDE] / adapted.norm(dim=1)).unsqueeze(1)
        weight.copy_(adapted)

    def _rank_and_alpha(self, module: str) -> tuple[int, float]:
        """Return the settings of a module: those of the first pattern that matches its name."""
        found = []
        for setting, patterns in (('r', 'rank_pattern'), ('lora_alpha', 'alpha_pattern')):
            value = self._config[setting]
            for pattern, of_pattern in reversed(self._config[patterns].items()):
                if re.match(rf'(.*\.)?({pattern})$', module):
                    value = of_pattern
            found.append(value)
        return found[0], found[1]

    def _rows(self, own: str, length: int) -> list[int]:
        """Return the rows of an embedding that the adapter replaces."""
        rows = self._config.get('trainable_token_indices')
        if isinstance(rows, dict):
            module = own.removeprefix(CAUSAL_LM).removesuffix('.weight')
            rows = next((rows[name] for name in rows if f'.{module}'.endswith(f'.{name}')), None)
        if not isinstance(rows, list) or any(row not in range(length) for row in rows):
            raise UserError(f'{self.path}: trainable_token_indices {rows!r:.40} are not of {own}')
        return rows


def _opened(path: str) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(storage.cached_path(path), 'pt')
    except (OSError, SafetensorError, storage.StorageError) as e:
        raise UserError(f'{path} is damaged or missing: {e}') from e


def _parsed(name: str) -> tuple[str, str, str]:
    """Return (module, part, weight or bias) of a name; of a whole buffer (its name, WHOLE, '')."""
    match = _NAME.fullmatch(name)
    if match is None:
        return name, WHOLE, ''
    part = match['part'] or WHOLE
    return match['module'], part, match['kind'] or 'weight' * (part != WHOLE)


def unties(directory: str) -> bool:
    """Return whether adapters change an output layer, or an embedding, but not the other alike."""
    for name in _opened(storage.join(directory, WEIGHTS)).keys():  # noqa: SIM118
        module, part, _ = _parsed(name)
        if OUTPUT_LAYER.fullmatch(module) or (EMBEDDING_LAYER.fullmatch(module) and part != ROWS):
            return True
    return False


def is_peft(directory: str) -> bool:
    """Return whether a directory, local or of the hub, holds an adapter of PEFT and no model."""
    if storage.is_remote(directory) and not storage.is_hub(directory):
        return False
    if model_sizes.is_model(directory):
        return False
    return storage.exists(storage.join(directory, CONFIG))


def read_config(directory: str) -> dict[str, Any]:
    """Return the settings of an adapter; UserError for one that cannot be merged exactly."""
    path = storage.join(directory, CONFIG)
    config: Any = storage.read_json(path)
    if not isinstance(config, dict) or config.get('peft_type') != 'LORA':
        kind = config.get('peft_type') if isinstance(config, dict) else config
        raise UserError(f'{path}: adapters of the kind {kind!r:.40} are not supported, only LORA')
    switches = ('use_rslora', 'use_dora', 'fan_in_fan_out')
    found = {**dict.fromkeys(switches, False), 'revision': None, **config}
    for name in ('rank_pattern', 'alpha_pattern'):
        found[name] = config.get(name) or {}
    others = [name for name, value in config.items() if value and name not in _READ]
    if config.get('init_lora_weights') not in _BEGINNINGS:
        others.append(f'init_lora_weights {config["init_lora_weights"]!r:.40}')
    if others:
        raise UserError(f'{path}: adapters with {", ".join(sorted(others))} are not supported')
    rank, alpha = found.get('r'), found.get('lora_alpha')
    is_described = (
        type(rank) is int
        and rank > 0
        and isinstance(alpha, int | float)
        and not isinstance(alpha, bool)
        and math.isfinite(alpha)
        and all(type(found[name]) is bool for name in switches)
        and _are_patterns(found['rank_pattern'])
        and _are_patterns(found['alpha_pattern'])
    )
    if not is_described:
        raise UserError(f'{path} is damaged: it does not describe adapters')
    return found


def _are_patterns(values: Any) -> bool:
    """Return whether {pattern of names: rank or alpha} can be that."""
    if not isinstance(values, dict):
        return False
    try:
        for pattern in values:
            re.compile(pattern)
    except re.error:
        return False
    return all(type(value) in (int, float) and 0 < value < math.inf for value in values.values())


def base_of(directory: str) -> str:
    """Return the name of the model that an adapter is of."""
    config = read_config(directory)
    name, revision = config.get('base_model_name_or_path'), config['revision']
    if not isinstance(name, str) or not name:
        raise UserError(
            f'{storage.join(directory, CONFIG)}: base_model_name_or_path is {name!r:.40}: set it to'
            ' the model that the adapter was trained on'
        )
    is_on_hub = not os.path.exists(name) and isinstance(revision, str)
    return f'{name}@{revision}' if is_on_hub else name


def write(
    directory: str,
    saved: Any,
    scope: str,
    base_of: Callable[[Record], str],
    head: torch.Tensor | None = None,
) -> None:
    """Save adapters, as a classifier with `head (n_embd,)`; UserError for a model without.

    base_of: finds or makes a base that PEFT can load, at a path or hf://ORG/NAME@COMMIT.
    """
    from safetensors.torch import save_file

    of_base = read(saved.savedir)
    options = None if of_base is None else of_base.options(scope)
    if of_base is None or options is None:
        raise UserError(f'--form adapter: {saved.name} was not trained with --task.policy.lora on')
    if options.full is not None:
        raise UserError(
            f'--form adapter: {options.full} of {saved.name} was trained in full; an export without'
            ' --form is a whole model'
        )
    network = saved.create([])
    names = {name for name, _ in network.named_parameters()}
    attach(network, options)
    adapters = {name: each for name, each in network.named_parameters() if name not in names}
    load_parameters(saved.open_weights(), adapters, scope)
    tensors = {}
    for name, adapter in adapters.items():
        tensors[f'{PREFIX}{name.removeprefix(CAUSAL_LM)}.weight'] = adapter.detach()
    if head is not None:
        tensors[f'{PREFIX}score.weight'] = head.unsqueeze(0).float()
    base, revision = base_of(of_base), None
    if storage.is_hub(base):
        base, _, revision = base.removeprefix(storage.HUB).partition('@')
    layers = {name.rpartition('.')[0].removeprefix(CAUSAL_LM) for name in adapters}
    config = {
        'peft_type': 'LORA',
        'task_type': 'CAUSAL_LM' if head is None else 'SEQ_CLS',
        'base_model_name_or_path': base,
        'revision': revision or None,
        'r': options.rank,
        'lora_alpha': options.alpha,
        'lora_dropout': 0.0,
        'target_modules': sorted(layers),
        'fan_in_fan_out': of_base.transposed,
        'bias': 'none',
        'modules_to_save': None if head is None else ['score'],
        'inference_mode': True,
    }
    os.makedirs(directory, exist_ok=True)
    save_file(tensors, os.path.join(directory, WEIGHTS), {'format': 'pt'})
    storage.write_json(os.path.join(directory, CONFIG), config)
