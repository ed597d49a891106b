"""Directories of PEFT, without the library: it imports slowly and knows few families."""

from __future__ import annotations

import math
import os
from typing import Any

import torch

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.language.adapters.layers import A, B, attach
from lm_human_preferences.language.adapters.record import read
from lm_human_preferences.language.causal_lm.network import CAUSAL_LM
from lm_human_preferences.language.weights import Weights, load_parameters

CONFIG, WEIGHTS = 'adapter_config.json', 'adapter_model.safetensors'
PREFIX = 'base_model.model.'  # what names of tensors begin with
MAGNITUDE = 'lora_magnitude_vector'  # of DoRA
# Settings that decide nothing here, or that are read below.
_READ = {
    *('alpha_pattern auto_mapping base_model_name_or_path bias eva_config fan_in_fan_out'.split()),
    *('inference_mode init_lora_weights layers_pattern layers_to_transform'.split()),
    *('loftq_config lora_alpha lora_dropout megatron_core peft_type peft_version'.split()),
    *('qalora_group_size r rank_pattern revision target_modules task_type'.split()),
    *('use_dora use_rslora'.split()),
}


class PeftWeights:
    """Weights of a base with PEFT's LoRA, rsLoRA or DoRA merged; UserError if unfit."""

    def __init__(self, directory: str, base: Weights, *, is_transposed: bool) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        self.path = storage.join(directory, WEIGHTS)
        self._base = base
        self._config = read_config(directory)
        self._is_transposed = is_transposed or self._config['fan_in_fan_out']
        try:
            tensors = load_file(storage.cached_path(self.path))
        except (OSError, SafetensorError, storage.StorageError) as e:
            raise UserError(f'{self.path} is damaged or missing: {e}') from e
        self._layers: dict[str, dict[str, torch.Tensor]] = {}  # by own name of the weight
        for name, tensor in tensors.items():
            layer, part = self._read_name(name)
            if not tensor.is_floating_point() or not tensor.isfinite().all():
                raise UserError(f'{self.path}: {name} has values that are no finite numbers')
            self._layers.setdefault(layer, {})[part] = tensor.float()

    def _read_name(self, name: str) -> tuple[str, str]:
        """Return (own name of the weight, lora_A or another part) of a tensor in the file."""
        inner = name.removeprefix(PREFIX).removesuffix('.weight')
        module, _, part = inner.rpartition('.')
        for own in (f'{module}.weight', f'{CAUSAL_LM}{module}.weight'):
            if own in self._base and part in (A, B, MAGNITUDE):
                return own, part
        raise UserError(f'{self.path}: {name} is no adapter of a layer of {self._base.path}')

    def __len__(self) -> int:
        return len(self._base)

    def __contains__(self, name: object) -> bool:
        return name in self._base

    def nbytes(self) -> int:
        return self._base.nbytes()

    def scopes(self) -> list[str]:
        return self._base.scopes()

    def name_of(self, name: str) -> str:
        return self._base.name_of(name)

    @torch.no_grad()
    def load(self, name: str, parameter: torch.Tensor) -> None:
        """Copy a tensor into `parameter` on the CPU; UserError unless it fits."""
        self._base.load(name, parameter)
        layer = self._layers.get(name.rpartition('/')[2])
        if layer is None:
            return
        weight = parameter.T if self._is_transposed else parameter
        outputs, inputs = weight.shape
        rank = self._config['r']
        expected = {A: (rank, inputs), B: (outputs, rank)}
        if self._config['use_dora']:
            expected[MAGNITUDE] = (outputs,)
        found = {part: tuple(tensor.shape) for part, tensor in layer.items()}
        if found != expected:
            raise UserError(f'{self.path}: {name} has adapters {found}, not {expected}')
        scale = self._config['lora_alpha'] / (rank**0.5 if self._config['use_rslora'] else rank)
        adapted = weight + scale * (layer[B] @ layer[A])
        if self._config['use_dora']:
            adapted *= (layer[MAGNITUDE] / adapted.norm(dim=1)).unsqueeze(1)
        weight.copy_(adapted)


def is_peft(directory: str) -> bool:
    """Return whether a directory, local or of the hub, holds an adapter of PEFT and no model."""
    if storage.is_remote(directory) and not storage.is_hub(directory):
        return False
    names = ('hparams.json', 'config.json')
    if any(storage.exists(storage.join(directory, name)) for name in names):
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
    found = {**dict.fromkeys(switches, False), 'bias': 'none', 'revision': None, **config}
    others = [name for name, value in config.items() if value and name not in _READ]
    others += [name for name in ('alpha_pattern', 'rank_pattern') if config.get(name)]
    if found['bias'] != 'none':
        others.append('bias')
    if others:
        raise UserError(f'{path}: adapters with {", ".join(sorted(others))} are not supported')
    rank, alpha = found.get('r'), found.get('lora_alpha')
    is_described = (
        type(rank) is int
        and rank > 0
        and isinstance(alpha, int | float)
        and not isinstance(alpha, bool)
        and math.isfinite(alpha)
        and isinstance(found.get('base_model_name_or_path'), str)
        and all(type(found[name]) is bool for name in switches)
    )
    if not is_described:
        raise UserError(f'{path} is damaged: it does not describe adapters')
    return found


def base_of(directory: str) -> str:
    """Return the name of the model that an adapter is of."""
    config = read_config(directory)
    name, revision = config['base_model_name_or_path'], config['revision']
    is_on_hub = not os.path.exists(name) and isinstance(revision, str)
    return f'{name}@{revision}' if is_on_hub else name


def write(directory: str, saved: Any, scope: str, head: torch.Tensor | None = None) -> None:
    """Save adapters, as a classifier with `head (n_embd,)`; UserError for a model without."""
    from safetensors.torch import save_file

    of_base = read(saved.savedir)
    options = None if of_base is None else of_base.options(scope)
    if of_base is None or options is None:
        raise UserError(f'--as adapter: {saved.name} was not trained with --task.policy.lora on')
    if options.full is not None:
        raise UserError(
            f'--as adapter: {options.full} of {saved.name} was trained in full; an export without'
            ' --as is a whole model'
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
    base, _, revision = of_base.base.removeprefix('hf://').partition('@')
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
