"""LevelDB tables as TensorFlow 1.13 keeps the index of a checkpoint in: sorted (key, value) pairs of bytes.

The format is that of tensorflow/core/lib/io/{format,block,block_builder,table_builder}.cc. Nothing in a file is
trusted: damage raises ValueError, and what reading can cost is bounded by MAX_SIZE.
"""
import itertools
import math
import os
import struct

from google_crc32c import value as crc32c

MAX_SIZE = 1 << 23  # bytes, of a file and of what its entries take; 1558M with its optimiser needs a tenth
TOO_LARGE = f'it takes more than {MAX_SIZE >> 20} MiB'
MAGIC = bytes.fromhex('57fb808b247547db')
FOOTER_SIZE = 48
TRAILER_SIZE = 5  # after each block: kind of compression, masked CRC
EMPTY_BLOCK = struct.pack('<II', 0, 1)  # the meta-index
BLOCK_SIZE = 1 << 18
ENTRY_COST = 64  # what an entry takes of MAX_SIZE besides its key


def masked_crc(data):
    """The CRC32C of a bytes-like object as TensorFlow stores it (lib/hash/crc32c.h)."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def read_varint(data, position):
    """(value, position after it) of the base-128 number at `position`."""
    value = shift = 0
    while position < len(data) and shift < 64:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise ValueError('damaged number')


def varint(value):
    """A number >= 0 in base 128."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def uncompress(block, limit):
    """The contents, `limit` bytes at most, of a block in Snappy's raw format (its format_description.txt)."""
    size, position = read_varint(block, 0)
    if size > limit:
        raise ValueError('compressed block too large')
    out = bytearray()
    while position < len(block) and len(out) <= size:
        tag, kind, high = block[position], block[position] & 3, block[position] >> 2
        after = position + 1 + (max(0, high - 59), 1, 2, 4)[kind]
        number, position = int.from_bytes(block[position + 1:after], 'little'), after
        if kind == 0:  # bytes as they are
            length = (high if high < 60 else number) + 1
            out += block[position:position + length]
            position += length
            continue
        length, distance = ((high & 7) + 4, tag >> 5 << 8 | number) if kind == 1 else (high + 1, number)
        if not 0 < distance <= len(out):
            raise ValueError('damaged compression')
        seen = out[-distance:][:length]
        out += (seen * (length // len(seen) + 1))[:length]  # a copy may run into what it adds
    if len(out) != size:
        raise ValueError('damaged compression')
    return bytes(out)


class Table:
    """The table whose file holds `data` (bytes)."""

    def __init__(self, data):
        self._data = data
        self._budget = MAX_SIZE

    def rows(self):
        """Yield its (key, value) pairs, once; raises ValueError where it is damaged."""
        if len(self._data) > MAX_SIZE:
            raise ValueError(TOO_LARGE)
        if len(self._data) < FOOTER_SIZE or not self._data.endswith(MAGIC):
            raise ValueError('it does not end as the index of a TensorFlow checkpoint')
        footer = self._data[-FOOTER_SIZE:-8]
        start = read_varint(footer, read_varint(footer, 0)[1])[1]  # past the handle of the meta-index, which is empty
        for _, handle in self._entries(footer[start:]):
            yield from self._entries(handle)

    def _spend(self, size):
        self._budget -= size
        if self._budget < 0:
            raise ValueError(TOO_LARGE)

    def _block(self, handle):
        """The contents of the block at `handle` (offset and size), its checksum verified."""
        offset, position = read_varint(handle, 0)
        size, _ = read_varint(handle, position)
        end = offset + size + 1
        if end + 4 > len(self._data):
            raise ValueError('a block is beyond the end')
        self._spend(size + ENTRY_COST)
        if masked_crc(self._data[offset:end]) != struct.unpack_from('<I', self._data, end)[0]:
            raise ValueError('the checksum of a block does not match')
        compression, block = self._data[end - 1], self._data[offset:end - 1]
        if compression > 1:
            raise ValueError(f'unknown compression {compression}')
        if compression:
            block = uncompress(block, self._budget)
            self._spend(len(block))
        return block

    def _entries(self, handle):
        """Yield (key, value) of the block at `handle`; of a key it holds what differs from the one before."""
        block = self._block(handle)
        end = len(block) - 4 - 4 * int.from_bytes(block[-4:], 'little')
        if end < 0:
            raise ValueError('a block is too short')
        position, key = 0, b''
        while position < end:
            shared, position = read_varint(block, position)
            rest, position = read_varint(block, position)
            size, position = read_varint(block, position)
            if shared > len(key) or position + rest + size > end:
                raise ValueError('an entry is damaged')
            self._spend(shared + rest + ENTRY_COST)
            key = key[:shared] + block[position:position + rest]
            position += rest + size
            yield key, block[position - size:position]


def _integers(*values):
    return struct.pack(f'<{len(values)}I', *values)


def _blocks(rows, *, interval, limit):
    """Yield (first key, last key, contents) of blocks of `limit` bytes; every `interval`-th key is written in full."""
    entries, restarts, count, last = bytearray(), [0], 0, b''
    for key, value in rows:
        if count == 0:
            first = key
        elif count % interval == 0:
            restarts.append(len(entries))
        shared = len(os.path.commonprefix([key, last])) if count % interval else 0
        entries += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        last, count = key, count + 1
        if len(entries) + 4 * len(restarts) + 4 >= limit:
            yield first, last, bytes(entries) + _integers(*restarts, len(restarts))
            entries, restarts, count = bytearray(), [0], 0
    if count:
        yield first, last, bytes(entries) + _integers(*restarts, len(restarts))


def separator(key, following):
    """A short key from `key` on and before `following`, the one TensorFlow takes (FindShortestSeparator)."""
    for i, (ours, theirs) in enumerate(zip(key, following, strict=False)):
        if ours != theirs:
            return key[:i] + bytes([ours + 1]) if ours + 1 < theirs else key
    return key


def successor(key):
    """A short key not before `key`, the one TensorFlow takes (FindShortSuccessor)."""
    for i, byte in enumerate(key):
        if byte < 0xFF:
            return key[:i] + bytes([byte + 1])
    return key


def encode_table(rows):
    """The bytes of the table that TensorFlow 1.13 writes for (key, value) `rows`, keys ascending, at least one."""
    table = bytearray()

    def write(contents):
        """Append a block, not compressed; returns its handle."""
        handle = varint(len(table)) + varint(len(contents))
        table.extend(contents + b'\0' + _integers(masked_crc(contents + b'\0')))
        return handle

    blocks = [(first, last, write(contents)) for first, last, contents in _blocks(rows, interval=16, limit=BLOCK_SIZE)]
    keys = [separator(last, following) for (_, last, _), (following, _, _) in itertools.pairwise(blocks)]
    keys.append(successor(blocks[-1][1]))
    index = zip(keys, (handle for _, _, handle in blocks), strict=True)
    footer = write(EMPTY_BLOCK)
    footer += write(next(_blocks(index, interval=1, limit=math.inf))[2])
    return bytes(table) + footer.ljust(FOOTER_SIZE - 8, b'\0') + MAGIC
