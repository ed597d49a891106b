"""Models and data sets of the Hugging Face hub, fetched by its library into its cache.

Pickles and code are never fetched with a model. If the hub cannot be reached, the cache is used.
"""

import functools
import os
import sys
from typing import Any

from lm_human_preferences.storage import blobs
from lm_human_preferences.storage.paths import (
    HUB,
    HubPath,
    NotFound,
    StorageError,
    is_hub,
    is_model_name,
    is_offline,
)

# huggingface_hub reads these variables when it is imported, perhaps by transformers. Downloads by
# Xet have no timeouts.
os.environ['HF_HUB_DISABLE_XET'] = '1'
os.environ['HF_HUB_DISABLE_TELEMETRY'] = '1'
os.environ.setdefault('HF_HUB_VERBOSITY', 'error')

CONFIGS = ('config.json', 'adapter_config.json')  # every model has one of these
SMALL_FILES = ('*.json', '*.txt', '*.jinja', '*.model')
WEIGHTS = 'model*.safetensors'
IN_FOLDERS = '*/*'  # files in folders, such as onnx/, are for other programs


def model_path(name: str) -> str | None:
    """Return the hf:// path of a model of the hub; None for other names and local paths."""
    if is_hub(name):
        hub = HubPath(name)
        if hub.kind != 'model' or hub.name:
            raise hub.error('this is not a model: give hf://ORG/NAME')
        return name
    return HUB + name if is_model_name(name) and not os.path.lexists(name) else None


def pinned(name: str, *, ask: bool = True) -> str:
    """Fetch a file, or a model without its weights, and return its path with the commit.

    ask: False to take the commit that is in the cache, without asking the hub.
    """
    hub = HubPath(_with_scheme(name))
    try:
        copy = _fetched(hub.url, only_cached=not ask)
    except StorageError as e:
        if is_hub(name):
            raise
        raise StorageError(f'no such directory: {name}; as a model of the hub, {e}') from e
    if not hub.name and not any(os.path.exists(os.path.join(copy, name)) for name in CONFIGS):
        raise hub.error(f'it has no {" or ".join(CONFIGS)}, so it is not a model of transformers')
    directory = copy.removesuffix(f'/{hub.name}') if hub.name else copy
    return hub.at(os.path.basename(directory))  # its name is the commit


def is_pin_of(recorded: Any, given: Any) -> bool:
    """Return whether `recorded` is the path `given` with a commit in place of a branch or tag."""
    try:
        before, now = (HubPath(_with_scheme(name)) for name in (recorded, given))
    except (StorageError, TypeError):
        return False
    is_same = now.at(before.revision) == before.at(before.revision)
    return is_same and before.is_commit and not now.is_commit


def _with_scheme(name: str) -> str:
    return HUB + name if is_model_name(name) else name


def cached_path(path: str) -> str:
    """Return the local copy of a file of the hub, fetched if need be."""
    hub = HubPath(path)
    if not hub.name:
        raise hub.error('this is the path of a model, not of a file: add /FILE')
    return _fetched(path)


def is_here(path: str) -> bool:
    """Return whether a file, or the config of a model, can be read without the network."""
    hub = HubPath(path)
    names = (hub.name,) if hub.name else CONFIGS
    return any(isinstance(_in_cache(hub, name), str) for name in names)


def _in_cache(hub: HubPath, name: str) -> Any:
    """Return the path of a cached file; None if unknown, an object if the hub has no such file."""
    from huggingface_hub import try_to_load_from_cache

    return try_to_load_from_cache(hub.repository, name, revision=hub.revision, repo_type=hub.kind)


def cached_directory(path: str) -> str:
    """Return the local directory of a model; if it is on the hub, fetch it with its weights."""
    return _fetched(path, with_weights=True) if is_hub(path) else path


@functools.cache  # so that a branch means the same commit as long as this process runs
def _fetched(path: str, *, with_weights: bool = False, only_cached: bool = False) -> str:
    """Return the local copy of a file, or a model's directory with its SMALL_FILES."""
    from huggingface_hub import errors, hf_hub_download, snapshot_download

    hub = HubPath(path)
    if hub.is_commit and hub.name:  # a commit never changes: the hub is asked only once
        copy = _in_cache(hub, hub.name)
        if isinstance(copy, str):
            return copy
        if copy is not None:
            raise hub.error('no such file', NotFound)
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
        raise hub.error(f'not in the cache, and {problem or e.__cause__ or e}', NotFound) from e
    except errors.GatedRepoError as e:  # the user has not accepted its terms
        raise hub.error(f'{e} (put your token into HF_TOKEN)') from e
    except (
        errors.RepositoryNotFoundError,  # also one that is private
        errors.RevisionNotFoundError,
        errors.EntryNotFoundError,
    ) as e:
        raise hub.error(f'{e} (a private one needs your token in HF_TOKEN)', NotFound) from e
    except Exception as e:  # any of four libraries may have raised it
        raise hub.error(f'the hub: {e}') from e


@functools.cache
def hub_problem() -> str | None:
    """Return why this process uses only the cache; None if the hub answers.

    The hub is asked once, with a deadline: its library would wait for a silent hub without end.
    """
    from huggingface_hub import constants, get_session

    if is_offline():
        return 'LMHP_OFFLINE=1'
    try:
        blobs.first_answer(lambda: get_session().head(constants.ENDPOINT), 'the hub')
        return None
    except TimeoutError:
        reason = f'the hub gives no answer within {blobs.ANSWER_TIMEOUT} s, is there a network?'
    except Exception as e:  # any of four libraries may have raised it
        reason = f'the hub cannot be reached: {e}'
    print(f'note: {reason}; its cache is used', file=sys.stderr)
    return reason
