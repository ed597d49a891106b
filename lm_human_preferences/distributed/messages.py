"""Encoding of small objects between ranks: JSON with safetensors, as pickles could run code."""

import base64
import json
from typing import Any

import numpy as np
import safetensors.torch
import torch

# Keys of the JSON objects that stand for tensors and numpy arrays; no other object has them.
_TENSOR, _ARRAY = '\0tensor', '\0array'


def encode(value: Any) -> bytes:
    """Return `value` as bytes for `decode`; TypeError for types that ranks do not send."""
    return json.dumps(value, default=_encode_numbers).encode()


def decode(message: bytes) -> Any:
    """Return the value that was encoded, exactly, but tuples as lists and tensors on the CPU."""
    return json.loads(message, object_hook=_decode_numbers)


def _encode_numbers(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, torch.Tensor | np.ndarray):
        raise TypeError(f'ranks do not send each other {type(value)}')
    key = _TENSOR if isinstance(value, torch.Tensor) else _ARRAY
    tensor = torch.as_tensor(value).detach().cpu().contiguous()
    return {key: base64.b64encode(safetensors.torch.save({key: tensor})).decode()}


def _decode_numbers(value: dict[str, Any]) -> Any:
    for key in (_TENSOR, _ARRAY):
        if value.keys() == {key}:
            tensor = safetensors.torch.load(base64.b64decode(value[key]))[key]
            return tensor if key == _TENSOR else tensor.numpy()
    return value
