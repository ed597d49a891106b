"""Models and data sets of the Hugging Face hub, by its library and in its cache.

Pickles and code are never fetched. If the hub cannot be reached, the library uses its cache.
"""

import contextlib
import errno
import functools
import os
import sys
from collections.abc import Iterator
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

# huggingface_hub reads these when it is imported, which may be by transformers. Its downloads by
# Xet have no timeouts.
os.environ['HF_HUB_DISABLE_XET'] = '1'
os.environ['HF_HUB_DISABLE_TELEMETRY'] = '1'
os.environ.setdefault('HF_HUB_VERBOSITY', 'error')

CONFIG = 'config.json'
SMALL_FILES = ('*.json', 'tokenizer*', 'merges.txt', 'vocab*', '*.jinja')
WEIGHTS = 'model*.safetensors'
NEVER = ['*/*', '*.bin', '*.pt', '*.pkl', '*.py']  # '*/*': nothing in folders, such as onnx/
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)


def model_path(name: str) -> str | None:
    """Return the hf:// path of a model of the hub; None for other names and local paths."""
    if is_hub(name):
        hub = HubPath(name)
        if hub.kind != 'model' or hub.name:
            raise hub.error('this is not a model: give hf://ORG/NAME')
        return name
    return HUB + name if is_model_name(name) and not os.path.lexists(name) else None


def pinned(name: str, *, ask: bool = True) -> str:
    """Return the path of a model or a file with its commit; what it names is fetched.

    Of a model, weights are not fetched. ask: False takes the commit that is in the cache.
    """
    hub = HubPath(_with_scheme(name))
    try:
        copy = _fetched(hub.url, only_cached=not ask)
    except StorageError as e:
        if is_hub(name):
            raise
        raise StorageError(f'no such directory: {name}; as a model of the hub, {e}') from e
    if not hub.name and not os.path.exists(os.path.join(copy, CONFIG)):
        raise hub.error(f'it has no {CONFIG}, so it is not a model of transformers')
    directory = copy.removesuffix(f'/{hub.name}') if hub.name else copy
    return hub.at(os.path.basename(directory))  # which the library calls by the commit


def is_pin_of(recorded: Any, given: Any) -> bool:
    """Return whether `recorded` is a commit of the path `given`, which names a branch or a tag."""
    try:
        before, now = (HubPath(_with_scheme(name)) for name in (recorded, given))
    except (StorageError, TypeError):
        return False
    is_same_file = (before.kind, before.repository, before.name) == (
        now.kind,
        now.repository,
        now.name,
    )
    return is_same_file and before.is_commit and not now.is_commit


def _with_scheme(name: str) -> str:
    return HUB + name if is_model_name(name) else name


def cached_path(path: str) -> str:
    """Return the local copy of a file of the hub, fetched if need be."""
    hub = HubPath(path)
    if not hub.name:
        raise hub.error('this is the path of a model, not of a file: add /FILE')
    return _fetched(path)


def exists(path: str) -> bool:
    """Return whether the hub has a file, which is fetched; without a network, the cache."""
    try:
        cached_path(path)
    except NotFound:
        return False
    return True


def is_here(path: str) -> bool:
    """Return whether a file, or the description of a model, can be read without the network."""
    return isinstance(_in_cache(HubPath(path)), str)


def cached_directory(path: str) -> str:
    """Return the local directory of a model with its weights; one of the hub is fetched."""
    return _fetched(path, (*SMALL_FILES, WEIGHTS)) if is_hub(path) else path


@functools.cache
def hub_problem() -> str | None:
    """Return why this process uses only the cache; None if the hub answers.

    Asked once, with a deadline: the library tries for minutes to reach a hub that is silent.
    """
    library = _library()
    if is_offline():
        return 'LMHP_OFFLINE=1'
    if library.is_offline_mode():
        return 'HF_HUB_OFFLINE=1'
    endpoint = library.constants.ENDPOINT
    try:
        blobs.first_answer(lambda: library.get_session().head(endpoint), 'the hub')
        return None
    except TimeoutError:
        reason = f'the hub gives no answer within {blobs.ANSWER_TIMEOUT} s, is there a network?'
    except Exception as e:  # an error of any of four libraries
        reason = f'the hub cannot be reached: {_first_line(e)}'
    print(f'note: {reason}; its cache is used', file=sys.stderr)
    return reason


@functools.cache  # a branch that moves while this process runs is not followed
def _fetched(
    path: str, patterns: tuple[str, ...] = SMALL_FILES, *, only_cached: bool = False
) -> str:
    """Return the local copy of a file, or a model's directory with what matches `patterns`."""
    hub = HubPath(path)
    library = _library()
    if hub.is_commit and hub.name:
        copy = _in_cache(hub)
        if isinstance(copy, str):
            return copy
        if copy is not None:  # the hub has been asked, and said that there is none
            raise hub.error('no such file', NotFound)
    source: dict[str, Any] = {
        'repo_type': hub.kind,
        'revision': hub.revision,
        'local_files_only': only_cached or hub_problem() is not None,
    }
    with _explained(hub):
        if hub.name:
            return library.hf_hub_download(hub.repository, hub.name, **source)
        return library.snapshot_download(
            hub.repository, allow_patterns=[*patterns], ignore_patterns=NEVER, **source
        )


def _in_cache(hub: HubPath) -> Any:
    """Return the path of a copy in the cache; None, or a mark of what the hub lacks, if none."""
    return _library().try_to_load_from_cache(
        hub.repository, hub.name or CONFIG, revision=hub.revision, repo_type=hub.kind
    )


def _library() -> Any:
    """Import huggingface_hub, for which no start of the program waits."""
    import huggingface_hub

    return huggingface_hub


@contextlib.contextmanager
def _explained(hub: HubPath) -> Iterator[None]:
    """Raise errors of huggingface_hub, and of the libraries that it uses, as StorageErrors."""
    from huggingface_hub import constants, errors

    what = 'model' if hub.kind == 'model' else 'data set'
    try:
        yield
    except errors.GatedRepoError as e:
        page = f'{constants.ENDPOINT}/{"" if what == "model" else "datasets/"}{hub.repository}'
        reason = f'this {what} is gated: accept its terms at {page}, and set HF_TOKEN to your token'
        raise hub.error(reason) from e
    except errors.RepositoryNotFoundError as e:
        reason = f'the hub has no such {what}, or it is private: then set HF_TOKEN to your token'
        raise hub.error(reason, NotFound) from e
    except errors.RevisionNotFoundError as e:
        raise hub.error(f'this {what} has no revision {hub.revision}', NotFound) from e
    except errors.LocalEntryNotFoundError as e:
        reason = hub_problem() or _first_line(e)
        raise hub.error(f'not in the cache, and {reason}', NotFound) from e
    except errors.EntryNotFoundError as e:
        raise hub.error('no such file', NotFound) from e
    except Exception as e:
        if isinstance(e, OSError) and e.errno in UNWRITABLE:
            folder = constants.HF_HUB_CACHE
            reason = f'{folder} cannot be written ({e.strerror}): HF_HOME moves it'
            raise hub.error(reason) from e
        if isinstance(e, ValueError):
            reason = 'the answer is not from a hub (a log-in page of the network?)'
            raise hub.error(reason) from e
        raise hub.error(f'the hub: {_first_line(e)}') from e


def _first_line(e: BaseException) -> str:
    """Return the first line of the error behind `e`."""
    cause = e.__cause__ or e
    return (str(cause).splitlines() or [type(cause).__name__])[0]
