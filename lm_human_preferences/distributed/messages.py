"""Small objects between ranks in JSON, as a pickle could run code; [name, *parts] for the rest."""

import base64
import json
from typing import Any

import numpy as np
import torch


def encode(value: Any) -> bytes:
    """Return `value` as bytes for `decode`; TypeError for types that ranks do not send."""
    return json.dumps(_to_json(value)).encode()


def decode(message: bytes | bytearray | memoryview) -> Any:
    """Return the value that `encode` got, to the bit; tensors are on the CPU."""
    return _from_json(json.loads(bytes(message)))


def _to_json(value: Any) -> Any:
    if value is None or isinstance(value, bool | str) or type(value) in (int, float):
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
