"""Reader and writer of LevelDB tables, sorted (key, value) pairs, as TensorFlow 1.13 (lib/io/)."""

import struct
from collections.abc import Iterable, Iterator, Sequence

from lm_human_preferences.storage.crc import masked_crc

# Most bytes of a file and of its decoded entries; 1558M with its optimiser needs 1/40 of them.
MAX_SIZE = 1 << 23
TOO_LARGE = f'it takes more than {MAX_SIZE >> 20} MiB'
MAGIC = bytes.fromhex('57fb808b247547db')
FOOTER_SIZE = 48
ENTRY_COST = 64  # bytes that an entry counts for in MAX_SIZE, besides its key
RESTART_INTERVAL = 16


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Return (value, position after it) of the base-128 number at `position`."""
    value = 0
    for length, byte in enumerate(data[position : position + 10], start=1):
        value |= (byte & 0x7F) << 7 * (length - 1)
        if byte < 0x80:
            return value, position + length
    raise ValueError('damaged number')


def varint(value: int) -> bytes:
    """Return a number >= 0 in base 128."""
    return bytes([value]) if value < 0x80 else bytes([value & 0x7F | 0x80]) + varint(value >> 7)


def read_table(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield all (key, value) pairs of a table; ValueError if it is damaged or too large."""
    if len(data) > MAX_SIZE:
        raise ValueError(TOO_LARGE)
    if len(data) < FOOTER_SIZE or not data.endswith(MAGIC):
        raise ValueError('it does not end as the index of a TensorFlow checkpoint')
    footer = data[-FOOTER_SIZE:-8]
    # The handle of the meta-index, which is empty, comes first: two numbers.
    _, position = read_varint(footer, 0)
    _, position = read_varint(footer, position)
    size = 0
    for _, handle in _entries(_block(data, footer[position:])):
        block = _block(data, handle)
        size += len(block)
        if size > MAX_SIZE:
            raise ValueError(TOO_LARGE)
        for key, value in _entries(block):
            size += len(key) + ENTRY_COST
            if size > MAX_SIZE:
                raise ValueError(TOO_LARGE)
            yield key, value


def _block(data: bytes, handle: bytes) -> bytes:
    """Return the block at `handle` (offset and size), which compression and CRC follow."""
    offset, position = read_varint(handle, 0)
    size, _ = read_varint(handle, position)
    end = offset + size
    if end + 5 > len(data):
        raise ValueError('a block is beyond the end')
    (crc,) = struct.unpack_from('<I', data, end + 1)
    if masked_crc(data[offset : end + 1]) != crc:
        raise ValueError('the checksum of a block does not match')
    if data[end]:
        raise ValueError(
            'it is compressed, which is not supported; TensorFlow has not compressed since 1.2'
        )
    return data[offset:end]


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield (key, value) of a block; keys are stored as differences."""
    end = len(block) - 4 - 4 * int.from_bytes(block[-4:], 'little')
    if end < 0:
        raise ValueError('a block is too short')
    position = 0
    key = b''
    while position < end:
        shared, position = read_varint(block, position)
        rest, position = read_varint(block, position)
        size, position = read_varint(block, position)
        if shared > len(key) or position + rest + size > end:
            raise ValueError('an entry is damaged')
        key = key[:shared] + block[position : position + rest]
        position += rest + size
        yield key, block[position - size : position]


def encode_block(rows: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return a block of (key, value) `rows`; every RESTART_INTERVAL-th key is in full."""
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
    """Return the table of TensorFlow 1.13 for (key, value) `rows` with ascending keys."""
    table = bytearray()

    def write(block: bytes) -> bytes:
        """Append a block, not compressed; return its handle."""
        handle = varint(len(table)) + varint(len(block))
        table.extend(block + b'\0' + struct.pack('<I', masked_crc(block + b'\0')))
        return handle

    handle = write(encode_block(rows))
    meta_index_handle = write(encode_block([]))
    last_key, _ = rows[-1]
    index_handle = write(encode_block([(successor(last_key), handle)]))
    footer = meta_index_handle + index_handle
    return bytes(table) + footer.ljust(FOOTER_SIZE - 8, b'\0') + MAGIC
