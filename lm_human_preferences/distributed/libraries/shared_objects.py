"""Shared libraries read as files: what they are linked against. Nothing is loaded.

Two MPI libraries in one process crash it, so this has to be known before one is loaded.
"""

import contextlib
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Of the ELF format, see elf(5): kinds of segments, and tags of entries in the dynamic section.
_LOADED, _DYNAMIC = 1, 2
_END, _NEEDED, _STRING_TABLE = 0, 1, 5
# 64 bits, little endian: the identity, where the table of segments begins, and their number.
_IDENTITY = b'\x7fELF\x02\x01'
_HEADER = struct.Struct('<6s26xQ16xH')
_SEGMENT = struct.Struct('<I4xQQ8xQ16x')
_ENTRY = struct.Struct('<qQ')


class _Segment(NamedTuple):
    """A part of the file, and the address at which it is loaded."""

    kind: int
    offset: int
    address: int
    size: int


def needed_libraries(path: str | Path) -> list[str]:
    """The libraries that the one at `path` is linked against, as 'libc.so.6'.

    ValueError if it is no shared library of a 64-bit machine; OSError if it cannot be read.
    """
    with _content(path) as data:
        try:
            segments = _segments(data)
            entries = list(_dynamic_entries(data, segments))
            table = _file_offset(segments, dict(entries)[_STRING_TABLE])
            starts = [table + value for tag, value in entries if tag == _NEEDED]
            return [data[start : data.find(b'\0', start)].decode() for start in starts]
        except (struct.error, LookupError, ValueError) as e:
            raise ValueError(f'{path} is no shared library of a 64-bit machine') from e


def contains(path: str | Path, text: bytes) -> bool:
    """Whether `text` occurs anywhere in the file."""
    with _content(path) as data:
        return data.find(text) >= 0


@contextlib.contextmanager
def _content(path: str | Path) -> Iterator[mmap.mmap]:
    with (
        Path(path).open('rb') as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data,
    ):
        yield data


def _segments(data: mmap.mmap) -> list[_Segment]:
    identity, table, count = _HEADER.unpack_from(data)
    if identity != _IDENTITY:
        raise ValueError('not an ELF file of 64 bits, little endian')
    offsets = [table + number * _SEGMENT.size for number in range(count)]
    return [_Segment(*_SEGMENT.unpack_from(data, offset)) for offset in offsets]


def _dynamic_entries(data: mmap.mmap, segments: list[_Segment]) -> Iterator[tuple[int, int]]:
    """(tag, value) of each entry in the dynamic section."""
    for segment in segments:
        if segment.kind == _DYNAMIC:
            end = segment.offset + segment.size
            for offset in range(segment.offset, end, _ENTRY.size):
                tag, value = _ENTRY.unpack_from(data, offset)
                if tag == _END:
                    return
                yield tag, value


def _file_offset(segments: list[_Segment], address: int) -> int:
    """Where the file holds what is loaded at `address`."""
    for segment in segments:
        is_inside = segment.address <= address < segment.address + segment.size
        if segment.kind == _LOADED and is_inside:
            return segment.offset + address - segment.address
    raise ValueError('nothing is loaded at that address')
