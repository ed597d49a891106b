"""TensorFlow checkpoints: equal to the original's byte for byte; one clear line for any damage."""

import contextlib
import itertools
import os
import random
import struct
import time
import tracemalloc
from unittest import mock

import numpy as np
import pytest
import torch
from fuzzing import damaged
from golden_data import found, golden

from lm_human_preferences.checkpointing import tf_bundle
from lm_human_preferences.checkpointing.checkpoints import write_bundle
from lm_human_preferences.checkpointing.tf_bundle import (
    Bundle,
    BundleError,
    encode_block,
    encode_table,
    read_table,
    varint,
)
from lm_human_preferences.storage.files import masked_crc

MIB = 1 << 20
DATA, INDEX = '.data-00000-of-00001', '.index'
TENSORS = {
    'model/w': np.arange(12, dtype='f4').reshape(3, 4),
    'model/wte': np.ones((2, 3), 'f4'),
    'scalar': np.float32(2),
    'empty': np.zeros((0, 3), 'f8'),
    'step': np.int64(7),
    'é': np.array([True, False, True]),
    **{f'm/{i:03d}': np.full(i % 5, i, 'f4') for i in range(100)},
}


@pytest.fixture
def prefix(tmp_path):
    write_bundle(tmp_path / 'model.ckpt', TENSORS)
    return str(tmp_path / 'model.ckpt')


def contents(path):
    with open(path, 'rb') as f:
        return f.read()


def put(path, data):
    with open(path, 'wb') as f:
        f.write(data)


def read_all(prefix):
    bundle = Bundle(prefix)
    return {name: bundle[name] for name in bundle}


def field(number, value):
    return tf_bundle._field(number, value)


def entry(dtype=1, shape=(2,), shard=0, offset=0, size=8, crc=0, extra=b''):
    dimensions = b''.join(field(2, field(1, n)) for n in shape)
    fields = field(1, dtype) + field(2, dimensions) + field(3, shard)
    fields += field(4, offset) + field(5, size)
    return fields + varint(6 << 3 | 5) + struct.pack('<I', crc) + extra


HEADER = field(1, 1) + field(3, field(1, 1))


def crafted(tmp_path, entries, header=HEADER, data=bytes(8)):
    rows = [(b'', header), *((name.encode(), message) for name, message in entries.items())]
    put(tmp_path / 'x.index', encode_table(rows))
    put(tmp_path / 'x.data-00000-of-00001', data)
    return tmp_path / 'x'


@pytest.mark.parametrize('name', found('**/*.index'))
def test_golden_checkpoint_is_reproduced(tmp_path, name):
    original = str(golden(name)).removesuffix('.index')
    bundle = Bundle(original)
    assert len(bundle) > 0
    write_bundle(tmp_path / 'x', bundle)
    for suffix in (INDEX, DATA):
        assert contents(original + suffix) == contents(tmp_path / f'x{suffix}')


@pytest.mark.parametrize(
    'key, expected',
    [(b'model', b'n'), (b'\xff\x01x', b'\xff\x02'), (b'\xff\xff', b'\xff\xff'), (b'', b'')],
)
def test_successor(key, expected):
    assert tf_bundle.successor(key) == expected


def seal(block, compression=0):
    block += bytes([compression])
    return block + struct.pack('<I', masked_crc(block))


def table_end(meta_handle, handle):
    return (meta_handle + handle).ljust(40, b'\0') + tf_bundle.MAGIC


def split(rows, count):
    table, index = b'', []
    for start in range(0, len(rows), count):
        block = encode_block(rows[start : start + count])
        index.append((rows[start : start + count][-1][0], varint(len(table)) + varint(len(block))))
        table += seal(block)
    block = encode_block(index)
    return table + seal(block) + table_end(varint(0) * 2, varint(len(table)) + varint(len(block)))


@pytest.mark.parametrize(
    'encode',
    [encode_table, lambda rows: split(rows, 3000)],
    ids=['one block', 'two blocks'],
)
def test_long_index_is_read(encode):
    rows = [(f'name/{i:06d}'.encode(), bytes(30)) for i in range(6000)]
    assert list(read_table(encode(rows))) == rows


def test_round_trip(prefix):
    bundle = Bundle(prefix)
    assert list(bundle) == sorted(TENSORS, key=str.encode)
    assert len(bundle) == len(TENSORS)
    assert 'scalar' in bundle
    assert 'x' not in bundle
    for name, value in TENSORS.items():
        assert np.array_equal(bundle[name], value)
        assert bundle[name].shape == value.shape and bundle[name].dtype == value.dtype
        assert not bundle[name].flags.writeable
    with pytest.raises(KeyError):
        bundle['x']


@pytest.mark.parametrize('code', 'f2 f4 f8 i1 i2 i4 i8 u1 u2 u4 u8 ? c8 c16 >f4'.split())
@pytest.mark.parametrize('shape', [(), (2, 0, 5), (2, 3, 4)])
def test_types_and_shapes(tmp_path, code, shape):
    value = (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 2).astype(code)
    write_bundle(tmp_path / 'x', {'a': np.True_, 'v': value})  # one byte before it: not aligned
    read = read_all(tmp_path / 'x')['v']
    assert read.dtype == value.dtype.newbyteorder('<')
    assert read.shape == shape
    assert np.array_equal(read, value)


def test_torch_tensors_and_views_are_written(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {'parameter': torch.nn.Parameter(base), 'transposed': base.T}
    tensors['number'] = torch.tensor(7)
    write_bundle(tmp_path / 'x', {**tensors, 'slice': base.numpy()[:, ::2], 'python': 3})
    read = read_all(tmp_path / 'x')
    for name, tensor in tensors.items():
        assert np.array_equal(read[name], tensor.detach().numpy())
    assert np.array_equal(read['slice'], base.numpy()[:, ::2])
    assert read['python'] == 3
    assert read['number'].dtype == 'i8'


def test_several_shards(tmp_path):
    first, second = np.arange(2, dtype='f4'), np.arange(4, dtype='f4')
    crc = [masked_crc(a.tobytes()) for a in (first, second)]
    path = crafted(
        tmp_path,
        {'a': entry(crc=crc[0]), 'b': entry(shape=(4,), shard=1, size=16, crc=crc[1])},
        header=field(1, 2),
    )
    put(f'{path}.data-00000-of-00002', first.tobytes())
    bundle = Bundle(path)  # the shards are not needed yet
    assert bundle.shard_names() == ['x.data-00000-of-00002', 'x.data-00001-of-00002']
    assert np.array_equal(bundle['a'], first)
    with pytest.raises(BundleError, match='x.data-00001-of-00002 is missing$'):
        bundle['b']
    put(f'{path}.data-00001-of-00002', second.tobytes())
    assert np.array_equal(bundle['b'], second)


def test_nothing_is_copied(tmp_path):
    write_bundle(tmp_path / 'x', {'a': np.ones(4 * MIB, 'f4')})
    with peak_memory() as peak:
        array = Bundle(tmp_path / 'x')['a']
    assert peak() < MIB and array[-1] == 1


@contextlib.contextmanager
def peak_memory():
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_compressed_index_is_refused(prefix):
    """TensorFlow writes none; the checksum is right."""
    block = bytes([1, 0, 0])
    put(prefix + INDEX, one_block(block, 1))
    told = f'^{prefix}.index is {NO_CHECKPOINT} the index is compressed'
    with pytest.raises(BundleError, match=told):
        Bundle(prefix)


UNKNOWN = "'v' is neither numbers nor booleans (type {} of types.proto), which is not supported"
SIZE = "damaged: 'v' has {} bytes, which do not make float32 {}"
NO_CHECKPOINT = 'damaged or no checkpoint:'
HUGE = (0, 1 << 40, 1 << 40)


@pytest.mark.parametrize(
    'message, line',
    [
        (entry(dtype=7), '.index: ' + UNKNOWN.format(7)),
        (entry(extra=field(7, b'x')), ".index: 'v' is a partitioned variable"),
        (entry(shape=(2,) + (1,) * 80), '.index is ' + SIZE.format(8, (2,) + (1,) * 64)),
        (entry(shape=HUGE, size=0), '.index is ' + SIZE.format(0, HUGE)),
        (entry(shard=1), '.index is damaged: shard 1 is not below 1'),
        (entry(shape=(3,), size=12), f"{DATA} is truncated: 'v' ends at byte 12, the file at 8"),
        (entry(offset=1 << 63), f"{DATA} is truncated: 'v' ends at byte {(1 << 63) + 8}, the file"),
        (entry(), f"{DATA} is damaged: the checksum of 'v' does not match"),
        (b'\x0b', f'.index is {NO_CHECKPOINT} a field of the index has an unknown wire type'),
        (b'\x12\x05a', f'.index is {NO_CHECKPOINT} a field of the index is truncated'),
        (b'\x08' + b'\xff' * 10 + b'\1', f'.index is {NO_CHECKPOINT} a number in the index is'),
    ],
)
def test_damaged_entry(tmp_path, message, line):
    path = crafted(tmp_path, {'v': message})
    with pytest.raises(BundleError) as e:
        read_all(path)
    assert str(e.value).startswith(f'{path}{line}')


def test_only_the_tensor_that_is_read_is_refused(tmp_path):
    crc = masked_crc(bytes(8))
    bundle = Bundle(crafted(tmp_path, {'numbers': entry(crc=crc), 'strings': entry(dtype=7)}))
    assert bundle['numbers'].tolist() == [0, 0] and list(bundle) == ['numbers', 'strings']


def test_pieces_of_partitioned_variables_are_no_tensors(tmp_path):
    assert list(Bundle(crafted(tmp_path, {'\0piece': entry(), 'v': entry()}))) == ['v']


@pytest.mark.parametrize('key, told', [(b'', 'has no header$'), (b'\xff', 'utf-8')])
def test_a_row_without_its_name(tmp_path, key, told):
    rows = [(b'', HEADER)] if key else []
    put(tmp_path / 'x.index', encode_table([*rows, (key or b'v', entry())]))
    with pytest.raises(BundleError, match=told):
        Bundle(tmp_path / 'x')


class _AnyChecksum(int):
    """Equals every checksum, so that damage reaches the parsers."""

    def __ne__(self, other):
        return False


def test_much_damaged_index(prefix):
    """Its checksums are believed, so that the parsers get the damage."""
    generator = random.Random(0)
    good = contents(prefix + INDEX)
    with mock.patch.object(tf_bundle, 'masked_crc', lambda data: _AnyChecksum()):
        for _ in range(150):
            put(prefix + INDEX, damaged(generator, good))
            with contextlib.suppress(BundleError):
                bundle = Bundle(prefix)
                bundle.shard_names()
                for name in itertools.islice(bundle, 50):
                    with contextlib.suppress(BundleError):
                        bundle[name]


def one_block(block, compression=0):
    return seal(block, compression) + table_end(varint(0) * 2, varint(0) + varint(len(block)))


def two_blocks(inner, handles=1):
    """A table with the block `inner`, to which `handles` entries of the index lead."""
    handle = varint(0) + varint(len(inner))
    block = (bytes([0, 0, len(handle)]) + handle) * handles + struct.pack('<II', 0, 1)
    index = varint(len(inner) + 5) + varint(len(block))
    return seal(inner) + seal(block) + table_end(varint(0) * 2, index)


def growing_keys():
    """Each key is the one before and a byte: 100 KB that would become 200 MB."""
    entries = b''.join(varint(i) + b'\1\0k' for i in range(20000))
    return two_blocks(entries + struct.pack('<II', 0, 1))


def many_entries():
    """Without a key or a value: 600 KB that would become 200,000 pairs."""
    return two_blocks(200_000 * b'\0\0\0' + struct.pack('<II', 0, 1))


def repeated_block():
    """Many entries of the index lead to one large block, which has no entries itself."""
    return two_blocks(bytes(MIB - 4) + struct.pack('<I', MIB // 4 - 1), handles=10000)


def large_file():
    rows = [(f'{i:05d}'.encode(), bytes(2000)) for i in range(10000)]
    return encode_table([(b'', HEADER), *rows])


@pytest.mark.parametrize(
    'block, reason',
    [
        (b'\1\0\0' + struct.pack('<II', 0, 1), 'an entry of the index is damaged'),
        (b'\0\5\0' + struct.pack('<II', 0, 1), 'an entry of the index is damaged'),
        (b'\xff' * 4, 'a block of the index is too short'),
    ],
)
def test_damaged_block(tmp_path, block, reason):
    put(tmp_path / 'x.index', one_block(block))
    with pytest.raises(BundleError, match=f'{reason}$'):
        Bundle(tmp_path / 'x')


@pytest.mark.parametrize('make', [growing_keys, many_entries, repeated_block, large_file])
def test_reading_a_crafted_index_is_cheap(tmp_path, monkeypatch, make):
    monkeypatch.setattr(tf_bundle, 'MAX_SIZE', 2 * MIB)
    put(tmp_path / 'x.index', make())
    start = time.process_time()
    with pytest.raises(BundleError, match=tf_bundle.INDEX_FILE_IS_TOO_LARGE), peak_memory() as peak:
        Bundle(tmp_path / 'x')
    assert peak() < 64 * MIB and time.process_time() - start < 20


@pytest.mark.parametrize(
    'message',
    [
        entry(shape=(), extra=field(2, b'\x12\x00' * MIB)),
        entry(shape=((1 << 64) - 1,) * 20),
        b''.join(varint(i << 3) + b'\0' for i in range(1, 20000)),
    ],
    ids=['dimensions', 'product', 'fields'],
)
def test_a_crafted_entry_is_cheap(tmp_path, message):
    """A few bytes claim millions of dimensions and shards: none is listed or multiplied."""
    path = crafted(tmp_path, {'v': message}, header=field(1, 1 << 60))
    start = time.process_time()
    with peak_memory() as peak:
        bundle = Bundle(path)
        with pytest.raises(BundleError):
            bundle['v']
        assert bundle.shard_names() == [f'x.data-00000-of-{1 << 60}']
    assert peak() < 16 * MIB and time.process_time() - start < 20


@pytest.mark.parametrize(
    'tensors',
    [{'': np.zeros(1)}, {'\0a': np.zeros(1)}, {'a': np.array(['text'])}, {'a': np.array([None])}],
    ids=['empty', 'zero', 'text', 'object'],
)
def test_what_cannot_be_written(tmp_path, prefix, tensors):
    before = {name: contents(tmp_path / name) for name in os.listdir(tmp_path)}
    with pytest.raises(BundleError, match='cannot be written'):
        write_bundle(prefix, {**TENSORS, **tensors})
    assert {name: contents(tmp_path / name) for name in os.listdir(tmp_path)} == before
