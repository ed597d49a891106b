"""Small objects as bytes that ranks send each other.

They are JSON and not pickles: whoever connects to the port of a run can at worst send wrong values,
but no code. What JSON does not know is written as [its name, its parts].
"""

import base64
import json
from typing import Any

import numpy as np
import torch


def encode(value: Any) -> bytes:
    """`value` as bytes for `decode`.

    It is made of None, booleans, numbers, texts, bytes, arrays, tensors, and of lists, tuples and
    dicts with texts as keys. TypeError for anything else.
    """
    return json.dumps(_to_json(value)).encode()


def decode(message: bytes) -> Any:
    """The value that `encode` got, to the bit; tensors are on the CPU."""
    return _from_json(json.loads(message))


def _to_json(value: Any) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if type(value) in (int, float):
        return value
    if type(value) in (list, tuple):  # but not named tuples, whose names would be lost
        return [type(value).__name__, [_to_json(item) for item in value]]
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError(f'keys between ranks must be texts: {list(value)!r:.200}')
        return {key: _to_json(item) for key, item in value.items()}
    if isinstance(value, bytes):
        return ['bytes', base64.b64encode(value).decode()]
    if isinstance(value, torch.Tensor):
        host = value.detach().cpu().contiguous()
        content = host.reshape(-1).view(torch.uint8).numpy().tobytes()
        dtype = str(host.dtype).removeprefix('torch.')
        return ['tensor', dtype, list(host.shape), base64.b64encode(content).decode()]
    if isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        name = 'array' if isinstance(value, np.ndarray) else 'scalar'
        return [name, value.dtype.str, value.shape, base64.b64encode(value.tobytes()).decode()]
    raise TypeError(f'ranks do not send each other {type(value)}')


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _from_json(item) for key, item in value.items()}
    if not isinstance(value, list):
        return value
    name, *parts = value
    if name == 'list':
        return [_from_json(item) for item in parts[0]]
    if name == 'tuple':
        return tuple(_from_json(item) for item in parts[0])
    if name == 'bytes':
        return base64.b64decode(parts[0])
    dtype, shape, text = parts
    content = bytearray(base64.b64decode(text))
    if name == 'tensor':
        flat = torch.from_numpy(np.frombuffer(content, np.uint8))
        return flat.view(getattr(torch, dtype)).reshape(shape)
    array = np.frombuffer(content, np.dtype(dtype)).reshape(shape)
    return array if name == 'array' else array[()]
