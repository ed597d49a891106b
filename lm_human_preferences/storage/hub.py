"""Models and data sets of the Hugging Face hub, in its library's cache; no pickles, no code.

About a branch or a tag the hub is asked once in a process, about a cached commit never; if it does
not answer, the cached version is used, and a line says so.
"""

import contextlib
import errno
import functools
import os
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

from lm_human_preferences.storage import blobs
from lm_human_preferences.storage.files import free_bytes
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
WEIGHTS = re.compile(r'(adapter_)?model[^/]*\.safetensors')
SMALL_FILES = ['*.json', 'tokenizer*', 'merges.txt', 'vocab*', '*.jinja']
NEVER = ['*/*', '*.bin', '*.pt', '*.pkl', '*.py']  # '*/*': nothing in folders, such as onnx/
OTHER_WEIGHTS = ('.bin', '.pt', '.pth', '.pkl', '.h5', '.msgpack', '.gguf')
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)

# {HubPath.key: commit} as this process resolved it: a branch that moves meanwhile does not.
_commits: dict[tuple[str, str, str], str] = {}
# Values of HubPath.key that the hub has answered about in this process.
_answered: set[tuple[str, str, str]] = set()


class Unreachable(StorageError):
    """Error: the hub gives no usable answer; a cached version may do."""


def model_path(name: str) -> str | None:
    """Return the hf:// path of a model of the hub; None for other names and local paths."""
    if is_hub(name):
        hub = HubPath(name)
        if hub.kind != 'model' or hub.name:
            raise hub.error('this is not a model: give hf://ORG/NAME')
        return name
    return HUB + name if is_model_name(name) and not os.path.lexists(name) else None


def pinned(name: str, *, ask: bool = True) -> str:
    """Fetch a model's small files; return its path with the commit (ask: False: the cached one)."""
    hub = HubPath(_with_scheme(name))
    try:
        commit = _commit(hub, ask=ask)
        if not hub.name:
            _small_files(hub, commit)
    except StorageError as e:
        if is_hub(name):
            raise
        raise StorageError(f'no such directory: {name}; as a model of the hub, {e}') from e
    return hub.at(commit)


def is_pin_of(recorded: Any, given: Any) -> bool:
    """Return whether `recorded` is a commit of the path `given`, which names a branch or a tag."""
    try:
        before, now = (HubPath(_with_scheme(name)) for name in (recorded, given))
    except (StorageError, TypeError):
        return False
    is_same_file = before.key[:2] == now.key[:2] and before.name == now.name
    return is_same_file and before.is_commit and not now.is_commit


def _with_scheme(name: str) -> str:
    return HUB + name if is_model_name(name) else name


def cached_path(path: str) -> str:
    """Return the local copy of a file of the hub, fetched if need be."""
    hub = HubPath(path)
    if not hub.name:
        raise hub.error('this is the path of a model, not of a file: add /FILE')
    commit = _commit(hub)
    copy = _copy(hub, commit)
    if copy is not None:
        return copy
    files = _listing(hub, commit)
    if files is not None and hub.name not in files:
        raise hub.error('no such file', NotFound)
    _require(hub)
    with _explained(hub):
        return _library().hf_hub_download(
            hub.repository, hub.name, revision=commit, repo_type=hub.kind
        )


def exists(path: str) -> bool:
    """Return whether the hub has a file; if it cannot be asked, whether the cache has it."""
    if _is_forbidden():
        return is_here(path)
    hub = HubPath(path)
    try:
        commit = _commit(hub)
    except NotFound:
        return False
    files = _listing(hub, commit)
    if files is not None:
        return hub.name in files
    if _copy(hub, commit) is not None:
        return True
    try:
        _require(hub)
        with _explained(hub):
            api = _library().HfApi()
            return api.file_exists(hub.repository, hub.name, revision=commit, repo_type=hub.kind)
    except Unreachable as e:
        _note(e)
        return False


def is_here(path: str) -> bool:
    """Return whether a file, or the description of a model, can be read without the network."""
    hub = HubPath(path)
    commit = _known_commit(hub)
    return commit is not None and _copy(hub, commit) is not None


def _copy(hub: HubPath, commit: str) -> str | None:
    """Return the local copy of a file, or of a model's config.json; None if there is none."""
    copy = _library().try_to_load_from_cache(
        hub.repository, hub.name or CONFIG, revision=commit, repo_type=hub.kind
    )
    return copy if isinstance(copy, str) else None


def cached_directory(path: str) -> str:
    """Return the local directory of a model; one of the hub is fetched as far as needed."""
    if not is_hub(path):
        return path
    hub = HubPath(path)
    commit = _commit(hub)
    directory = _small_files(hub, commit)
    missing = 0
    for name, size in (_listing(hub, commit) or {}).items():
        if WEIGHTS.fullmatch(name) and not os.path.exists(os.path.join(directory, name)):
            missing += size
    folder = _library().constants.HF_HUB_CACHE
    if free_bytes(folder) < missing:
        raise hub.error(
            f'no room for its {missing / 2**20:.0f} MiB in {folder}, which HF_HOME moves'
        )
    return _snapshot(hub, commit, ['model*.safetensors']) if missing else directory


def _small_files(hub: HubPath, commit: str) -> str:
    """Return the directory of a model, weights apart; StorageError unless it can be read."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    if _listing(hub, commit) is None:  # then nobody can say whether all files are there
        with contextlib.suppress(Unreachable):
            _snapshot(hub, commit)
    files = _listing(hub, commit)
    if files is not None and CONFIG not in files:
        raise hub.error(f'it has no {CONFIG}, so it is not a model of transformers')
    if files is not None and not any(map(WEIGHTS.fullmatch, files)):
        others = [name for name in files if name.endswith(OTHER_WEIGHTS)]
        found = f' but {others[0]}' if others else ''
        raise hub.error(
            f'it has no model.safetensors{found}: pickles and other formats are not read; give a'
            ' model that save_pretrained has written'
        )
    with contextlib.suppress(LocalEntryNotFoundError):
        return _snapshot(hub, commit, local_files_only=True)
    return _snapshot(hub, commit)


def _snapshot(
    hub: HubPath, commit: str, patterns: list[str] = SMALL_FILES, *, local_files_only: bool = False
) -> str:
    """Return the directory; LocalEntryNotFoundError for files that may not be fetched."""
    if not local_files_only:
        _require(hub)
    with contextlib.nullcontext() if local_files_only else _explained(hub):
        return _library().snapshot_download(
            hub.repository,
            revision=commit,
            allow_patterns=patterns,
            ignore_patterns=NEVER,
            local_files_only=local_files_only,
        )


def _listing(hub: HubPath, commit: str) -> dict[str, int] | None:
    """Return {file: bytes} of a commit; None if the cache does not know."""
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        files = _library().get_cached_repo_tree(hub.repository, revision=commit, repo_type=hub.kind)
    except CachedRepoTreeNotFoundError:
        return None
    return {file.path: file.size for file in files}


def _commit(hub: HubPath, *, ask: bool = True) -> str:
    """Return the commit of a revision as the hub says or, unless `ask`, when last fetched."""
    if hub.is_commit:
        return hub.revision
    if hub.key not in _commits:
        commit = _known_commit(hub)
        try:
            if ask or commit is None:
                _require(hub)
                with _explained(hub):
                    commit = _resolve(hub)
        except Unreachable as e:
            if commit is None:
                raise
            if not _is_forbidden():
                _note(e)
        _commits[hub.key] = commit
    return _commits[hub.key]


def _known_commit(hub: HubPath) -> str | None:
    """Return the commit of a revision as this process or the cache knows it."""
    from huggingface_hub.errors import RevisionResolutionError

    if hub.is_commit:
        return hub.revision
    try:
        return _commits.get(hub.key) or _resolve(hub, local_files_only=True)
    except RevisionResolutionError:
        return None


def _resolve(hub: HubPath, *, local_files_only: bool = False) -> str:
    api = _library().HfApi()
    revision = api.resolve_revision(
        hub.repository,
        revision=hub.revision,
        repo_type=hub.kind,
        local_files_only=local_files_only,
    )
    return revision.resolved


def _note(e: Unreachable) -> None:
    print(f'note: {e}; going on with what the cache has', file=sys.stderr)


def is_reachable() -> bool:
    """Return whether the hub answers; False if the user forbids to ask. StorageError if not."""
    if _is_forbidden():
        return False
    with contextlib.suppress(NotFound):  # a mirror need not have everything
        _require(HubPath(f'{HUB}openai-community/gpt2'))
    return True


def _library() -> Any:
    """Import huggingface_hub, for which no start of the program waits."""
    import huggingface_hub

    huggingface_hub.get_session().timeout = blobs.READ_TIMEOUT  # some questions would have none
    return huggingface_hub


def _is_forbidden() -> bool:
    return is_offline() or _library().is_offline_mode()


def _require(hub: HubPath) -> None:
    """Ask about a repository once, before all else: only this question has a deadline."""
    if _is_forbidden():
        variable = 'LMHP_OFFLINE' if is_offline() else 'HF_HUB_OFFLINE'
        raise hub.error(f'not in the cache, and {variable}=1', Unreachable)
    if hub.key in _answered:
        return
    endpoint = _library().constants.ENDPOINT
    until, reason = blobs.unreachable.get(endpoint, (0, ''))
    if time.monotonic() < until:
        raise hub.error(reason, Unreachable)

    ask = functools.partial(
        _library().HfApi().repo_info, hub.repository, revision=hub.revision, repo_type=hub.kind
    )
    try:
        with _explained(hub):
            blobs.first_answer(lambda: ask(timeout=blobs.READ_TIMEOUT), 'the hub')
    except Unreachable as e:
        blobs.unreachable[endpoint] = (time.monotonic() + blobs.UNREACHABLE_SECONDS, e.reason)
        raise
    _answered.add(hub.key)


@contextlib.contextmanager
def _explained(hub: HubPath) -> Iterator[None]:
    """Raise the errors of huggingface_hub as StorageErrors."""
    try:
        yield
    except StorageError:
        raise
    except Exception as e:  # those of four libraries, and what they make of a strange answer
        reason, kind = _meaning(hub, e)
        raise hub.error(reason, kind) from e


def _meaning(hub: HubPath, e: Exception) -> tuple[str, type[StorageError]]:
    """Return the reason to show for an error, and the class of ours."""
    from huggingface_hub import constants, errors

    what = 'model' if hub.kind == 'model' else 'data set'
    token = 'set HF_TOKEN to a token'
    status = getattr(getattr(e, 'response', None), 'status_code', None)
    if isinstance(e, errors.GatedRepoError):
        page = f'{constants.ENDPOINT}/{"" if what == "model" else "datasets/"}{hub.repository}'
        reason = f'this {what} is gated: accept its terms at {page}, and {token} of your account'
        return reason, StorageError
    if isinstance(e, errors.RepositoryNotFoundError):
        reason = f'the hub has no such {what}, or it is private: then {token} that may read it'
        return reason, NotFound
    if isinstance(e, errors.RevisionNotFoundError):
        return f'this {what} has no revision {hub.revision}', NotFound
    if isinstance(e, errors.RemoteEntryNotFoundError):
        return 'no such file', NotFound
    if status in (401, 403):
        return f'the hub refuses it (HTTP {status}): {token} that may read it', StorageError
    if status is not None:
        return f'the hub answers with HTTP {status}', Unreachable
    if type(e) is TimeoutError:
        return f'no answer within {blobs.ANSWER_TIMEOUT} s, is there a network?', Unreachable
    if isinstance(e, OSError) and e.errno in UNWRITABLE:
        reason = f'{constants.HF_HUB_CACHE} cannot be written ({e.strerror}): HF_HOME moves it'
        return reason, StorageError
    if isinstance(e, (ValueError, KeyError, TypeError, AssertionError)):
        return 'the answer is not from a hub (a log-in page of the network?)', Unreachable
    cause = e.__cause__ or e
    return (str(cause).splitlines() or [type(cause).__name__])[0], Unreachable
