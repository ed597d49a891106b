"""TensorFlow 1 checkpoints ("tensor bundles"), read and written with numpy alone.

A checkpoint PREFIX is PREFIX.index, a table that maps names of tensors to BundleEntryProto
messages, and its shards PREFIX.data-00000-of-00001, ..., which hold the little-endian values.
PREFIX.meta (the graph) is not needed. The format is that of TensorFlow 1.13:
protobuf/tensor_bundle.proto and util/tensor_bundle/ in tensorflow/core.
"""

from __future__ import annotations

import collections
import collections.abc
import itertools
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from lm_human_preferences.checkpointing.tf_table import (
    MAX_SIZE,
    Table,
    encode_table,
    read_varint,
    varint,
)
from lm_human_preferences.errors import UserError
from lm_human_preferences.utils.crc import masked_crc

if TYPE_CHECKING:
    import torch

# types.proto; what is missing (strings, bfloat16, quantized types) numpy cannot map
DTYPES = {
    number: np.dtype(code).newbyteorder('<')
    for number, code in {
        1: 'f4',
        2: 'f8',
        3: 'i4',
        4: 'u1',
        5: 'i2',
        6: 'i1',
        8: 'c8',
        9: 'i8',
        10: '?',
        17: 'u2',
        18: 'c16',
        19: 'f2',
        22: 'u4',
        23: 'u8',
    }.items()
}
DTYPE_NUMBERS = {dtype: number for number, dtype in DTYPES.items()}
MAX_RANK = 64  # of numpy
VARINT, BYTES, FIXED32 = 0, 2, 5  # wire types of protocol buffers; these messages have no others

# `sliced` is true of a partitioned variable, which is kept in pieces under other keys
_Entry = collections.namedtuple('_Entry', 'dtype shape shard offset size crc sliced')


class BundleError(UserError):
    """A checkpoint that is missing, damaged or of a kind that is not supported; names the file and
    the tensor."""


def _fields(message: bytes) -> Iterator[tuple[tuple[int, int], Any]]:
    """Yield ((field number, wire type), number or bytes) of a serialized message; fields beyond the
    7th are skipped."""
    position = 0
    while position < len(message):
        tag, position = read_varint(message, position)
        kind = tag & 7
        if kind not in (VARINT, BYTES, FIXED32):
            raise ValueError('a field is of no known kind')
        value, position = read_varint(message, position) if kind != FIXED32 else (4, position)
        if kind != VARINT:
            value, position = message[position : position + value], position + value
        if position > len(message):
            raise ValueError('a field is truncated')
        if tag >> 3 <= 7:
            yield (tag >> 3, kind), value


def _field(number: int, value: int | bytes) -> bytes:
    """A field with a number, left out if 0, or with bytes."""
    if isinstance(value, bytes):
        return varint(number << 3 | BYTES) + varint(len(value)) + value
    return varint(number << 3) + varint(value) if value else b''


def _parse_entry(message: bytes) -> _Entry:
    """The _Entry of a BundleEntryProto."""
    fields = dict(_fields(message))
    dimensions = [
        dict(_fields(value))
        for tag, value in itertools.islice(_fields(fields.get((2, BYTES), b'')), MAX_RANK + 1)
        if tag == (2, BYTES)
    ]
    shape = tuple(dimension.get((1, VARINT), 0) for dimension in dimensions)
    dtype, shard, offset, size = (fields.get((number, VARINT), 0) for number in (1, 3, 4, 5))
    crc = int.from_bytes(fields.get((6, FIXED32), b''), 'little')
    return _Entry(dtype, shape, shard, offset, size, crc, (7, BYTES) in fields)


def open_file(path: str) -> BinaryIO:
    """A regular file, for reading; BundleError says what is wrong with any other."""
    if not os.path.isfile(path):  # to open a pipe would wait for ever
        raise BundleError(f'{path} is not a file' if os.path.exists(path) else f'{path} is missing')
    try:
        return open(path, 'rb')
    except OSError as e:
        raise BundleError(f'{path} cannot be read: {e.strerror}') from e


def _mapped(path: str) -> bytes | mmap.mmap:
    """The contents of a file, mapped; the map goes away with the last array on it."""
    with open_file(path) as f:
        empty = os.fstat(f.fileno()).st_size == 0  # which cannot be mapped
        return b'' if empty else mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)


class Bundle(collections.abc.Mapping[str, np.ndarray]):
    """The tensors of the checkpoint `prefix`: {name: read-only array that maps the file}; nothing
    is copied.

    The index is read and verified at once, a shard opened when a tensor in it is asked for, the CRC
    of a tensor checked whenever it is taken. Raises BundleError; KeyError for a name that is not
    there.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = os.fspath(prefix)
        self._index = f'{self.prefix}.index'
        with open_file(self._index) as f:
            table = Table(f.read(MAX_SIZE + 1))
        try:
            rows = dict(table.rows())
            if b'' not in rows:
                raise ValueError('it has no header')
            self._n_shards = dict(_fields(rows.pop(b''))).get(
                (1, VARINT), 0
            )  # of a BundleHeaderProto
            # the keys of pieces of partitioned variables begin with a zero
            self._entries = {
                key.decode(): _parse_entry(row)
                for key, row in rows.items()
                if not key.startswith(b'\0')
            }
        except ValueError as e:
            raise BundleError(f'{self._index} is damaged or no checkpoint: {e}') from e

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def shard_names(self) -> list[str]:
        """Base names of the data files that hold the tensors."""
        shards = sorted({entry.shard for entry in self._entries.values()})
        return [os.path.basename(self._shard_path(shard)) for shard in shards]

    def nbytes(self) -> int:
        """Size of the data files that hold the tensors."""
        return sum(
            len(_mapped(self._shard_path(shard)))
            for shard in {entry.shard for entry in self._entries.values()}
        )

    def _shard_path(self, shard: int) -> str:
        if shard >= self._n_shards:
            raise BundleError(
                f'{self._index} is damaged: a tensor is in shard {shard} of {self._n_shards}'
            )
        return f'{self.prefix}.data-{shard:05d}-of-{self._n_shards:05d}'

    def __getitem__(self, name: str) -> np.ndarray:
        entry = self._entries[name]
        if entry.sliced:
            raise BundleError(
                f'{self._index}: {name!r} is a partitioned variable, which is not supported'
            )
        if entry.dtype not in DTYPES:
            raise BundleError(
                f'{self._index}: {name!r} is neither numbers nor booleans (type {entry.dtype} of '
                'types.proto), which is not supported'
            )
        path, end, dtype = (
            self._shard_path(entry.shard),
            entry.offset + entry.size,
            DTYPES[entry.dtype],
        )
        data = _mapped(path)
        if end > len(data):
            raise BundleError(
                f'{path} is truncated: {name!r} ends at byte {end}, the file at {len(data)}'
            )
        content = np.frombuffer(data, np.uint8)[entry.offset : end]
        try:
            values = content.view(dtype).reshape(entry.shape)
        except ValueError as e:
            raise BundleError(
                f'{self._index} is damaged: {name!r} has {entry.size} bytes, which do not make'
                f' {dtype} {entry.shape}'
            ) from e
        if masked_crc(content) != entry.crc:
            raise BundleError(f'{path} is damaged: the checksum of {name!r} does not match')
        return values


def write_values(file: BinaryIO, tensors: Mapping[str, np.ndarray | torch.Tensor]) -> bytes:
    """Write the values of {name: array or torch tensor} to `file`, one after the other; returns the
    bytes of the index.

    `tensors` may be any mapping: each name is looked up once, in the order of the file. Raises
    BundleError for a name or a type that a checkpoint cannot hold.
    """
    rows, offset = (
        [(b'', _field(1, 1) + _field(3, _field(1, 1)))],
        0,
    )  # the header: one shard, version 1
    for name in sorted(tensors):  # as their bytes in UTF-8 are
        tensor = tensors[name]
        array = np.asarray(
            tensor.detach().cpu()  # pyright: ignore[reportAttributeAccessIssue]
            if hasattr(tensor, 'detach')
            else tensor
        )
        dtype = array.dtype.newbyteorder('<')
        if dtype not in DTYPE_NUMBERS or not name or name.startswith('\0'):
            raise BundleError(f'{name!r} of type {array.dtype} cannot be written to {file.name}')
        values = np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8)
        file.write(values)  # pyright: ignore[reportArgumentType, reportCallIssue]
        shape = b''.join(_field(2, _field(1, size)) for size in array.shape)
        crc = varint(6 << 3 | FIXED32) + struct.pack('<I', masked_crc(values))
        rows.append(
            (
                name.encode(),
                _field(1, DTYPE_NUMBERS[dtype])
                + _field(2, shape)
                + _field(4, offset)
                + _field(5, values.nbytes)
                + crc,
            )
        )
        offset += values.nbytes
    return encode_table(rows)
