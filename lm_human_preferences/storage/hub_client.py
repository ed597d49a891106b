"""The Hugging Face hub itself: asking it, fetching files, and what its errors mean.

This module and hub.py alone import huggingface_hub, when something of the hub is wanted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from typing import Any

from lm_human_preferences.storage import blobs
from lm_human_preferences.storage.paths import HUB, HubPath, NotFound, StorageError, is_offline

# huggingface_hub reads these when it is imported, which may be by transformers. What it fetches by
# Xet has no timeouts; its progress bars and its log would come beside ours.
os.environ['HF_HUB_DISABLE_XET'] = '1'
os.environ['HF_HUB_DISABLE_TELEMETRY'] = '1'
os.environ['HF_HUB_DISABLE_PROGRESS_BARS'] = '1'
os.environ.setdefault('HF_HUB_VERBOSITY', 'error')

NO_PROGRESS_BELOW = 1 << 22  # bytes: such a download is over before a progress bar is read

# What the hub has answered about in this process: values of HubPath.key.
_answered: set[tuple[str, str, str]] = set()
# endpoint -> (time until which it is not asked again, reason)
_unreachable: dict[str, tuple[float, str]] = {}


class Unreachable(StorageError):
    """The hub gives no answer, or none that can be used: what the cache has may do."""


def library() -> Any:
    """huggingface_hub, for which no start of the program waits."""
    import huggingface_hub

    huggingface_hub.get_session().timeout = blobs.READ_TIMEOUT  # some questions would have none
    return huggingface_hub


def api() -> Any:
    """The questions that huggingface_hub can ask."""
    return library().HfApi()


def is_forbidden() -> bool:
    """Whether the user forbids to ask the hub."""
    return is_offline() or library().is_offline_mode()


def require(hub: HubPath) -> None:
    """Ask the hub about a model or data set, once in a process; Unreachable if it is silent.

    The question is asked before any other, as it alone is answered within seconds or given up.
    """
    if is_forbidden():
        variable = 'LMHP_OFFLINE' if is_offline() else 'HF_HUB_OFFLINE'
        raise hub.error(f'not in the cache, and {variable}=1', Unreachable)
    if hub.key in _answered:
        return
    endpoint = library().constants.ENDPOINT
    until, reason = _unreachable.get(endpoint, (0, ''))
    if time.monotonic() < until:
        raise hub.error(reason, Unreachable)
    try:
        with explained(hub):
            blobs.first_answer(lambda: _describe(hub), 'the hub')
    except Unreachable as e:
        _unreachable[endpoint] = (time.monotonic() + blobs.UNREACHABLE_SECONDS, e.reason)
        raise
    _answered.add(hub.key)


def _describe(hub: HubPath) -> Any:
    return api().repo_info(
        hub.repository, revision=hub.revision, repo_type=hub.kind, timeout=blobs.READ_TIMEOUT
    )


def is_reachable() -> bool:
    """Whether the hub answers; False if the user forbids to ask. StorageError if it is silent."""
    if is_forbidden():
        return False
    with contextlib.suppress(NotFound):  # a mirror need not have everything
        require(HubPath(f'{HUB}openai-community/gpt2'))
    return True


# ---------------------------------------------------------------- fetching


def download(hub: HubPath, commit: str, sizes: Mapping[str, int]) -> None:
    """Fetch files, {name: bytes}, of a commit; of several processes one does, the others wait."""
    from tqdm import tqdm

    total = sum(sizes.values())
    _check_room(hub, total)
    with tqdm(
        total=total,
        desc=f'fetching {hub.path}',
        unit='B',
        unit_scale=True,
        disable=total < NO_PROGRESS_BELOW,
    ) as bar:
        for name in sizes:
            with explained(hub, f'{name}: '):
                library().hf_hub_download(
                    hub.repository,
                    name,
                    revision=commit,
                    repo_type=hub.kind,
                    tqdm_class=_Progress(bar).start,
                )


class _Progress:
    """The progress of one file, told to `bar`, that of all files.

    It also ends what would not end: a server that breaks off each time, and always begins anew.
    """

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._breaks = 0

    def start(self, **settings: Any) -> contextlib.AbstractContextManager[_Progress]:
        """What huggingface_hub calls to make a bar."""
        return contextlib.nullcontext(self)

    def update(self, count: int) -> None:
        """So many bytes have come; a negative number are lost, and will come again."""
        if count < 0:
            self._breaks += 1
        if self._breaks > blobs.RETRIES:
            raise ConnectionError(f'the file ended early {self._breaks} times')
        self._bar.update(count)


def _check_room(hub: HubPath, needed: int) -> None:
    """StorageError if the disk of the cache lacks room for so many bytes."""
    folder = library().constants.HF_HUB_CACHE
    place = os.path.abspath(folder)
    while not os.path.exists(place):
        place = os.path.dirname(place)
    if shutil.disk_usage(place).free < needed:
        raise hub.error(
            f'no room for its {needed / 2**20:.0f} MiB in {folder}, which HF_HOME moves'
        )


# ---------------------------------------------------------------- errors


@contextlib.contextmanager
def explained(hub: HubPath, prefix: str = '') -> Iterator[None]:
    """Raise the libraries' errors as StorageErrors. prefix: what they are about."""
    try:
        yield
    except StorageError:
        raise
    except Exception as e:  # those of four libraries, and what they make of a strange answer
        status = getattr(getattr(e, 'response', None), 'status_code', None)
        reason, kind = _here(e) if status is None else _answer(hub, e, status)
        raise hub.error(prefix + reason, kind) from e


def _answer(hub: HubPath, e: Exception, status: int) -> tuple[str, type[StorageError]]:
    """What an answer with an HTTP status of an error means, and the class of our error."""
    from huggingface_hub import constants, errors

    is_model = hub.kind == 'model'
    what = 'model' if is_model else 'data set'
    token = 'set HF_TOKEN to a token'
    if isinstance(e, errors.GatedRepoError):
        page = '/'.join([constants.ENDPOINT, *([] if is_model else ['datasets']), hub.repository])
        return (
            f'this {what} is gated: accept its terms at {page}, and {token} of your account',
            StorageError,
        )
    if isinstance(e, errors.RepositoryNotFoundError):
        return (
            f'the hub has no such {what}, or it is private: then {token} that may read it',
            NotFound,
        )
    if isinstance(e, errors.RevisionNotFoundError):
        return f'this {what} has no revision {hub.revision}', NotFound
    if isinstance(e, errors.RemoteEntryNotFoundError):
        return 'there is no such file', NotFound
    if status in (401, 403):
        return f'the hub refuses it (HTTP {status}): {token} that may read it', StorageError
    return f'the hub answers with HTTP {status}', Unreachable


def _here(e: Exception) -> tuple[str, type[StorageError]]:
    """The same of an error without such an answer."""
    from huggingface_hub import constants

    folder = constants.HF_HUB_CACHE
    number = e.errno if isinstance(e, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT):
        return f'no room for it in {folder}, which HF_HOME moves', StorageError
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return (
            f'the cache folder {folder} cannot be written: set HF_HOME to a folder that can',
            StorageError,
        )
    if type(e) is TimeoutError:
        return f'no answer within {blobs.ANSWER_TIMEOUT} s, is there a network?', Unreachable
    if isinstance(e, (ValueError, KeyError, TypeError, AssertionError)):
        return 'the answer is not from a hub (a log-in page of the network?)', Unreachable
    cause = e.__cause__ or e
    return (str(cause).splitlines() or [type(cause).__name__])[0], Unreachable
