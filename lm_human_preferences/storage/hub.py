"""Models and data sets of the Hugging Face hub as files on this machine.

Of a model, weights in safetensors, JSON and the tokeniser's files are fetched, and no other: no
pickles, no code.

All is kept by huggingface_hub in its own cache, so HF_HOME, HF_TOKEN, HF_ENDPOINT and
HF_HUB_OFFLINE mean what they mean everywhere; LMHP_OFFLINE=1 forbids the network here as well. A
revision that is a commit is read without a question to the hub once its files are there. About a
branch or a tag the hub is asked once in a process; where it does not answer, what the cache has of
it is used, and a line says so.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from typing import Any

from lm_human_preferences.storage import hub_client
from lm_human_preferences.storage.hub_client import Unreachable, api, explained, library
from lm_human_preferences.storage.paths import (
    HUB,
    HubPath,
    NotFound,
    StorageError,
    is_hub,
    is_model_name,
)

CONFIG = 'config.json'
SMALL_FILES = ('*.json', 'tokenizer*', 'merges.txt', 'vocab*', '*.jinja')
NEVER = ('*/*', '*.bin', '*.pt', '*.pkl', '*.py')  # '*/*': nothing in folders, such as onnx/
OTHER_WEIGHTS = ('.bin', '.pt', '.pth', '.pkl', '.h5', '.msgpack', '.gguf')

# What this process has been told, {HubPath.key: commit}: a branch that moves meanwhile does not.
_commits: dict[tuple[str, str, str], str] = {}


# ---------------------------------------------------------------- names


def model_path(name: str) -> str | None:
    """The hf:// path of a model called ORG/NAME, ORG/NAME@REVISION or hf://...

    None for any other name, and for that of a local file or directory. StorageError for an hf://
    path of something else.
    """
    if is_hub(name):
        hub = HubPath(name)
        if hub.kind != 'model' or hub.name:
            raise hub.error('this is no model: give hf://ORG/NAME')
        return name
    return HUB + name if is_model_name(name) and not os.path.lexists(name) else None


def pinned(name: str, *, ask: bool = True) -> str:
    """The hf:// path with the commit that its revision means; the small files of a model are
    fetched.

    name: an hf:// path, or that of a model as model_path takes it. ask: False for what it meant
    when it was fetched. StorageError for a model that cannot be read.
    """
    hub = HubPath(_with_scheme(name))
    try:
        commit = _commit(hub, ask=ask)
        if not hub.name:
            _small_files(hub, commit)
    except StorageError as e:
        if is_hub(name):
            raise
        raise StorageError(f'there is no directory {name}; as a model of the hub, {e}') from e
    return hub.at(commit)


def is_pin_of(recorded: Any, given: Any) -> bool:
    """Whether `recorded` is the path, or the name of a model, that `given` was pinned to.

    A branch or a tag may have meant any commit; another commit is another version.
    """
    try:
        before, now = (HubPath(_with_scheme(name)) for name in (recorded, given))
    except (StorageError, TypeError):
        return False
    is_same_file = before.key[:2] == now.key[:2] and before.name == now.name
    return is_same_file and before.is_commit and not now.is_commit


def _with_scheme(name: str) -> str:
    return HUB + name if is_model_name(name) else name


# ---------------------------------------------------------------- files


def cached_path(path: str) -> str:
    """The path of the copy of a file of the hub, fetched if need be; errors as storage's."""
    hub = HubPath(path)
    if not hub.name:
        raise hub.error('this is a model, where a file is wanted: add /FILE')
    commit = _commit(hub)
    copy = _copy(hub, commit)
    if copy is None:
        _fetch_file(hub, commit)
        copy = _copy(hub, commit)
        assert copy is not None
    return copy


def exists(path: str) -> bool:
    """Whether the hub has a file; if it cannot be asked, whether the cache has it."""
    hub = HubPath(path)
    if hub_client.is_forbidden():
        return is_here(path)
    try:
        commit = _commit(hub)
    except NotFound:
        return False
    listing = _listing(hub, commit)
    if listing is not None:
        return hub.name in listing
    if _copy(hub, commit) is not None:
        return True
    try:
        hub_client.require(hub)
        with explained(hub):
            return api().file_exists(hub.repository, hub.name, revision=commit, repo_type=hub.kind)
    except NotFound:
        return False
    except Unreachable as e:
        _note(e)
        return False


def is_here(path: str) -> bool:
    """Whether a file, or what describes a model, can be read without the network."""
    hub = HubPath(path)
    commit = _known_commit(hub)
    return commit is not None and _copy(hub, commit) is not None


def _fetch_file(hub: HubPath, commit: str) -> None:
    listing = _listing(hub, commit)
    if listing is not None and hub.name not in listing:
        raise hub.error('there is no such file', NotFound)
    hub_client.require(hub)
    with explained(hub):
        url = library().hf_hub_url(hub.repository, hub.name, repo_type=hub.kind, revision=commit)
        size = library().get_hf_file_metadata(url).size
    hub_client.download(hub, commit, {hub.name: size or 0})


def _copy(hub: HubPath, commit: str) -> str | None:
    """The path of the copy of a file, or of a model's config.json; None if there is none."""
    copy = library().try_to_load_from_cache(
        hub.repository, hub.name or CONFIG, revision=commit, repo_type=hub.kind
    )
    return copy if isinstance(copy, str) else None


# ---------------------------------------------------------------- models


def cached_directory(path: str) -> str:
    """The local directory with the files of a model of the hub, weights too, fetched if need be.

    Any other path is returned as it is.
    """
    if not is_hub(path):
        return path
    hub = HubPath(path)
    commit = _commit(hub)
    directory = _small_files(hub, commit)
    listing = _listing(hub, commit) or {}
    missing = {
        name: size
        for name, size in listing.items()
        if _is_weights(name) and not os.path.exists(os.path.join(directory, name))
    }
    if missing:
        hub_client.require(hub)
        hub_client.download(hub, commit, missing)
    return directory


def _small_files(hub: HubPath, commit: str) -> str:
    """The directory with what is wanted of a model but its weights, fetched if need be."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    problem = None
    # Nobody can tell without a listing whether all of the files are there.
    if _listing(hub, commit) is None:
        try:
            hub_client.require(hub)
            _fetch_small_files(hub, commit)
        except Unreachable as e:
            problem = e
    _check_files(hub, _listing(hub, commit))
    try:
        return _snapshot(hub, commit, local_files_only=True)
    except LocalEntryNotFoundError:
        if problem is not None:
            raise problem from None
    hub_client.require(hub)
    return _fetch_small_files(hub, commit)


def _fetch_small_files(hub: HubPath, commit: str) -> str:
    with explained(hub):
        return _snapshot(hub, commit, local_files_only=False)


def _snapshot(hub: HubPath, commit: str, *, local_files_only: bool) -> str:
    """The directory of a commit; LocalEntryNotFoundError for files that may not be fetched."""
    return library().snapshot_download(
        hub.repository,
        revision=commit,
        allow_patterns=list(SMALL_FILES),
        ignore_patterns=list(NEVER),
        local_files_only=local_files_only,
    )


def _check_files(hub: HubPath, names: Iterable[str] | None) -> None:
    """StorageError unless a model with these files can be read; None: they are not known."""
    if names is None:
        return
    if CONFIG not in names:
        raise hub.error(f'it has no {CONFIG}, so it is no model of transformers')
    if not any(map(_is_weights, names)):
        others = [name for name in names if name.endswith(OTHER_WEIGHTS)]
        found = f' but {others[0]}' if others else ''
        raise hub.error(
            f'it has no model.safetensors{found}: pickles and other formats are not read; give a'
            ' model that save_pretrained has written'
        )


def _is_weights(name: str) -> bool:
    """Whether a file of a model holds weights that are read: all of them, or a part."""
    return re.fullmatch(r'model[^/]*\.safetensors', name) is not None


def _listing(hub: HubPath, commit: str) -> dict[str, int] | None:
    """{file: bytes} of what there is at a commit; None where the cache does not know."""
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        files = library().get_cached_repo_tree(hub.repository, revision=commit, repo_type=hub.kind)
    except CachedRepoTreeNotFoundError:
        return None
    return {file.path: file.size for file in files}


# ---------------------------------------------------------------- commits


def _commit(hub: HubPath, *, ask: bool = True) -> str:
    """The commit that a revision means: what the hub says, else what it was when last fetched.

    ask: False for the latter.
    """
    if hub.is_commit:
        return hub.revision
    if hub.key not in _commits:
        commit = _known_commit(hub)
        try:
            if ask or commit is None:
                hub_client.require(hub)
                with explained(hub):
                    commit = _resolve(hub)
        except Unreachable as e:
            if commit is None:
                raise
            if not hub_client.is_forbidden():
                _note(e)
        _commits[hub.key] = commit
    return _commits[hub.key]


def _known_commit(hub: HubPath) -> str | None:
    """The commit that a revision means, as this process or the cache knows."""
    from huggingface_hub.errors import RevisionResolutionError

    if hub.is_commit:
        return hub.revision
    try:
        return _commits.get(hub.key) or _resolve(hub, local_files_only=True)
    except RevisionResolutionError:
        return None


def _resolve(hub: HubPath, *, local_files_only: bool = False) -> str:
    revision = api().resolve_revision(
        hub.repository,
        revision=hub.revision,
        repo_type=hub.kind,
        local_files_only=local_files_only,
    )
    return revision.resolved


def _note(e: Unreachable) -> None:
    print(f'note: {e}; going on with what the cache has', file=sys.stderr)
