"""The files of a sequence classifier of transformers: what is read of them, and what is refused.

JSON, safetensors and the tokeniser's files are read. Nothing that is code or can hold any is: no
pickles, and nothing that `auto_map` names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from lm_human_preferences import storage
from lm_human_preferences.errors import UserError
from lm_human_preferences.hparams.model_sizes import FLOAT
from lm_human_preferences.language.causal_lm.library import (
    MOST_LAYERS,
    config_of,
    empty_model,
    told,
)
from lm_human_preferences.language.causal_lm.weights import PretrainedWeights
from lm_human_preferences.language.weights import SLACK_BYTES

CONFIG = 'config.json'
MODEL_CLASS = 'AutoModelForSequenceClassification'
KIND = 'ForSequenceClassification'  # what the names of such models end with
MOST_LABELS = 10_000  # of a config that can be meant
_AS_SAVED = {'sinusoidal_pos_embds': False}  # where positions are in the file, none are made


def is_classifier(directory: str) -> bool:
    """Whether a directory, local or of the hub, holds a sequence classifier of transformers.

    Other stores have reward models of this program and the original.
    """
    if storage.is_remote(directory) and not storage.is_hub(directory):
        return False
    if storage.exists(storage.join(directory, 'hparams.json')):
        return False  # a model of this program or the original
    path = storage.join(directory, CONFIG)
    return storage.exists(path) and _is_of_classifier(storage.read_json(path))


def _is_of_classifier(content: Any) -> bool:
    names = content.get('architectures') if isinstance(content, dict) else None
    return isinstance(names, list) and any(str(name).endswith(KIND) for name in names)


def read_config(directory: str) -> Any:
    """The config of the classifier in a directory, without dropout.

    UserError where it is of no classifier that can be taken.
    """
    path = storage.join(directory, CONFIG)
    content: Any = storage.read_json(path)
    if not _is_of_classifier(content):
        raise UserError(f'{path} is not of a sequence classifier')
    _check_content(content, path)
    as_saved = {key: value for key, value in _AS_SAVED.items() if key in content}
    with told(path):
        return config_of({**content, **as_saved})


def _check_content(content: dict[str, Any], path: str) -> None:
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as KNOWN,
    )

    if content.get('auto_map'):
        raise UserError(f'{path}: the model has code of its own (auto_map), which is not run')
    if content.get('quantization_config'):
        raise UserError(f'{path} is of a quantised model: take the model that it was made of')
    family = content.get('model_type')
    if not isinstance(family, str) or family not in KNOWN:
        raise UserError(f'{path}: transformers knows no sequence classifier {family!r:.80}')
    for key, value in _numbers(content):
        is_layers = 'layer' in key or 'depth' in key or 'block' in key
        if is_layers and abs(value) > MOST_LAYERS:
            raise UserError(f'{path}: {key} {value:.6g} is not what a model can have')
    labels = content.get('id2label')
    counts = [content.get('num_labels', 1), len(labels) if isinstance(labels, dict) else 1]
    if any(not isinstance(count, int) or not 0 < count <= MOST_LABELS for count in counts):
        raise UserError(f'{path}: it must have 1 to {MOST_LABELS} classes, not {max(counts)!r:.20}')


def _numbers(content: Any, key: str = '') -> Iterator[tuple[str, float]]:
    """(the last key, value) of all numbers in a JSON value."""
    if isinstance(content, dict):
        for name, value in content.items():
            yield from _numbers(value, str(name))
    elif isinstance(content, list):
        for value in content:
            yield from _numbers(value, key)
    elif isinstance(content, (int, float)):
        yield key, content


def read_model(directory: str, config: Any) -> Any:
    """The classifier in a local directory, in float32; UserError unless all of it is in the files.

    Its size is compared with that of the files before any memory is taken for it.
    """
    weights = PretrainedWeights(directory, config, MODEL_CLASS)
    with told(weights.path), torch.device('meta'):
        empty = empty_model(config, MODEL_CLASS)
    needed = FLOAT * sum(parameter.numel() for parameter in empty.parameters())
    if needed > SLACK_BYTES + 4 * weights.nbytes():
        raise UserError(
            f'{directory} holds {weights.nbytes()} bytes of weights, but its {CONFIG} describes'
            f' {needed}'
        )
    model = weights.model
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if value.is_floating_point() and not value.isfinite().all():
            raise UserError(f'{directory}: {name} has values that are not finite')
    return model.eval().requires_grad_(False)


def read_tokeniser(directory: str, model: Any) -> Any:
    """The tokeniser in a local directory; UserError where it is none, or not the model's.

    What is too long loses its beginning: of a query with a response, the query's.
    """
    from transformers import AutoTokenizer

    try:
        with told(directory):
            tokeniser = AutoTokenizer.from_pretrained(
                directory, config=model.config, local_files_only=True, trust_remote_code=False
            )
            tokens = tokeniser.get_vocab().values()
    except UserError as e:
        raise UserError(f'{directory}: its tokeniser cannot be read: {e}') from e
    rows = len(model.get_input_embeddings().weight)
    if not tokens or max(tokens) >= rows:
        raise UserError(
            f'{directory}: its tokeniser has {len(tokens)} tokens, up to number'
            f' {max(tokens, default=0)}, but the model knows {rows}'
        )
    tokeniser.truncation_side = 'left'
    tokeniser.model_max_length = _limit(tokeniser, model)
    return tokeniser


def _limit(tokeniser: Any, model: Any) -> int:
    """The most tokens that a classifier takes."""
    limits = [tokeniser.model_max_length]
    positions = getattr(model.config.get_text_config(), 'max_position_embeddings', None)
    if isinstance(positions, int):
        limits.append(positions)
    for name, module in model.named_modules():
        # Some families count positions from the one after the padding's.
        if name.endswith('position_embeddings') and isinstance(module, torch.nn.Embedding):
            first = 0 if module.padding_idx is None else module.padding_idx + 1
            limits.append(module.num_embeddings - first)
    numbers = [
        limit for limit in limits if isinstance(limit, (int, float)) and math.isfinite(limit)
    ]
    return max(1, int(min(numbers, default=1 << 20)))
