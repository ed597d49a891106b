"""Files, whole or not there at all: local ones, and blobs that become local copies, fetched once.

The only room that opens remote paths. Knows paths and bytes; does not know what is in a file.

    paths.py    what a path or URL is
    files.py    local files: atomic writing, JSON
    blobs.py    blobs on a server
    hub.py      files of the Hugging Face hub, which hub_client.py fetches
    cache.py    reading anything through the cache
    outputs.py  --output_dir of a command
    crc.py      the checksum of TensorFlow's files
"""

from lm_human_preferences.storage.blobs import check_access, listing, remove, stat, write
from lm_human_preferences.storage.cache import (
    cached_path,
    cached_paths,
    check_here,
    exists,
    is_here,
    make_cache_folder,
    parse_json,
    parse_json_lines,
    read_json,
    read_json_lines,
    read_text,
    read_whole_lines,
    readable_json_lines,
    without_bom,
)
from lm_human_preferences.storage.files import (
    append,
    atomic_write,
    local_files,
    lock_file,
    md5,
    open_nofollow,
    sync_directory,
    write_bytes,
    write_json,
)
from lm_human_preferences.storage.hub import cached_directory, is_pin_of, model_path, pinned
from lm_human_preferences.storage.hub_client import is_reachable
from lm_human_preferences.storage.paths import (
    HUB,
    NotFound,
    StorageError,
    cache_root,
    is_hub,
    is_offline,
    is_remote,
    join,
    staging_dir,
)

__all__ = [
    'HUB',
    'NotFound',
    'StorageError',
    'append',
    'atomic_write',
    'cache_root',
    'cached_directory',
    'cached_path',
    'cached_paths',
    'check_access',
    'check_here',
    'exists',
    'is_here',
    'is_hub',
    'is_offline',
    'is_pin_of',
    'is_reachable',
    'is_remote',
    'join',
    'listing',
    'local_files',
    'lock_file',
    'make_cache_folder',
    'md5',
    'model_path',
    'open_nofollow',
    'parse_json',
    'parse_json_lines',
    'pinned',
    'read_json',
    'read_json_lines',
    'read_text',
    'read_whole_lines',
    'readable_json_lines',
    'remove',
    'staging_dir',
    'stat',
    'sync_directory',
    'without_bom',
    'write',
    'write_bytes',
    'write_json',
]
