"""Models and data sets on the Hugging Face hub, downloaded by huggingface_hub into its cache.

Pickles and code are never fetched with a model. If the hub cannot be reached, the cache is used.
"""

import functools
import os
import sys
from typing import Any

from lm_human_preferences.storage.paths import (
    HubPath,
    NotFound,
    StorageError,
    is_hub,
    is_offline,
    with_scheme,
)

# Set these variables before any library imports huggingface_hub, which reads them only then.
# Downloads by Xet are disabled because they have no timeouts.
os.environ['HF_HUB_DISABLE_XET'] = '1'
os.environ['HF_HUB_DISABLE_TELEMETRY'] = '1'
os.environ.setdefault('HF_HUB_VERBOSITY', 'error')

ANSWER_TIMEOUT = 8  # seconds to wait for the hub's first answer
CONFIGS = ('config.json', 'adapter_config.json')  # every model has at least one of these files
SMALL_FILES = ('*.json', '*.txt', '*.jinja', '*.model')
WEIGHTS = 'model*.safetensors'
IN_FOLDERS = '*/*'  # files in folders such as onnx/, which other programs need, are not downloaded


def pinned(name: str, *, ask: bool = True) -> str:
    """Download a file, or a model without its weights; return an hf:// path that names the commit.

    ask: False to use the cached commit, without asking the hub.
    """
    hub = HubPath(with_scheme(name))
    try:
        copy = fetched(hub.path, only_cached=not ask)
    except StorageError as e:
        if is_hub(name):
            raise
        raise StorageError(f'there is no directory {name}, and no model was found: {e}') from e
    directory = copy.removesuffix(f'/{hub.name}') if hub.name else copy
    return hub.at(os.path.basename(directory))  # the hub's cache names directories after commits


def is_here(path: str) -> bool:
    """Return whether a file, or a model's config, is in the hub's cache."""
    hub = HubPath(path)
    names = (hub.name,) if hub.name else CONFIGS
    return any(isinstance(_in_cache(hub, name), str) for name in names)


def _in_cache(hub: HubPath, name: str) -> Any:
    """Return a cached file's path, None if it is not cached, or a marker if the hub lacks it."""
    from huggingface_hub import try_to_load_from_cache

    return try_to_load_from_cache(hub.repository, name, revision=hub.revision, repo_type=hub.kind)


@functools.cache  # within one process, a branch always means the same commit
def fetched(path: str, *, with_weights: bool = False, only_cached: bool = False) -> str:
    """Download a file or a model's directory from the hub if needed; return the local path."""
    from huggingface_hub import errors, hf_hub_download, snapshot_download

    hub = HubPath(path)
    # A commit never changes: do not ask the hub again for a file that the commit lacks.
    if hub.is_commit and hub.name and not isinstance(_in_cache(hub, hub.name), str | None):
        raise hub.error('the repository has no such file', NotFound)
    problem = None if only_cached else hub_problem()
    source: dict[str, Any] = {
        'repo_type': hub.kind,
        'revision': hub.revision,
        'local_files_only': only_cached or problem is not None,
    }
    try:
        if hub.name:
            return hf_hub_download(hub.repository, hub.name, **source)
        patterns = [*SMALL_FILES, WEIGHTS] if with_weights else [*SMALL_FILES]
        return snapshot_download(
            hub.repository, allow_patterns=patterns, ignore_patterns=IN_FOLDERS, **source
        )
    except errors.LocalEntryNotFoundError as e:
        reason = problem or e.__cause__ or e
        raise hub.error(f'the path is not in the cache, and {reason}', NotFound) from e
    except errors.EntryNotFoundError as e:
        raise hub.error(f'the repository has no such file: {e}', NotFound) from e
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as e:
        # A gated model exists, but the user has not accepted its terms.
        kind = StorageError if isinstance(e, errors.GatedRepoError) else NotFound
        raise hub.error(f'{e} (private or gated: set HF_TOKEN to your token)', kind) from e
    except Exception as e:  # libraries of the hub raise many types of errors
        raise hub.error(f'the download from the hub fails: {e}') from e


@functools.cache
def hub_problem() -> str | None:
    """Return the reason why this process uses only the cache; None if the hub answers.

    The hub is asked once, with a deadline: its library would wait for a silent hub for minutes.
    """
    from huggingface_hub import constants, get_session

    if is_offline():
        return 'LMHP_OFFLINE=1'
    try:
        get_session().head(constants.ENDPOINT, timeout=ANSWER_TIMEOUT)
        return None
    except Exception as e:  # libraries of the hub raise many types of errors
        reason = f'the hub cannot be reached: {e}'
    print(f'note: {reason}; its cache is used', file=sys.stderr)
    return reason
