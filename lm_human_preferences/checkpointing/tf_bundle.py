"""Reader and writer of TensorFlow 1.13 checkpoints (tensor_bundle.proto, LevelDB tables)."""

from __future__ import annotations

import collections
import collections.abc
import itertools
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from lm_human_preferences.errors import UserError, os_errors_as
from lm_human_preferences.storage.files import masked_crc

if TYPE_CHECKING:
    import torch

# DTYPES maps TensorFlow's type numbers (in types.proto) to the equivalent numpy dtypes.
DTYPES = {
    1: np.dtype('<f4'),
    2: np.dtype('<f8'),
    3: np.dtype('<i4'),
    4: np.dtype('u1'),
    5: np.dtype('<i2'),
    6: np.dtype('i1'),
    8: np.dtype('<c8'),
    9: np.dtype('<i8'),
    10: np.dtype('?'),
    17: np.dtype('<u2'),
    18: np.dtype('<c16'),
    19: np.dtype('<f2'),
    22: np.dtype('<u4'),
    23: np.dtype('<u8'),
}
DTYPE_NUMBERS = {dtype: number for number, dtype in DTYPES.items()}
MAX_RANK = 64  # largest number of dimensions of a numpy array
VARINT, BYTES, FIXED32 = 0, 2, 5  # wire types of protocol buffers that occur in checkpoints
# An entry is `sliced` if its variable is partitioned, so that its pieces have keys of their own.
_Entry = collections.namedtuple('_Entry', 'dtype shape shard offset size crc sliced')
# Limit in bytes for an index, on disk and decoded; GPT-2 1558M with Adam takes 1/40 of the limit.
MAX_SIZE = 1 << 23
INDEX_FILE_IS_TOO_LARGE = f'the index takes more than {MAX_SIZE >> 20} MiB'
MAGIC = bytes.fromhex('57fb808b247547db')
FOOTER_SIZE = 48
ENTRY_COST = 64  # bytes assumed for an entry of an index, besides the entry's key
RESTART_INTERVAL = 16


class BundleError(UserError):
    """Error that names a missing, damaged or unsupported file or tensor of a checkpoint."""


def _fields(message: bytes) -> Iterator[tuple[tuple[int, int], Any]]:
    """Yield ((number, wire type), value) for fields 1 to 7 of a protobuf; ValueError if damaged."""
    position = 0
    while position < len(message):
        tag, position = read_varint(message, position)
        number = tag >> 3
        wire_type = tag & 7
        if wire_type == VARINT:
            value, position = read_varint(message, position)
        elif wire_type in (BYTES, FIXED32):
            size = 4
            if wire_type == BYTES:
                size, position = read_varint(message, position)
            value = message[position : position + size]
            position += size
        else:
            raise ValueError('a field of the index has an unknown wire type')
        if position > len(message):
            raise ValueError('a field of the index is truncated')
        if number <= 7:
            yield (number, wire_type), value


def _field(number: int, value: int | bytes) -> bytes:
    """Return a protocol buffer's field, serialised; b'' for the value 0, which is the default."""
    if isinstance(value, bytes):
        return varint(number << 3 | BYTES) + varint(len(value)) + value
    if value == 0:
        return b''
    return varint(number << 3) + varint(value)


def _parse_entry(message: bytes) -> _Entry:
    """Parse a BundleEntryProto, which says where a checkpoint holds a variable."""
    fields = dict(_fields(message))
    # Read at most one dimension more than numpy supports, which is enough to refuse the tensor.
    shape = []
    for tag, dimension in itertools.islice(_fields(fields.get((2, BYTES), b'')), MAX_RANK + 1):
        if tag == (2, BYTES):
            shape.append(dict(_fields(dimension)).get((1, VARINT), 0))
    return _Entry(
        dtype=fields.get((1, VARINT), 0),
        shape=tuple(shape),
        shard=fields.get((3, VARINT), 0),
        offset=fields.get((4, VARINT), 0),
        size=fields.get((5, VARINT), 0),
        crc=int.from_bytes(fields.get((6, FIXED32), b''), 'little'),
        sliced=(7, BYTES) in fields,
    )


def open_file(path: str) -> BinaryIO:
    """Open a regular file for reading; BundleError if that fails."""
    if not os.path.exists(path):
        raise BundleError(f'{path} is missing')
    if not os.path.isfile(path):  # opening a pipe could block for ever
        raise BundleError(f'{path} is not a file')
    with os_errors_as(f'{path} cannot be read', kind=BundleError):
        return open(path, 'rb')


def _mapped(path: str) -> bytes | mmap.mmap:
    """Map a file into memory for as long as an array refers to it."""
    with open_file(path) as f:
        if os.fstat(f.fileno()).st_size == 0:  # mmap refuses an empty file
            return b''
        return mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)


class Bundle(collections.abc.Mapping[str, np.ndarray]):
    """Mapping {name: read-only array} of a checkpoint; BundleError at lookup of a damaged array."""

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = os.fspath(prefix)
        self._index = f'{self.prefix}.index'
        with open_file(self._index) as f:
            data = f.read(MAX_SIZE + 1)
        try:
            rows = dict(read_table(data))
            if b'' not in rows:
                raise ValueError('the index has no header')
            header = dict(_fields(rows.pop(b'')))  # the header is a BundleHeaderProto
            self._n_shards = header.get((1, VARINT), 0)
            self._entries: dict[str, _Entry] = {}
            for key, row in rows.items():
                if not key.startswith(b'\0'):  # leave out pieces of partitioned variables
                    self._entries[key.decode()] = _parse_entry(row)
        except ValueError as e:
            raise BundleError(f'{self._index} is damaged or no checkpoint: {e}') from e

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def shard_names(self) -> list[str]:
        """Return the base names of the data files that hold the tensors."""
        shards = {entry.shard for entry in self._entries.values()}
        return [os.path.basename(self._shard_path(shard)) for shard in sorted(shards)]

    def _shard_path(self, shard: int) -> str:
        if shard >= self._n_shards:
            raise BundleError(
                f'{self._index} is damaged: shard {shard} is not below {self._n_shards}'
            )
        return f'{self.prefix}.data-{shard:05d}-of-{self._n_shards:05d}'

    def __getitem__(self, name: str) -> np.ndarray:
        entry = self._entries[name]
        if entry.sliced or entry.dtype not in DTYPES:
            kind = 'a partitioned variable'
            if not entry.sliced:
                kind = f'neither numbers nor booleans (type {entry.dtype} of types.proto)'
            raise BundleError(f'{self._index}: {name!r} is {kind}, which is not supported')
        dtype = DTYPES[entry.dtype]
        path = self._shard_path(entry.shard)
        data = _mapped(path)
        end = entry.offset + entry.size
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
    """Write the values of arrays or torch tensors to `file`; return the content of the index."""
    header = _field(1, 1) + _field(3, _field(1, 1))  # the header for one shard, version 1
    rows = [(b'', header)]
    offset = 0
    for name in sorted(tensors):  # strings sort as their UTF-8 bytes do
        tensor: Any = tensors[name]
        if hasattr(tensor, 'detach'):  # only torch tensors have `detach`
            tensor = tensor.detach().cpu()
        array = np.asarray(tensor)
        dtype = array.dtype.newbyteorder('<')
        if dtype not in DTYPE_NUMBERS or not name or name.startswith('\0'):
            raise BundleError(f'{name!r} of type {array.dtype} cannot be written to {file.name}')
        values = np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8)
        file.write(values)  # pyright: ignore[reportArgumentType, reportCallIssue]
        shape = b''.join(_field(2, _field(1, size)) for size in array.shape)
        crc = varint(6 << 3 | FIXED32) + struct.pack('<I', masked_crc(values))
        entry = _field(1, DTYPE_NUMBERS[dtype]) + _field(2, shape)
        entry += _field(4, offset) + _field(5, values.nbytes) + crc
        rows.append((name.encode(), entry))
        offset += values.nbytes
    return encode_table(rows)


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Return (base-128 number at `position`, position after the number); ValueError if damaged."""
    value = 0
    for length, byte in enumerate(data[position : position + 10], start=1):
        value |= (byte & 0x7F) << 7 * (length - 1)
        if byte < 0x80:
            return value, position + length
    raise ValueError('a number in the index is damaged')


def varint(value: int) -> bytes:
    """Return the bytes of a number >= 0 in base 128."""
    return bytes([value]) if value < 0x80 else bytes([value & 0x7F | 0x80]) + varint(value >> 7)


def read_table(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield all (key, value) pairs of a LevelDB table; ValueError if it is damaged or too large."""
    if len(data) > MAX_SIZE:
        raise ValueError(INDEX_FILE_IS_TOO_LARGE)
    if len(data) < FOOTER_SIZE or not data.endswith(MAGIC):
        raise ValueError('the file does not end like the index of a TensorFlow checkpoint')
    footer = data[-FOOTER_SIZE:-8]
    # The meta-index is empty: skip the two numbers of the handle that locates the meta-index.
    _, position = read_varint(footer, 0)
    _, position = read_varint(footer, position)
    size = 0
    for _, handle in _entries(_block(data, footer[position:])):
        block = _block(data, handle)
        size += len(block)
        if size > MAX_SIZE:
            raise ValueError(INDEX_FILE_IS_TOO_LARGE)
        for key, value in _entries(block):
            size += len(key) + ENTRY_COST
            if size > MAX_SIZE:
                raise ValueError(INDEX_FILE_IS_TOO_LARGE)
            yield key, value


def _block(data: bytes, handle: bytes) -> bytes:
    """Return a table's block at `handle` (offset, size); ValueError if damaged or compressed."""
    offset, position = read_varint(handle, 0)
    size, _ = read_varint(handle, position)
    end = offset + size
    if end + 5 > len(data):
        raise ValueError('a block of the index lies beyond the end of the file')
    (crc,) = struct.unpack_from('<I', data, end + 1)
    if masked_crc(data[offset : end + 1]) != crc:
        raise ValueError('the checksum of a block of the index does not match')
    if data[end]:
        raise ValueError(
            'the index is compressed, which is not supported; TensorFlow stopped compressing in 1.2'
        )
    return data[offset:end]


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield (key, value) pairs of a block; a key is stored as the change from the key before."""
    end = len(block) - 4 - 4 * int.from_bytes(block[-4:], 'little')
    if end < 0:
        raise ValueError('a block of the index is too short')
    position = 0
    key = b''
    while position < end:
        shared, position = read_varint(block, position)
        rest, position = read_varint(block, position)
        size, position = read_varint(block, position)
        if shared > len(key) or position + rest + size > end:
            raise ValueError('an entry of the index is damaged')
        key = key[:shared] + block[position : position + rest]
        position += rest + size
        yield key, block[position - size : position]


def encode_block(rows: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Encode (key, value) `rows`; most keys omit the prefix they share with the previous key."""
    entries = bytearray()
    restarts = [0]
    last = b''
    for i, (key, value) in enumerate(rows):
        if i and i % RESTART_INTERVAL == 0:
            restarts.append(len(entries))
            last = b''
        differing = (i for i, (a, b) in enumerate(zip(key, last)) if a != b)
        shared = next(differing, min(len(key), len(last)))
        entries += varint(shared) + varint(len(key) - shared) + varint(len(value))
        entries += key[shared:] + value
        last = key
    return bytes(entries) + struct.pack(f'<{len(restarts) + 1}I', *restarts, len(restarts))


def successor(key: bytes) -> bytes:
    """Return a short key that is >= `key`, as TensorFlow's FindShortSuccessor does."""
    for i, byte in enumerate(key):
        if byte < 0xFF:
            return key[:i] + bytes([byte + 1])
    return key


def encode_table(rows: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return (key, value) `rows` with ascending keys as a table, as TensorFlow 1.13 writes it."""
    table = bytearray()

    def write(block: bytes) -> bytes:
        """Append an uncompressed block to the table; return the block's handle."""
        handle = varint(len(table)) + varint(len(block))
        table.extend(block + b'\0' + struct.pack('<I', masked_crc(block + b'\0')))
        return handle

    handle = write(encode_block(rows))
    meta_index_handle = write(encode_block([]))
    last_key, _ = rows[-1]
    index_handle = write(encode_block([(successor(last_key), handle)]))
    footer = meta_index_handle + index_handle
    return bytes(table) + footer.ljust(FOOTER_SIZE - 8, b'\0') + MAGIC
