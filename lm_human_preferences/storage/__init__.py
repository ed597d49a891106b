"""Local and remote files: atomic writing, a cache. Only this package opens remote paths."""

from lm_human_preferences.storage.blobs import (
    cached_directory,
    cached_path,
    cached_paths,
    exists,
    is_here,
    listing,
    remove,
    write,
)
from lm_human_preferences.storage.files import (
    append,
    atomic_write,
    check_new_file,
    check_output_dir,
    closed_after_fork,
    existing_part,
    free_bytes,
    is_within,
    local_files,
    locked_folder,
    md5,
    new_directory,
    open_locked,
    open_nofollow,
    open_private,
    open_to_others,
    sync_directory,
    write_bytes,
    write_file,
    write_json,
)
from lm_human_preferences.storage.hub import pinned
from lm_human_preferences.storage.paths import (
    HUB,
    NotFound,
    StorageError,
    absolute,
    cache_root,
    is_hub,
    is_pin_of,
    is_remote,
    join,
    make_cache_folder,
    model_path,
    staging_dir,
)
from lm_human_preferences.storage.texts import (
    is_table,
    parse_json,
    parse_json_lines,
    read_json,
    read_json_lines,
    read_table,
    read_text,
    read_whole_lines,
)
